"""Helpers around keys: padding, batches, and slices made from windows and ``cu_seqlens``.

Nothing here talks to another rank or reads a tensor's device memory more than the argument itself asks for. A window
is aligned to the bottom-right corner of its rectangle, as everywhere in this project.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from magi_core.bands import Bands
from magi_core.errors import checked_int
from magi_core.mask_type import AttnMaskType
from magi_core.ranges import AttnRange, AttnRanges
from torch import Tensor

from ..planning.arguments import as_int_list, mask_type_list

CuSeqlens: TypeAlias = "Sequence[int] | np.ndarray | Tensor"

__all__ = [
    "apply_padding",
    "compute_pad_size",
    "infer_attn_mask_from_cu_seqlens",
    "infer_attn_mask_from_sliding_window",
    "infer_varlen_mask_from_batch",
    "pad_at_dim",
    "squash_batch_dim",
    "unpad_at_dim",
]


def compute_pad_size(total_seqlen_q: int, cp_size: int, chunk_size: int) -> int:
    """Tokens to append so that ``cp_size`` ranks hold equally many chunks of ``chunk_size``.

    Raises:
        ValueError: a negative total, or a size below one. TypeError: one that is no int.
    """
    total_seqlen_q = checked_int(total_seqlen_q, "total_seqlen_q", minimum=0)
    cp_size = checked_int(cp_size, "cp_size", minimum=1)
    chunk_size = checked_int(chunk_size, "chunk_size", minimum=1)
    return -total_seqlen_q % (cp_size * chunk_size)


def squash_batch_dim(x: Tensor) -> Tensor:
    """``(batch, seqlen, ...)`` to ``(batch * seqlen, ...)``; a view where strides allow."""
    if x.dim() < 2:
        raise ValueError(f"x must have at least 2 dims, (batch, seqlen, ...), got shape {tuple(x.shape)}")
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def pad_at_dim(x: Tensor, dim: int, pad_size: int, value: float = 0.0, side: str = "right") -> Tensor:
    """Append (``side="right"``) or prepend (``"left"``) ``pad_size`` entries of ``value`` along ``dim``."""
    if side not in ("left", "right"):
        raise ValueError(f"side must be 'left' or 'right', got {side!r}")
    if pad_size < 0:
        raise ValueError(f"pad_size must not be negative, got {pad_size}")
    shape = list(x.shape)
    shape[dim] = pad_size
    pad = x.new_full(shape, value)
    return torch.cat([x, pad] if side == "right" else [pad, x], dim=dim)


def unpad_at_dim(x: Tensor, dim: int, pad_size: int) -> Tensor:
    """Drop the last ``pad_size`` entries along ``dim``; a view."""
    if not 0 <= pad_size <= x.shape[dim]:
        raise ValueError(f"pad_size must be within [0, {x.shape[dim]}], the length of dim {dim}, got {pad_size}")
    return x.narrow(dim, 0, x.shape[dim] - pad_size)


def apply_padding(
    q_ranges: AttnRanges,
    k_ranges: AttnRanges,
    attn_mask_type: Sequence[AttnMaskType],
    total_seqlen: int,
    pad_size: int,
) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType]]:
    """Copies of the slices with one more whose queries are the padding and whose key range is empty.

    Keys made by this package need no such slice: padding is theirs. It is here for callers that build padded masks
    of their own.
    """
    types = mask_type_list(attn_mask_type, len(q_ranges))
    if pad_size < 0:
        raise ValueError(f"pad_size must not be negative, got {pad_size}")
    padded_q, padded_k = q_ranges.clone(), k_ranges.clone()
    if pad_size > 0:
        padded_q.append(AttnRange(total_seqlen, total_seqlen + pad_size))
        padded_k.append(AttnRange(0, 0))
        types.append(AttnMaskType.FULL)
    return padded_q, padded_k, types


def infer_varlen_mask_from_batch(
    batch_size: int, seq_len: int, device: str | torch.device = "cuda"
) -> tuple[Tensor, Tensor]:
    """``cu_seqlens_q, cu_seqlens_k`` of equal sequences: int32 ``[0, s, 2s, ...]``, the same tensor twice."""
    if batch_size < 0 or seq_len < 0:
        raise ValueError(f"batch_size and seq_len must not be negative, got {batch_size} and {seq_len}")
    cu_seqlens = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * seq_len
    return cu_seqlens, cu_seqlens


def _window_limits(window_size: tuple[int, int], seqlen_k: int) -> tuple[int, int]:
    """``(left, right)`` with "no limit" spelt as the whole key length."""
    left, right = (seqlen_k if w == -1 or w >= seqlen_k - 1 else w for w in _checked_window(window_size))
    return left, right


def _checked_window(window_size: Sequence[int]) -> tuple[int, int]:
    message = "window_size must be two integers of at least -1 (-1: no limit on that side), got "
    if len(window_size) != 2:
        raise ValueError(f"{message}{tuple(window_size)}")
    if any(isinstance(w, bool) or not isinstance(w, (int, np.integer)) for w in window_size):
        raise TypeError(f"{message}{tuple(window_size)}")
    if any(w < -1 for w in window_size):
        raise ValueError(f"{message}{tuple(window_size)}")
    return int(window_size[0]), int(window_size[1])


def infer_attn_mask_from_sliding_window(
    q_range: AttnRange, k_range: AttnRange, window_size: tuple[int, int]
) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType]]:
    """The slices of a sliding window over one rectangle, aligned to its bottom-right corner.

    With ``p = i + seqlen_k - seqlen_q``, row ``i`` sees the keys ``p - left .. p + right``; -1 is no limit. Rows
    with ``p < 0`` see nothing. Returns up to three disjoint slices: rows whose left limit is clipped (causal),
    unclipped rows (bi-causal) or rows clipped on both sides (full), rows whose right limit is clipped (inverse
    causal), in the coordinates of the given ranges.

    Raises:
        ValueError: a window entry below -1.
    """
    left, right = _window_limits(window_size, k_range.seqlen)
    seqlen_k = k_range.seqlen
    skipped = max(0, q_range.seqlen - seqlen_k)  # rows above the bottom-right square
    seqlen_q = q_range.seqlen - skipped
    q_start, k_start = q_range.start + skipped, k_range.start
    q_ranges, k_ranges, types = AttnRanges(), AttnRanges(), []

    def emit(q0: int, q1: int, k0: int, k1: int, mask_type: AttnMaskType) -> None:
        if q0 < q1:
            q_ranges.append(AttnRange(q_start + q0, q_start + q1))
            k_ranges.append(AttnRange(k_start + k0, k_start + k1))
            types.append(mask_type)

    offset = seqlen_k - seqlen_q
    left_clipped = min(max(left - offset, 0), seqlen_q)  # rows [0, left_clipped)
    right_free = seqlen_q - min(right, seqlen_q)  # rows [right_free, seqlen_q) are clipped on the right
    first, second = min(left_clipped, right_free), max(left_clipped, right_free)
    emit(0, first, 0, first + offset + right, AttnMaskType.CAUSAL)
    if left_clipped > right_free:
        emit(first, second, 0, seqlen_k, AttnMaskType.FULL)
    else:
        emit(first, second, first + offset - left, second + offset + right, AttnMaskType.BICAUSAL)
    emit(second, seqlen_q, second + offset - left, seqlen_k, AttnMaskType.INVCAUSAL)
    return q_ranges, k_ranges, types


def infer_attn_mask_from_cu_seqlens(
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    global_window_size: int = 0,
) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType], int, int]:
    """Slices of packed documents: ``(q_ranges, k_ranges, mask_types, total_q, total_k)``.

    Args:
        cu_seqlens_q, cu_seqlens_k: prefix sums from 0, as lists, arrays or tensors (read now, never remembered:
            changing the tensor afterwards changes nothing here). Documents of length zero are allowed.
        causal: every document is causal, bottom-right aligned. Not together with a window.
        window_size: ``(left, right)`` keys around the diagonal, -1 for no limit; see
            :func:`infer_attn_mask_from_sliding_window`.
        global_window_size: with a window, every row also sees the leading ``global_window_size`` keys of its
            document, as far as the right limit allows. No pair is emitted twice.

    Raises:
        ValueError: cu_seqlens that do not start at 0, fall, or differ in number; causal together with a window; a
            negative window.
    """
    cu_q, cu_k = as_int_list(cu_seqlens_q, "cu_seqlens_q"), as_int_list(cu_seqlens_k, "cu_seqlens_k")
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if not cu or cu[0] != 0 or any(a > b for a, b in pairwise(cu)):
            raise ValueError(f"{name} must start at 0 and never fall, got {cu}")
    if len(cu_q) != len(cu_k):
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must describe the same number of documents, "
            f"got {len(cu_q) - 1} and {len(cu_k) - 1}"
        )
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, got {causal!r} of {type(causal).__name__}")
    window = _checked_window(window_size)
    has_window = window != (-1, -1)
    if has_window and causal:
        raise ValueError(f"causal must be False when window_size is given, got window_size {window}")
    if global_window_size < 0:
        raise ValueError(f"global_window_size must not be negative, got {global_window_size}")
    q_ranges, k_ranges, types = AttnRanges(), AttnRanges(), []
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        if not has_window:
            q_ranges.append(AttnRange(q0, q1))
            k_ranges.append(AttnRange(k0, k1))
            types.append(AttnMaskType.CAUSAL if causal else AttnMaskType.FULL)
            continue
        if global_window_size == 0:
            part = infer_attn_mask_from_sliding_window(AttnRange(q0, q1), AttnRange(k0, k1), window)
        else:
            part = _window_with_leading_keys(q0, q1, k0, k1, window, global_window_size)
        q_ranges.extend(part[0])
        k_ranges.extend(part[1])
        types.extend(part[2])
    return q_ranges, k_ranges, types, cu_q[-1], cu_k[-1]


def _window_with_leading_keys(
    q0: int, q1: int, k0: int, k1: int, window: tuple[int, int], num_leading: int
) -> tuple[AttnRanges, AttnRanges, list[AttnMaskType]]:
    """A document's window beside its leading keys: two bands that part the columns at ``k0 + num_leading``."""
    left, right = _window_limits(window, k1 - k0)
    q0 = max(q0, q1 - (k1 - k0))  # as for a plain window: rows above the bottom-right square see nothing
    diagonal, middle = k1 - q1, min(k0 + num_leading, k1)
    bands = np.array(
        [
            (q0, q1, k0, middle, k0 - q1, diagonal + right),
            (q0, q1, middle, k1, diagonal - left, diagonal + right),
        ],
        dtype=np.int32,
    )
    q, k, types = Bands(bands).canonical().to_slices()
    return (
        AttnRanges.from_ranges([(int(a), int(b)) for a, b in q]),
        AttnRanges.from_ranges([(int(a), int(b)) for a, b in k]),
        [AttnMaskType.from_int_type(int(t)) for t in types],
    )
