"""Range operators: gather, fill and reduce rows of ranges along one tensor dim, on any device.

The public operators of ``magi_attention.common.range_op``. Ranges are half-open ``[start, end)`` rows of an integer
``(N, 2)`` tensor or array, or a list of pairs; no ranges is a no-op. Not differentiable.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .rows import IntArray, RowRuns, accumulate, expand, wide_dtype

__all__ = ["range_fill_", "range_gather", "range_reduce"]

Ranges: TypeAlias = "Tensor | npt.ArrayLike"

_REDUCE_OPS = ("sum", "avg", "lse")


def _parse(op: str, name: str, ranges: Any, size: int) -> tuple[IntArray, IntArray]:
    """Starts and lengths, int64; ``size`` is the extent that they index."""
    if hasattr(ranges, "to_naive_ranges"):
        ranges = ranges.to_naive_ranges()
    if isinstance(ranges, Tensor):
        ranges = ranges.detach().cpu().numpy()
    array = np.asarray(ranges)
    if array.size == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{op}: {name} must hold integers, got {array.dtype}")
    if array.ndim != 2 or array.shape[1] != 2:
        raise ValueError(f"{op}: {name} must be (N, 2) pairs [start, end), got shape {array.shape}")
    array = array.astype(np.int64)
    bad = (array[:, 0] < 0) | (array[:, 1] < array[:, 0]) | (array[:, 1] > size)
    if bad.any():
        i = int(bad.argmax())
        raise ValueError(
            f"{op}: {name}[{i}] must lie in [0, {size}) with start <= end, got [{array[i, 0]}, {array[i, 1]})"
        )
    return array[:, 0], array[:, 1] - array[:, 0]


def _dim(op: str, tensor: Tensor, dim: int) -> int:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: input must be a tensor, got {type(tensor).__name__}")
    if not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"{op}: dim must be a tensor dim of input ({tensor.dim()}-d), got {dim!r}")
    return dim % tensor.dim()


def _check_hints(
    op: str, lengths: IntArray, cu_range_sizes: Tensor | None, total_size: int | None, row_map: Tensor | None
) -> None:
    """What a caller has computed before must fit; nothing here needs it."""
    total = int(lengths.sum())
    if total_size is not None and total_size != total:
        raise ValueError(f"{op}: total_size must be the {total} rows of the ranges, got {total_size}")
    for name, hint, expected in (
        ("cu_range_sizes", cu_range_sizes, len(lengths) + 1),
        ("row_map", row_map, total),
    ):
        if hint is not None and (not isinstance(hint, Tensor) or hint.shape != (expected,)):
            got = tuple(hint.shape) if isinstance(hint, Tensor) else type(hint).__name__
            raise ValueError(f"{op}: {name} must be a tensor of {expected} elements, got {got}")


@torch.no_grad()
def range_gather(
    input: Tensor,
    ranges: Ranges,
    dim: int = 0,
    output: Tensor | None = None,
    *,
    cu_range_sizes: Tensor | None = None,
    total_size: int | None = None,
    row_map: Tensor | None = None,
    kernel_backend: str | None = None,
) -> Tensor:
    """Concatenate the rows of ``ranges`` along ``dim``.

    Args:
        input: any shape and dtype.
        ranges: ``(N, 2)`` inside ``input.shape[dim]``; may overlap and repeat.
        output: where to put the result, for ``dim=0`` only; allocated when None.
        cu_range_sizes, total_size, row_map: prefix sums of the range sizes ``(N + 1,)``, their sum, the range of each
            row ``(total_size,)``; checked for size, without effect on the result.
        kernel_backend: ``"per_row"``, ``"per_range"`` or None; tunes a GPU kernel, without effect on the result.

    Returns:
        ``input`` with ``dim`` replaced by the total size of the ranges, contiguous; ``output`` when given.
    """
    op = "range_gather"
    dim = _dim(op, input, dim)
    starts, lengths = _parse(op, "ranges", ranges, input.shape[dim])
    _check_hints(op, lengths, cu_range_sizes, total_size, row_map)
    if kernel_backend not in (None, "per_row", "per_range"):
        raise ValueError(f"{op}: kernel_backend must be 'per_row', 'per_range' or None, got {kernel_backend!r}")
    total = int(lengths.sum())
    shape = (*input.shape[:dim], total, *input.shape[dim + 1 :])
    if output is None:
        output = torch.empty(shape, dtype=input.dtype, device=input.device)
    elif dim != 0:
        raise ValueError(f"{op}: output can be given for dim=0 only, got dim={dim}")
    elif output.shape != shape or output.dtype != input.dtype or output.device != input.device:
        raise ValueError(
            f"{op}: output must be {shape} {input.dtype} on {input.device}, "
            f"got {tuple(output.shape)} {output.dtype} on {output.device}"
        )
    runs = RowRuns(starts, np.cumsum(lengths) - lengths, lengths)
    runs.copy(output.movedim(dim, 0), input.movedim(dim, 0))
    return output


@torch.no_grad()
def range_fill_(
    input: Tensor,
    ranges: Ranges,
    val: float | Tensor,
    dim: int = 0,
    *,
    cu_range_sizes: Tensor | None = None,
    total_size: int | None = None,
    row_map: Tensor | None = None,
) -> Tensor:
    """Set the rows of ``ranges`` along ``dim`` to ``val``, in place; returns ``input``.

    Args: as `range_gather`.
    """
    op = "range_fill_"
    dim = _dim(op, input, dim)
    starts, lengths = _parse(op, "ranges", ranges, input.shape[dim])
    _check_hints(op, lengths, cu_range_sizes, total_size, row_map)
    if isinstance(val, Tensor) and val.numel() != 1:
        raise ValueError(f"{op}: val must be a number, got a tensor of shape {tuple(val.shape)}")
    rows = torch.from_numpy(expand(starts, lengths)).to(input.device)
    if rows.numel():
        input.index_fill_(dim, rows, val)
    return input


@torch.no_grad()
def range_reduce(
    input: Tensor,
    output: Tensor,
    input_ranges: Ranges,
    output_ranges: Ranges,
    dim: int = 0,
    deterministic: bool = False,
    reduce_op: str = "sum",
    reduce_dtype: torch.dtype | None = None,
    acc_reduce: bool = True,
    input_lse: Tensor | None = None,
    output_lse: Tensor | None = None,
    *,
    cu_range_sizes: Tensor | None = None,
    total_size: int | None = None,
    row_map: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Reduce range n of ``input`` into range n of ``output``, in place.

    Every output row takes its inputs in the order of the ranges, so results are bitwise repeatable on every device
    whatever ``deterministic`` says. Output ranges may coincide or overlap in part.

    Args:
        input, output: of one shape but for ``dim``, floating dtypes.
        input_ranges, output_ranges: ``(N, 2)``, range n of equal length on both sides.
        deterministic: accepted; always true in effect.
        reduce_op: ``"sum"``; ``"avg"``: ``(output + sum) / (1 + count)``, or ``sum / count`` without ``acc_reduce``;
            ``"lse"``: merge of (out, lse) states, 3-d values with 2-d float32 (or float64) lse, ``dim=0``.
        reduce_dtype: dtype to reduce in; the widest of input, output and float32 when None.
        acc_reduce: start from what ``output`` holds; else rows that some range covers start from nothing. Other rows
            stay as they are.

    Returns:
        ``output``, or ``(output, output_lse)`` for ``"lse"``.
    """
    op = "range_reduce"
    dim = _dim(op, input, dim)
    if not isinstance(output, Tensor):
        raise TypeError(f"{op}: output must be a tensor, got {type(output).__name__}")
    if (
        input.dim() != output.dim()
        or input.device != output.device
        or any(a != b for i, (a, b) in enumerate(zip(input.shape, output.shape, strict=True)) if i != dim)
    ):
        raise ValueError(
            f"{op}: output must have the shape of input but for dim {dim}, on its device ({tuple(input.shape)}, "
            f"{input.device}), got {tuple(output.shape)}, {output.device}"
        )
    for name, flag in (("deterministic", deterministic), ("acc_reduce", acc_reduce)):
        if not isinstance(flag, bool):
            raise TypeError(f"{op}: {name} must be a bool, got {type(flag).__name__}")
    if reduce_op not in _REDUCE_OPS:
        raise ValueError(f"{op}: reduce_op must be one of {', '.join(_REDUCE_OPS)}, got {reduce_op!r}")
    if not (input.is_floating_point() and output.is_floating_point()):
        raise TypeError(f"{op}: input and output must be floating, got {input.dtype} and {output.dtype}")
    starts_in, lengths = _parse(op, "input_ranges", input_ranges, input.shape[dim])
    starts_out, lengths_out = _parse(op, "output_ranges", output_ranges, output.shape[dim])
    if len(lengths) != len(lengths_out) or (lengths != lengths_out).any():
        raise ValueError(
            f"{op}: input_ranges and output_ranges must pair ranges of equal length, "
            f"got lengths {lengths.tolist()} and {lengths_out.tolist()}"
        )
    _check_hints(op, lengths, cu_range_sizes, total_size, row_map)
    wide = wide_dtype(input.dtype, output.dtype)
    if reduce_dtype is not None:
        if not isinstance(reduce_dtype, torch.dtype) or not reduce_dtype.is_floating_point:
            raise TypeError(f"{op}: reduce_dtype must be a floating torch.dtype or None, got {reduce_dtype!r}")
        wide = reduce_dtype
    if reduce_op == "lse":
        if dim != 0 or input.dim() != 3:
            raise ValueError(f"{op}: 'lse' needs (rows, heads, head_dim) and dim=0, got {input.dim()}-d and dim={dim}")
        for name, lse, like in (("input_lse", input_lse, input), ("output_lse", output_lse, output)):
            if not isinstance(lse, Tensor) or lse.dtype not in (torch.float32, torch.float64):
                got = lse.dtype if isinstance(lse, Tensor) else type(lse).__name__
                raise TypeError(f"{op}: {name} must be a float32 or float64 tensor with 'lse', got {got}")
            if lse.shape != like.shape[:2]:
                raise ValueError(f"{op}: {name} must be {tuple(like.shape[:2])}, got {tuple(lse.shape)}")
    elif input_lse is not None or output_lse is not None:
        raise ValueError(f"{op}: input_lse and output_lse need reduce_op='lse', got {reduce_op!r}")
    runs = RowRuns(starts_in, starts_out, lengths)
    if not acc_reduce:
        range_fill_(output, output_ranges, 0.0, dim)
        if output_lse is not None:
            range_fill_(output_lse, output_ranges, float("-inf"))
    accumulate(
        runs,
        reduce_op,
        input.movedim(dim, 0),
        output.movedim(dim, 0),
        input_lse=input_lse,
        into_lse=output_lse,
        wide=wide,
        count_own=acc_reduce,
    )
    if output_lse is not None:
        return output, output_lse
    return output
