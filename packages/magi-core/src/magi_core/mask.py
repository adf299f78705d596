"""Masks: which keys each query sees. Built by name, from slices, or from what other libraries call a mask."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from . import builders
from .bands import Bands, Int32Array, Slices
from .errors import checked_int, checked_int32_array
from .mask_type import mask_type_codes
from .ranges import range_array


class Mask:
    """An immutable mask of ``total_q`` rows and ``total_k`` columns.

    Two masks are equal when they show the same cells, however they were written.

    >>> mask = Mask.documents([3, 5], causal=True)
    >>> mask.area()
    21
    """

    __slots__ = ("_slices", "bands", "total_k", "total_q")

    bands: Bands
    total_q: int
    total_k: int

    def __init__(self, bands: Bands, total_q: int, total_k: int) -> None:
        """Raises ValueError when a band reaches past a total."""
        self._set(bands, total_q, total_k)

    def _set(self, bands: Bands, total_q: int, total_k: int, slices: Slices | None = None) -> None:
        if not isinstance(bands, Bands):
            raise TypeError(f"bands must be Bands, got {type(bands).__name__}")
        self.total_q = checked_int(total_q, "total_q", minimum=0)
        self.total_k = checked_int(total_k, "total_k", minimum=0)
        self.bands = bands
        self._slices = slices
        if len(bands):
            data = bands.data
            for axis, total, (low, high) in (("q", self.total_q, (0, 1)), ("k", self.total_k, (2, 3))):
                wrong = np.flatnonzero((data[:, low] < 0) | (data[:, high] > total))
                if len(wrong):
                    i = int(wrong[0])
                    raise ValueError(
                        f"bands must lie within total_{axis} ({total}), got {axis} "
                        f"[{data[i, low]}, {data[i, high]}) in band {i}"
                    )

    @classmethod
    def _of_rows(cls, rows: Iterable[builders.BandRow], total_q: int, total_k: int) -> Mask:
        data = np.array(list(rows), dtype=np.int64).reshape(-1, 6)
        return cls(Bands(data).canonical(), total_q, total_k)

    # From slices

    @classmethod
    def from_slices(
        cls,
        q_ranges: Any,
        k_ranges: Any,
        mask_types: Any = None,
        *,
        total_q: int | None = None,
        total_k: int | None = None,
    ) -> Mask:
        """The union of slices. Double cover is for :meth:`check` (and for building a plan) to find.

        Args:
            q_ranges, k_ranges: AttnRanges, pairs, ``(n, 2)`` arrays or tensors, half-open.
            mask_types: one type for all or one each (AttnMaskType, "full", "causal", "inv_causal", "bi_causal", or
                0..3); full when None.
            total_q, total_k: tokens; the largest end when None.

        Raises:
            ValueError: a range that is reversed, negative or reaches past its total, an unknown type, numbers of
                slices that differ. TypeError: no integers.
        """
        q, k = range_array(q_ranges, "q_ranges"), range_array(k_ranges, "k_ranges")
        if len(q) != len(k):
            raise ValueError(f"k_ranges must have as many ranges as q_ranges ({len(q)}), got {len(k)}")
        types = mask_type_codes(mask_types, len(q))
        if total_q is None:
            total_q = int(q[:, 1].max(initial=0))
        if total_k is None:
            total_k = int(k[:, 1].max(initial=0))
        bands = Bands.from_slices(q, k, types, total_q=total_q, total_k=total_k)
        kept = Slices(*(_frozen_copy(x) for x in (q, k, types)))
        mask = object.__new__(cls)
        mask._set(bands, total_q, total_k, kept)
        return mask

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any = None,
        *,
        causal: bool = False,
        window: int | Sequence[int] = (-1, -1),
    ) -> Mask:
        """Packed documents given by their boundaries.

        Args:
            cu_seqlens_q, cu_seqlens_k: ``(batch + 1,)`` prefix sums from 0; those of k are those of q when None. Empty
                documents are allowed.
            causal: row i of a document sees its columns up to ``i + sk - sq``. Not together with a window.
            window: ``(left, right)`` keys around that diagonal, -1 for no limit; an int W is W keys up to the
                diagonal.

        Raises:
            ValueError: boundaries that fall or do not start at 0, a negative window, causal with a window.
        """
        cu_q = builders.checked_cu_seqlens(cu_seqlens_q, "cu_seqlens_q")
        cu_k = cu_q if cu_seqlens_k is None else builders.checked_cu_seqlens(cu_seqlens_k, "cu_seqlens_k")
        if len(cu_q) != len(cu_k):
            raise ValueError(f"cu_seqlens_k must have as many entries as cu_seqlens_q ({len(cu_q)}), got {len(cu_k)}")
        limits = builders.checked_window(window)
        if limits != (-1, -1):
            if causal:
                raise ValueError(f"causal must be False when a window is given, got window {window}")
            return cls._of_rows(builders.windowed_documents(cu_q, cu_k, limits), cu_q[-1], cu_k[-1])
        return cls._of_rows(builders.documents(cu_q, cu_k, causal), cu_q[-1], cu_k[-1])

    # By name

    @classmethod
    def full(cls, total_q: int, total_k: int | None = None) -> Mask:
        """Every row sees every column."""
        return cls.documents(total_q, total_q if total_k is None else total_k)

    @classmethod
    def causal(cls, total_q: int, total_k: int | None = None) -> Mask:
        """Row i sees columns up to ``i + total_k - total_q``."""
        return cls.documents(total_q, total_q if total_k is None else total_k, causal=True)

    @classmethod
    def documents(cls, lengths: Any, lengths_k: Any = None, *, causal: bool = False) -> Mask:
        """Packed documents that see themselves only.

        Args:
            lengths, lengths_k: tokens of each document in q and in k (as in q when None); an int is one document.
            causal: bottom-right aligned causal documents.
        """
        q = builders.checked_lengths(lengths, "lengths")
        k = q if lengths_k is None else builders.checked_lengths(lengths_k, "lengths_k")
        if len(q) != len(k):
            raise ValueError(f"lengths_k must have as many documents as lengths ({len(q)}), got {len(k)}")
        cu_q, cu_k = builders.boundaries(q), builders.boundaries(k)
        return cls._of_rows(builders.documents(cu_q, cu_k, causal), cu_q[-1], cu_k[-1])

    @classmethod
    def window(cls, lengths: Any, window: int | Sequence[int], lengths_k: Any = None) -> Mask:
        """A sliding window in each document.

        Args:
            lengths, lengths_k: as for :meth:`documents`.
            window: ``(left, right)``: with ``p = i + sk - sq``, row i sees columns ``p - left .. p + right``, both
                ends included; -1 is no limit on that side. An int W is a causal window of exactly W columns, the
                row's own included: ``(W - 1, 0)``. Rows with ``p < 0`` see nothing.

        Raises:
            ValueError: a side below -1, or W below 1.
        """
        q = builders.checked_lengths(lengths, "lengths")
        k = q if lengths_k is None else builders.checked_lengths(lengths_k, "lengths_k")
        if len(q) != len(k):
            raise ValueError(f"lengths_k must have as many documents as lengths ({len(q)}), got {len(k)}")
        cu_q, cu_k = builders.boundaries(q), builders.boundaries(k)
        limits = builders.checked_window(window)
        return cls._of_rows(builders.windowed_documents(cu_q, cu_k, limits), cu_q[-1], cu_k[-1])

    @classmethod
    def prefix_lm(cls, lengths: Any, prefix: Any) -> Mask:
        """In each document, every row sees the first ``prefix`` columns, and those up to itself.

        Args:
            lengths: as for :meth:`documents`. prefix: one length for all documents, or one each.
        """
        q = builders.checked_lengths(lengths, "lengths")
        prefixes = builders.checked_lengths(prefix, "prefix")
        if len(prefixes) == 1:
            prefixes *= len(q)
        if len(prefixes) != len(q):
            raise ValueError(f"prefix must be one length or one per document ({len(q)}), got {len(prefixes)}")
        return cls._of_rows(builders.prefix_lm(q, prefixes), sum(q), sum(q))

    @classmethod
    def block_causal(cls, lengths: Any, block_size: int) -> Mask:
        """In each document, a block of ``block_size`` rows sees its own block and all blocks before it."""
        q = builders.checked_lengths(lengths, "lengths")
        block_size = checked_int(block_size, "block_size", minimum=1)
        return cls._of_rows(builders.block_causal(q, block_size), sum(q), sum(q))

    @classmethod
    def prefix_tree(cls, parents: Any, lengths: Any) -> Mask:
        """Sequences that share prefixes, stored once: a node sees its ancestors, and itself causally.

        Args:
            parents: index of each node's parent, smaller than its own, or -1 for a root.
            lengths: tokens of each node; nodes lie one after another.
        """
        above = checked_int32_array(parents, "parents", (None,))
        nodes = builders.checked_lengths(lengths, "lengths")
        if len(above) != len(nodes):
            raise ValueError(f"lengths must have one entry per parent ({len(above)}), got {len(nodes)}")
        wrong = np.flatnonzero((above < -1) | (above >= np.arange(len(above))))
        if len(wrong):
            i = int(wrong[0])
            raise ValueError(f"parents[{i}] must be -1 or a node before {i}, got {above[i]}")
        return cls._of_rows(builders.prefix_tree(above.tolist(), nodes), sum(nodes), sum(nodes))

    # From other forms

    @classmethod
    def from_dense(cls, dense: Any) -> Mask:
        """The mask of a ``(total_q, total_k)`` bool array or tensor (true: visible), exactly."""
        return cls(*builders.from_dense(dense))

    @classmethod
    def from_block_mask(cls, block_mask: Any, *, batch: int | None = None, head: int | None = None) -> Mask:
        """The mask of a torch FlexAttention ``BlockMask``, exactly.

        Full blocks are taken as they are; inside partial blocks ``mask_mod`` decides.

        Args:
            batch, head: which mask to take when ``block_mask`` has several; may be None when it has one.
        """
        return cls(*builders.from_block_mask(block_mask, batch, head))

    # What it says

    def slices(self) -> Slices:
        """``q_ranges (n, 2)``, ``k_ranges (n, 2)``, ``mask_types (n,)``, int32: as given, or made from the bands."""
        if self._slices is None:
            self._slices = Slices(*(_frozen_copy(x) for x in self.bands.to_slices()))
        return self._slices

    def area(self) -> int:
        """Visible pairs; a pair that two slices cover counts twice."""
        return self.bands.area()

    def to_dense(self) -> npt.NDArray[np.bool_]:
        """``(total_q, total_k)`` bool: true where visible."""
        return self.bands.to_dense(self.total_q, self.total_k)

    def check(self) -> None:
        """Raises ValueError naming two slices that cover a pair twice."""
        self.bands.check_disjoint()

    @property
    def digest(self) -> int:
        """64 bits that agree for masks of the same cells and totals."""
        mixed = self.bands.digest
        for total in (self.total_q, self.total_k):
            mixed = ((mixed ^ total) * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15) & (2**64 - 1)
            mixed ^= mixed >> 29
        return mixed

    def picture(self, width: int = 64, height: int | None = None) -> str:
        """The mask as text: a character per cell of a grid, darker where more is visible (rows are queries)."""
        from . import drawing

        return drawing.picture(self, width, height)

    def show(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        ranks: npt.ArrayLike | None = None,
        width: int = 64,
        ax: Any = None,
        title: str | None = None,
    ) -> None:
        """Draws the mask: as text on standard output, or with matplotlib.

        Args:
            path: a picture file to write (PNG, PDF or SVG by its suffix).
            ranks: ``(total_q,)`` rank of each query row: one colour each. Only drawn with matplotlib.
            width: columns of the text.
            ax: matplotlib axes to draw into instead of writing a file.
            title: above the picture.
        """
        from . import drawing

        if path is None and ax is None:
            if ranks is not None:
                raise ValueError("ranks need a path or ax to be drawn with colours, got neither")
            if title:
                print(title)
            print(self.picture(width))
            return
        drawing.draw(self, path, ranks=ranks, ax=ax, title=title)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        return (self.total_q, self.total_k) == (other.total_q, other.total_k) and bool(
            self.bands.canonical() == other.bands.canonical()
        )

    def __hash__(self) -> int:
        return hash((self.total_q, self.total_k, self.bands.digest))

    def __repr__(self) -> str:
        return f"Mask(total_q={self.total_q}, total_k={self.total_k}, area={self.area()}, bands={len(self.bands)})"


def _frozen_copy(array: Int32Array) -> Int32Array:
    copy: Int32Array = array.copy()
    copy.setflags(write=False)
    return copy
