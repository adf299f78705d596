"""`group_cast` and `group_reduce`: splits of rows to any set of ranks, and partial results back to one owner each.

The public functions of the collective layer. Semantics: for a pair of ranks (s, r), the input splits of s that name
r, concatenated in order, are the output splits of r whose source is s, concatenated in order. Totals must agree,
split boundaries need not. `group_reduce` is the transpose.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .groups import Communicator, GroupLike, as_communicator
from .range_exchange import REDUCE_OPS, GroupReduceOp, RangeExchange
from .work import WorkWithPostProcessFn

__all__ = ["GroupReduceOp", "group_cast", "group_reduce"]

Tensors: TypeAlias = "Tensor | tuple[Tensor, ...] | list[Tensor]"
Ints: TypeAlias = "Sequence[int] | Tensor"
IntLists: TypeAlias = "Sequence[Sequence[int]] | Tensor"


class _Call:
    """The arguments of one call, checked one by one, with the rank and the function in every message."""

    def __init__(self, name: str, comm: Communicator) -> None:
        self.comm = comm
        self.where = f"rank {comm.rank} of {comm.size}: {name}"

    def error(self, message: str) -> ValueError:
        return ValueError(f"{self.where}: {message}")

    def type_error(self, message: str) -> TypeError:
        return TypeError(f"{self.where}: {message}")

    def ints(self, name: str, value: Any) -> list[int]:
        """A list of integers out of a sequence or a 1-d tensor (a tensor on a GPU is copied to the host)."""
        if isinstance(value, (Tensor, np.ndarray)):
            if value.ndim != 1 or not _is_integral(value):
                raise self.type_error(
                    f"{name} must be a list or a 1-d integer tensor, got {value.ndim}-d of {value.dtype}"
                )
            return [int(x) for x in value.tolist()]
        if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
            raise self.type_error(f"{name} must be a list of integers, got {type(value).__name__}")
        items = list(value)
        for i, item in enumerate(items):
            if isinstance(item, bool) or not isinstance(item, (int, np.integer)):
                raise self.type_error(f"{name}[{i}] must be an integer, got {type(item).__name__}")
        return [int(x) for x in items]

    def splits(self, name: str, value: Any) -> list[int]:
        sizes = self.ints(name, value)
        for i, size in enumerate(sizes):
            if size < 0:
                raise self.error(f"{name}[{i}] must not be negative, got {size}")
        return sizes

    def one_rank_each(self, name: str, value: Any, splits_name: str, splits: list[int]) -> list[int]:
        """One rank per split; the world size stands for "none" in tensors, where the split must be empty."""
        ranks = self.ints(name, value)
        if len(ranks) != len(splits):
            raise self.error(f"{name} must have one rank per split of {splits_name} ({len(splits)}), got {len(ranks)}")
        padded = isinstance(value, Tensor)
        for i, rank in enumerate(ranks):
            if padded and rank == self.comm.size and splits[i] == 0:
                ranks[i] = 0
            elif not 0 <= rank < self.comm.size:
                raise self.error(f"{name}[{i}] must be a rank of the group, 0 to {self.comm.size - 1}, got {rank}")
        return ranks

    def some_ranks_each(self, name: str, value: Any, splits_name: str, splits: list[int]) -> list[list[int]]:
        """Any set of ranks per split; rows of a 2-d tensor are padded with -1."""
        if isinstance(value, (Tensor, np.ndarray)):
            if value.ndim != 2 or not _is_integral(value):
                raise self.type_error(
                    f"{name} must be a list of lists or a 2-d integer tensor, got {value.ndim}-d of {value.dtype}"
                )
            sets = [[int(r) for r in row if r != -1] for row in value.tolist()]
        elif isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
            raise self.type_error(f"{name} must be a list of lists of ranks, got {type(value).__name__}")
        else:
            sets = [self.ints(f"{name}[{i}]", ranks) for i, ranks in enumerate(value)]
        if len(sets) != len(splits):
            raise self.error(f"{name} must have one list per split of {splits_name} ({len(splits)}), got {len(sets)}")
        for i, ranks in enumerate(sets):
            if len(set(ranks)) != len(ranks):
                raise self.error(f"{name}[{i}] must be distinct ranks, got {ranks}")
            if ranks and not (min(ranks) >= 0 and max(ranks) < self.comm.size):
                raise self.error(f"{name}[{i}] must be ranks of the group, 0 to {self.comm.size - 1}, got {ranks}")
        return sets

    def tensors(self, name: str, value: Any) -> list[Tensor]:
        items = [value] if isinstance(value, Tensor) else value
        if not isinstance(items, (list, tuple)) or not items:
            raise self.type_error(f"{name} must be a tensor or a tuple of tensors, got {type(value).__name__}")
        for i, item in enumerate(items):
            label = name if isinstance(value, Tensor) else f"{name}[{i}]"
            if not isinstance(item, Tensor):
                raise self.type_error(f"{label} must be a tensor, got {type(item).__name__}")
            if item.dim() == 0:
                raise self.error(f"{label} must have rows, got a 0-d tensor")
        return list(items)

    def rows(self, name: str, tensors: list[Tensor], expected: int, splits_name: str, exact: bool) -> None:
        for tensor in tensors:
            if tensor.shape[0] < expected or (exact and tensor.shape[0] != expected):
                least = "" if exact else "at least "
                raise self.error(
                    f"{name} must have {least}sum({splits_name}) = {expected} rows, got shape {tuple(tensor.shape)}"
                )

    def lse(self, name: str, value: Any, of: str, like: Tensor) -> Tensor:
        if not isinstance(value, Tensor):
            raise self.type_error(f"{name} must be a tensor (rows, heads), got {type(value).__name__}")
        if value.dtype not in (torch.float32, torch.float64):
            raise self.type_error(f"{name} must be float32 or float64, got {value.dtype}")
        if value.shape != like.shape[:-1]:
            raise self.error(f"{name} must have the shape of {of} without its last dim {tuple(like.shape[:-1])}, "
                             f"got {tuple(value.shape)}")  # fmt: skip
        return value

    def exchange(self, names: tuple[str, str], outgoing: list[tuple[int, int, int]],
                 incoming: list[tuple[int, int, int]]) -> RangeExchange:  # fmt: skip
        """The exchange in cast direction; ``names`` are the arguments that describe its two sides."""
        own = self.comm.rank
        given = sum(b - a for r, a, b in outgoing if r == own)
        taken = sum(b - a for r, a, b in incoming if r == own)
        if given != taken:
            raise self.error(f"{names[0]} and {names[1]} must agree on what this rank sends to itself, "
                             f"got {given} and {taken} rows")  # fmt: skip
        return RangeExchange(self.comm, incoming, outgoing)


def _is_integral(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    return bool(np.issubdtype(value.dtype, np.integer))


def _ranges(sizes: list[int]) -> list[tuple[int, int]]:
    ends = np.cumsum(np.asarray(sizes, np.int64)).tolist()
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _like(tensors: list[Tensor], value: Any) -> Any:
    """``tensors`` in the form of ``value``: one tensor or a tuple."""
    return tensors[0] if isinstance(value, Tensor) else tuple(tensors)


@torch.no_grad()
def group_cast(
    input: Tensors,
    output: Tensors | None,
    input_split_sizes: Ints,
    output_split_sizes: Ints,
    dst_indices: IntLists,
    src_index: Ints,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    cast_lse: bool = False,
    input_lse: Tensor | None = None,
    output_lse: Tensor | None = None,
) -> WorkWithPostProcessFn:
    """Send each split of ``input`` to a set of ranks; receive one split of ``output`` from each named source.

    Args:
        input: ``(sum(input_split_sizes), ...)``, any dtype, or a tuple of such (one collective for all).
        output: ``(sum(output_split_sizes) or more, ...)`` like ``input``, or None to allocate. Rows past the sum are
            left alone.
        input_split_sizes, output_split_sizes: rows per split, zeros allowed; lists, or 1-d tensors (copied to the
            host).
        dst_indices: per input split the distinct ranks it goes to; may be empty, may name this rank. A 2-d
            tensor ``(splits, world_size)`` is padded with -1.
        src_index: per output split the rank it comes from. A tensor may hold ``world_size`` at empty splits.
        group: process group, one-dimensional mesh, communicator, or None for the default group.
        async_op: return before the transfer is over.
        cast_lse: also move ``input_lse``, ``(rows, heads)`` float32, into ``output_lse`` by the same splits.

    Returns:
        A work; ``wait_post_process(output)`` ends it (call it exactly once, the buffer may be left out) and returns
        the output, or ``(output, output_lse)``. Not differentiable.

    Raises:
        ValueError, TypeError: naming rank and argument, before anything is sent.
    """
    call = _Call("group_cast", as_communicator(group))
    inputs = call.tensors("input", input)
    sizes_in = call.splits("input_split_sizes", input_split_sizes)
    sizes_out = call.splits("output_split_sizes", output_split_sizes)
    targets = call.some_ranks_each("dst_indices", dst_indices, "input_split_sizes", sizes_in)
    sources = call.one_rank_each("src_index", src_index, "output_split_sizes", sizes_out)
    total = sum(sizes_out)
    call.rows("input", inputs, sum(sizes_in), "input_split_sizes", exact=True)
    if not isinstance(cast_lse, bool):
        raise call.type_error(f"cast_lse must be a bool, got {type(cast_lse).__name__}")
    if cast_lse:
        if len(inputs) != 1:
            raise call.error(f"input must be one tensor with cast_lse, got {len(inputs)}")
        inputs.append(call.lse("input_lse", input_lse, "input", inputs[0]))
    elif input_lse is not None or output_lse is not None:
        raise call.error("input_lse and output_lse need cast_lse=True")

    def buffers(output: Tensors | None, output_lse: Tensor | None) -> list[Tensor] | None:
        if output is None:
            if output_lse is not None:
                raise call.error("output_lse needs output to be given too")
            return None
        outs = call.tensors("output", output)
        if len(outs) != len(inputs) - cast_lse:
            raise call.error(f"output must hold {len(inputs) - cast_lse} tensors as input does, got {len(outs)}")
        call.rows("output", outs, total, "output_split_sizes", exact=False)
        for given, taken in zip(inputs, outs, strict=False):
            if given.shape[1:] != taken.shape[1:] or given.dtype != taken.dtype or given.device != taken.device:
                raise call.error(
                    f"output must have the row shape, dtype and device of input ({tuple(given.shape[1:])}, "
                    f"{given.dtype}, {given.device}), got {tuple(taken.shape[1:])}, {taken.dtype}, {taken.device}"
                )
        if cast_lse:
            if output_lse is None:
                outs.append(torch.empty(outs[0].shape[:-1], dtype=inputs[-1].dtype, device=inputs[-1].device))
            else:
                outs.append(call.lse("output_lse", output_lse, "output", outs[0]))
        return outs

    outs = buffers(output, output_lse)
    exchange = call.exchange(
        ("dst_indices", "src_index"),
        [(r, a, b) for (a, b), ranks in zip(_ranges(sizes_in), targets, strict=True) for r in ranks],
        [(s, a, b) for (a, b), s in zip(_ranges(sizes_out), sources, strict=True)],
    )
    work, unpack = exchange.start_cast(inputs, async_op)

    @torch.no_grad()
    def post_process(buffer: Tensors | None = None, buffer_lse: Tensor | None = None) -> Any:
        chosen = outs if buffer is None or buffer is output else buffers(buffer, buffer_lse)
        received = unpack(None if chosen is None else [t[:total] for t in chosen])
        received = chosen or received
        return (received[0], received[1]) if cast_lse else _like(received, input)

    return WorkWithPostProcessFn(work, post_process, async_op)


@torch.no_grad()
def group_reduce(
    input: Tensors,
    output: Tensors | None,
    input_split_sizes: Ints,
    output_split_sizes: Ints,
    dst_index: Ints,
    src_indices: IntLists,
    group: GroupLike = None,
    async_op: bool = False,
    *,
    reduce_op: GroupReduceOp = "sum",
    acc_reduce: bool = True,
    input_lse: Tensor | None = None,
    output_lse: Tensor | None = None,
    comm_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> WorkWithPostProcessFn:
    """Send each split of ``input`` to its owner; the owner reduces what its sources send into splits of ``output``.

    The reduction takes what ``output`` holds first (with ``acc_reduce``), then the sources in ascending rank, in
    float32 (float64 when a tensor is): it does not depend on arrival, bit for bit.

    Args:
        input: ``(sum(input_split_sizes), ...)`` of a floating dtype, or a tuple of such.
        output: ``(sum(output_split_sizes) or more, ...)``; None (with ``acc_reduce=False``) allocates it in the dtype
            of ``input``. Rows past the sum are left alone.
        input_split_sizes, output_split_sizes: rows per split, zeros allowed; lists or 1-d tensors.
        dst_index: per input split the rank that owns it (in a tensor, ``world_size`` at empty splits).
        src_indices: per output split the distinct ranks that send to it; may be empty, may name this rank.
            A 2-d tensor is padded with -1.
        reduce_op: ``"sum"``; ``"avg"``: ``(output + sum) / (1 + count)``, or ``sum / count`` without ``acc_reduce``
            (0 where nothing comes); ``"lse"``: merge of (out, lse) states of shapes ``(rows, heads, head_dim)`` and
            ``(rows, heads)``; two empty states (``lse = -inf``) merge to ``(0, -inf)``.
        acc_reduce: fold into what ``output`` holds, else start from nothing.
        input_lse, output_lse: float32 (or float64), for ``"lse"`` only.
        comm_dtype: dtype in which partials travel; ``reduce_dtype`` when that is given, else the dtype of ``input``.
        reduce_dtype: ``torch.float32`` or ``torch.float64`` to sum in, at least float32 in any case.

    Returns:
        A work; ``wait_post_process(output)`` ends it (call it exactly once, the buffer may be left out) and returns
        the output, or ``(output, output_lse)`` for ``"lse"``. Not differentiable.

    Raises:
        ValueError, TypeError: naming rank and argument, before anything is sent.
    """
    call = _Call("group_reduce", as_communicator(group))
    inputs = call.tensors("input", input)
    sizes_in = call.splits("input_split_sizes", input_split_sizes)
    sizes_out = call.splits("output_split_sizes", output_split_sizes)
    owners = call.one_rank_each("dst_index", dst_index, "input_split_sizes", sizes_in)
    sources = call.some_ranks_each("src_indices", src_indices, "output_split_sizes", sizes_out)
    total = sum(sizes_out)
    call.rows("input", inputs, sum(sizes_in), "input_split_sizes", exact=True)
    for given in inputs:
        if not given.is_floating_point():
            raise call.type_error(f"input must be of a floating dtype, got {given.dtype}")
    if reduce_op not in REDUCE_OPS:
        raise call.error(f"reduce_op must be one of {', '.join(REDUCE_OPS)}, got {reduce_op!r}")
    if not isinstance(acc_reduce, bool):
        raise call.type_error(f"acc_reduce must be a bool, got {type(acc_reduce).__name__}")
    if reduce_dtype not in (None, torch.float32, torch.float64):
        raise call.error(f"reduce_dtype must be torch.float32, torch.float64 or None, got {reduce_dtype}")
    if comm_dtype is not None and not (isinstance(comm_dtype, torch.dtype) and comm_dtype.is_floating_point):
        raise call.type_error(f"comm_dtype must be a floating torch.dtype or None, got {comm_dtype!r}")
    merges = reduce_op == "lse"
    if merges:
        if len(inputs) != 1:
            raise call.error(f"input must be one tensor with reduce_op='lse', got {len(inputs)}")
        if inputs[0].dim() < 2:
            raise call.error(f"input must be (rows, heads, head_dim) with reduce_op='lse', got {inputs[0].dim()}-d")
        inputs.append(call.lse("input_lse", input_lse, "input", inputs[0]))
    elif input_lse is not None or output_lse is not None:
        raise call.error(f"input_lse and output_lse need reduce_op='lse', got {reduce_op!r}")

    def buffers(output: Tensors, output_lse: Tensor | None) -> list[Tensor]:
        outs = call.tensors("output", output)
        if len(outs) != len(inputs) - merges:
            raise call.error(f"output must hold {len(inputs) - merges} tensors as input does, got {len(outs)}")
        call.rows("output", outs, total, "output_split_sizes", exact=False)
        for given, taken in zip(inputs, outs, strict=False):
            if given.shape[1:] != taken.shape[1:] or given.device != taken.device or not taken.is_floating_point():
                raise call.error(
                    f"output must be floating, with the row shape and device of input ({tuple(given.shape[1:])}, "
                    f"{given.device}), got {taken.dtype}, {tuple(taken.shape[1:])}, {taken.device}"
                )
        if merges:
            if output_lse is None and acc_reduce:
                raise call.error("output_lse must be given with reduce_op='lse' and acc_reduce=True, got None")
            if output_lse is None:
                output_lse = torch.empty(outs[0].shape[:-1], dtype=inputs[1].dtype, device=inputs[1].device)
            outs.append(call.lse("output_lse", output_lse, "output", outs[0]))
        return outs

    if output is None:
        if acc_reduce:
            raise call.error("output must be given with acc_reduce=True (what would be added to?), got None")
        if output_lse is not None:
            raise call.error("output_lse needs output to be given too")
        made = [given.new_zeros((total, *given.shape[1:])) for given in inputs]
        targets = buffers(_like(made[: len(made) - merges], input), made[-1] if merges else None)
    else:
        targets = buffers(output, output_lse)
    exchange = call.exchange(
        ("src_indices", "dst_index"),
        [(s, a, b) for (a, b), ranks in zip(_ranges(sizes_out), sources, strict=True) for s in ranks],
        [(r, a, b) for (a, b), r in zip(_ranges(sizes_in), owners, strict=True)],
    )
    work, fold = exchange.start_reduce(inputs, reduce_op, comm_dtype or reduce_dtype, async_op)

    @torch.no_grad()
    def post_process(buffer: Tensors | None = None, buffer_lse: Tensor | None = None) -> Any:
        chosen = targets if buffer is None or buffer is output else buffers(buffer, buffer_lse)
        views = [tensor[:total] for tensor in chosen]
        if not acc_reduce:
            for i, view in enumerate(views):
                view.fill_(float("-inf") if merges and i == 1 else 0.0)
        fold(views, reduce_dtype, acc_reduce)
        return (chosen[0], chosen[1]) if merges else _like(chosen, input)

    return WorkWithPostProcessFn(work, post_process, async_op)
