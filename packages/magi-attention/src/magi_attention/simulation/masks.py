"""Packs of documents and the tiles that pieces of them touch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .machine import TILE

Array = npt.NDArray[np.int64]

# Upper end of each bin of document lengths and its share in percent: the published benchmark's data (reference
# "distributed", section 9.2); a document has the length of its bin's centre.
_BINS = [
    (1, 10, 0.22), (11, 50, 2.91), (51, 100, 5.20), (101, 200, 10.23), (201, 500, 28.19), (501, 1024, 24.64),
    (1025, 2048, 15.65), (2049, 4096, 7.34), (4097, 8192, 3.05), (8193, 16384, 1.29), (16385, 32768, 0.85),
    (32769, 65536, 0.14), (65537, 131072, 0.17), (131073, 196608, 0.14),
]  # fmt: skip


def up(x: Any) -> Any:
    """Rounded up to whole tiles."""
    return -(-np.asarray(x) // TILE) * TILE


@dataclass(frozen=True)
class Documents:
    """Packed documents, each full or causal; one document is a plain full or causal mask.

    Attributes:
        lengths: of the documents.
        causal: whether each is causal.
        window: keys a row of a causal document sees at most; 0 is all.
    """

    lengths: tuple[int, ...]
    causal: bool
    window: int = 0

    @property
    def total(self) -> int:
        """Tokens."""
        return sum(self.lengths)

    @cached_property
    def array(self) -> Array:
        """The lengths, int64."""
        return np.array(self.lengths, np.int64)

    @cached_property
    def area(self) -> int:
        """Visible pairs, exact."""
        n = self.array
        if not self.causal:
            return int((n * n).sum())
        if not self.window:
            return int((n * (n + 1) // 2).sum())
        w = np.minimum(n, self.window)
        return int((w * (w + 1) // 2 + (n - w) * w).sum())

    def bands(self) -> Any:
        """The mask as ``magi_core.bands.Bands``."""
        from magi_core.mask import Mask

        if self.window:
            return Mask.window(list(self.lengths), self.window).bands
        return Mask.documents(list(self.lengths), causal=self.causal).bands

    @classmethod
    def packs(cls, total: int, causal: bool, count: int, seed: int = 42) -> list[Documents]:
        """Packs of ``total`` tokens of the published length distribution: long documents are cut into quarters of a
        pack, all are shuffled and packed one after another, the last of a pack cut at its end."""
        rng = np.random.default_rng(seed)
        share = np.array([b[2] for b in _BINS])
        centres = np.array([(b[0] + b[1]) // 2 for b in _BINS])
        drawn = centres[rng.choice(len(_BINS), size=20_000 + 2 * count * total // 1000, p=share / share.sum())]
        longest = max(1, total // 4)
        pieces = np.concatenate(_cut(drawn, longest))
        ends = np.cumsum(rng.permutation(pieces))
        borders = np.union1d(np.concatenate([[0], ends]), np.arange(0, (count + 1) * total, total))
        found = []
        for pack in range(count):
            inside = borders[(borders >= pack * total) & (borders <= (pack + 1) * total)]
            found.append(cls(tuple(np.diff(inside).tolist()), causal))
        return found


def _cut(lengths: Array, longest: int) -> list[Array]:
    """The lengths in pieces of at most ``longest``."""
    whole = np.repeat(np.full(len(lengths), longest, np.int64), lengths // longest)
    rest = lengths % longest
    return [whole, rest[rest > 0]]
