"""The mask suite of tests and benchmarks: every mask is a list of slices ``(q0, q1, k0, k1, type)``.

``type``: 0 full, 1 causal (bottom-right aligned), 2 inverse causal (top-left aligned), 3 both. Lengths of packed
documents follow a long-context distribution for packs of 256k tokens, scaled to the length asked for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

__all__ = ["KINDS", "ODD", "Slice", "area", "document_lengths", "make", "random_bands"]

Slice = tuple[int, int, int, int, int]

# (shortest, longest, weight): lengths in units of 1024 tokens of a pack of 262144.
_LENGTH_BUCKETS = (
    (0, 2, 0.16),
    (2, 4, 0.05),
    (4, 8, 0.04),
    (8, 16, 0.06),
    (16, 32, 0.08),
    (32, 64, 0.21),
    (64, 128, 0.4),
    (128, 256, 0.2),
    (256, 512, 0.05),
    (512, 1024, 0.04),
)
_PACK = 262144


def document_lengths(total: int, seed: int = 0, largest_share: int = 4) -> list[int]:
    """Lengths of packed documents that sum to ``total``, none longer than ``total // largest_share``."""
    draw = random.Random(seed)
    weights = [weight for _, _, weight in _LENGTH_BUCKETS]
    lengths: list[int] = []
    left = total
    while left > 0:
        low, high, _ = draw.choices(_LENGTH_BUCKETS, weights=weights)[0]
        length = max(64, int(draw.uniform(low, high) * 1024 * total / _PACK))
        lengths.append(min(length, max(1, total // largest_share), left))
        left -= lengths[-1]
    return lengths


def _documents(total: int, seed: int) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(document_lengths(total, seed), initial=0)))


def _full(total: int, window: int, block: int, seed: int) -> list[Slice]:
    return [(0, total, 0, total, 0)]


def _causal(total: int, window: int, block: int, seed: int) -> list[Slice]:
    return [(0, total, 0, total, 1)]


def _varlen_full(total: int, window: int, block: int, seed: int) -> list[Slice]:
    return [(a, b, a, b, 0) for a, b in _documents(total, seed)]


def _varlen_causal(total: int, window: int, block: int, seed: int) -> list[Slice]:
    return [(a, b, a, b, 1) for a, b in _documents(total, seed)]


def _swa_causal(total: int, window: int, block: int, seed: int) -> list[Slice]:
    """Each token sees itself and ``window - 1`` tokens before it."""
    if total <= window:
        return [(0, total, 0, total, 1)]
    return [(0, window, 0, window, 1), (window, total, 1, total, 3)]


def _varlen_block_causal(total: int, window: int, block: int, seed: int) -> list[Slice]:
    """Documents in blocks: a token sees its block and the blocks of its document before it."""
    return [
        (start, min(start + block, b), a, min(start + block, b), 0)
        for a, b in _documents(total, seed)
        for start in range(a, b, block)
    ]


def _prefix_tree(total: int, window: int, block: int, seed: int) -> list[Slice]:
    """One prompt of a quarter of the tokens, and 16 answers that each see the prompt and themselves."""
    prompt = total // 4
    answer = (total - prompt) // 16
    slices: list[Slice] = [(0, prompt, 0, prompt, 1)]
    for i in range(16):
        start, end = prompt + i * answer, (prompt + (i + 1) * answer if i < 15 else total)
        slices += [(start, end, 0, prompt, 0), (start, end, start, end, 1)]
    return slices


def _pairs(total: int, window: int, block: int, seed: int) -> list[Slice]:
    """Documents of two tokens."""
    return [(a, a + 2, a, a + 2, 0) for a in range(0, total - 1, 2)]


_MAKERS: dict[str, Callable[[int, int, int, int], list[Slice]]] = {
    "full": _full,
    "causal": _causal,
    "varlen_full": _varlen_full,
    "varlen_causal": _varlen_causal,
    "swa_causal": _swa_causal,
    "varlen_block_causal": _varlen_block_causal,
    "prefix_tree": _prefix_tree,
    "pairs": _pairs,
}
KINDS = ("full", "causal", "varlen_full", "varlen_causal", "swa_causal", "varlen_block_causal")
ODD = ("prefix_tree", "pairs")


def make(kind: str, total: int, window: int = 1024, block: int = 2048, seed: int = 0) -> list[Slice]:
    """Slices of mask ``kind`` (one of :data:`KINDS` or :data:`ODD`) over ``total`` tokens.

    Args:
        window: keys per row of ``swa_causal``.
        block: tokens per block of ``varlen_block_causal``.
        seed: of the document lengths.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in _MAKERS:
        raise ValueError(f"kind must be one of {', '.join(_MAKERS)}, got {kind!r}")
    return _MAKERS[kind](total, window, block, seed)


def random_bands(total_q: int, total_k: int, num_slices: int, seed: int = 0) -> list[Slice]:
    """Slices of random types over random rectangles of which no two share a cell; some are empty."""
    draw = random.Random(seed)
    taken: list[tuple[int, int, int, int]] = []
    slices: list[Slice] = []
    for _ in range(20 * num_slices):
        if len(slices) == num_slices:
            break
        q0, q1 = sorted(draw.randint(0, total_q) for _ in range(2))
        k0, k1 = sorted(draw.randint(0, total_k) for _ in range(2))
        if any(q0 < b and a < q1 and k0 < d and c < k1 for a, b, c, d in taken):
            continue
        taken.append((q0, q1, k0, k1))
        slices.append((q0, q1, k0, k1, draw.randint(0, 3)))
    return slices


def area(slices: Sequence[Slice]) -> int:
    """Visible pairs, doubly covered ones counted twice, in closed form."""
    total = 0
    for q0, q1, k0, k1, mask_type in slices:
        rows, columns = q1 - q0, k1 - k0
        if rows <= 0 or columns <= 0:
            continue
        if mask_type == 0:
            total += rows * columns
        elif mask_type == 3:
            total += rows * max(0, columns - rows + 1)
        else:
            side = min(rows, columns)
            total += side * (side + 1) // 2 + rows * max(0, columns - rows)
    return total
