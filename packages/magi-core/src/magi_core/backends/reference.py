"""Blockwise torch backend: any device, fp16, bf16, fp32 and fp64, any head dims, memory O(block) beyond the results.

Forward, for a tile of queries: the online softmax of FlashAttention-2 (arXiv:2307.08691) over the jobs of a
:class:`~magi_core.backends.schedule.Schedule`, then one merge with the earlier state (a sink or an earlier stage).
Backward, for a tile of keys: ``P = exp(S - lse)``, ``dS = P * (dP - delta)``. All query heads of a kv head are folded
into the rows of one matrix product, several kv heads into one batch.

Scores and sums are float32 (float64 for float64 inputs). Exponentials are ``exp2(x * log2(e))``: torch's CPU ``exp``
goes through a library that is eight times slower on AMD. No operation has an undefined order, so results are bitwise
repeatable in both directions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..sink import lse_of_sink, merge
from .schedule import FIRST, LAST, Job, Schedule, Tile

__all__ = [
    "backward",
    "backward_prepare",
    "compute_dtype",
    "finish_tile",
    "forward",
    "in_own_precision",
    "new_dq_workspace",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_LOG2E = math.log2(math.e)
_BLOCK_ELEMENTS = 1 << 20  # scores of one block: 4 MB in float32
_MASKS_KEPT = 16
_PREPARE_ROWS = 2048
_LARGEST_STRIDE = 1 << 24  # BLAS takes 32-bit strides


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of scores, sums and lse: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def in_own_precision(function: _Function) -> _Function:
    """Without autograd, and outside the caller's autocast, which would run the products of scores in 16 bits."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        device_type = next(x for x in args if isinstance(x, Tensor)).device.type
        with torch.no_grad():
            if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
                return function(*args, **kwargs)
            with torch.autocast(device_type, enabled=False):
                return function(*args, **kwargs)

    return run  # type: ignore[return-value]


@dataclass
class _Heads:
    """A block of heads: kv heads ``[a, b)``, and of each kv head's group the query heads ``[e, f)``."""

    a: int
    b: int
    e: int
    f: int

    @property
    def kv(self) -> slice:
        return slice(self.a, self.b)

    @property
    def group(self) -> slice:
        return slice(self.e, self.f)


@dataclass(frozen=True)
class _Mask:
    """What hides pairs of a job, query-major: ``(rows, columns)``.

    Attributes:
        bound: +inf where the pair is visible, -inf where not; scores become ``minimum(score, bound)``, which is twenty
            times faster than ``masked_fill`` on CPU. None when everything is visible.
        bias: log(count) where pairs are covered more than once, or None.
        unseen: stationary indices of a gathered job that see nothing. Nothing may cover them, and then they may hold
            NaN, which neither a bound nor a weight of 0 silences.
    """

    bound: Tensor | None = None
    bias: Tensor | None = None
    unseen: Tensor | None = None


@dataclass
class _Masks:
    """Masks of jobs; those of one band by their place in the job, of which a causal mask or a window has a handful.

    Args:
        is_transposed: the stationary axis is the keys.
    """

    like: Tensor
    dtype: torch.dtype
    is_transposed: bool
    may_overlap: bool
    kept: dict[tuple[int, ...], _Mask] = field(default_factory=dict)

    def of(self, job: Job) -> _Mask:
        """The mask of a job."""
        if job.is_full:
            return _Mask()
        if job.entries is not None:
            return self._gathered(job, job.entries)
        lo, hi = job.lo - job.m0 + job.s0, job.hi - job.m0 + job.s0
        key = (job.s1 - job.s0, job.m1 - job.m0, lo, hi)
        mask = self.kept.get(key)
        if mask is None:
            rows = torch.arange(job.s1 - job.s0, device=self.like.device)[:, None]
            distance = torch.arange(job.m1 - job.m0, device=self.like.device)[None, :] - rows
            mask = _Mask(self._bound((distance >= lo) & (distance <= hi)))
            if len(self.kept) >= _MASKS_KEPT:
                self.kept.clear()
            self.kept[key] = mask
        return mask

    def _query_major(self, x: Tensor) -> Tensor:
        return x.t().contiguous() if self.is_transposed else x

    def _bound(self, visible: Tensor) -> Tensor:
        infinity = self.like.new_full((), torch.inf, dtype=self.dtype)
        return self._query_major(torch.where(visible, infinity, -infinity))

    def _gathered(self, job: Job, entries: npt.NDArray[np.int64]) -> _Mask:
        rows, columns = job.s1 - job.s0, job.num_moving
        device = self.like.device
        b_entries = torch.from_numpy(entries).to(device)
        steps = torch.zeros(rows * (columns + 1), dtype=torch.int32, device=device)
        one = torch.ones((), dtype=torch.int32, device=device).expand(len(entries))
        row = b_entries[:, 0] * (columns + 1)
        steps.index_put_((row + b_entries[:, 1],), one, accumulate=True)
        steps.index_put_((row + b_entries[:, 2],), -one, accumulate=True)
        counts = steps.view(rows, columns + 1).cumsum(1, dtype=torch.int32)[:, :columns]
        bias = None
        if self.may_overlap and bool((counts > 1).any()):
            bias = self._query_major(counts.clamp_min(1).to(self.dtype).log())
        visible = counts > 0
        return _Mask(self._bound(visible), bias, ~visible.any(1))


def _readable(x: Tensor) -> Tensor:
    """``x`` itself when its blocks can be read by strides, else a contiguous copy."""
    if x.stride(-1) != 1 or abs(x.stride(0)) > _LARGEST_STRIDE or abs(x.stride(1)) > _LARGEST_STRIDE:
        return x.contiguous()
    return x


class _Queries:
    """Query-side blocks ``(kv heads, group * rows, dim)`` in the compute dtype, folded; views where they can be."""

    def __init__(self, num_heads_kv: int, dtype: torch.dtype) -> None:
        self.num_heads_kv, self.dtype = num_heads_kv, dtype

    def by_group(self, x: Tensor) -> Tensor:
        """``(total_q, num_heads_kv, group, ...)`` view."""
        shape, stride = x.shape, x.stride()
        group = shape[1] // self.num_heads_kv
        return x.as_strided(
            (shape[0], self.num_heads_kv, group, *shape[2:]), (stride[0], group * stride[1], stride[1], *stride[2:])
        )

    def read(self, x: Tensor, rows: slice | Tensor, heads: _Heads) -> Tensor:
        """``x (total_q, num_heads_q, dim)``; the result is folded."""
        if x.shape[1] == self.num_heads_kv:
            return x[rows, heads.kv].transpose(0, 1).to(self.dtype)
        block = self.by_group(x)[rows, heads.kv, heads.group].permute(1, 2, 0, 3).to(self.dtype)
        return block.reshape(block.shape[0], -1, block.shape[3])

    def scalars(self, x: Tensor) -> Tensor:
        """``x (total_q, num_heads_q)`` as ``(num_heads_kv, group, total_q)``, contiguous."""
        return x.to(self.dtype).t().contiguous().view(self.num_heads_kv, x.shape[1] // self.num_heads_kv, x.shape[0])

    def read_scalars(self, x: Tensor, rows: slice | Tensor, heads: _Heads) -> Tensor:
        """``x`` from :meth:`scalars` as ``(kv heads, group * rows, 1)``."""
        block = x[heads.kv, heads.group][:, :, rows]
        return block.reshape(block.shape[0], -1, 1)


def _keys(x: Tensor, columns: slice | Tensor, heads: _Heads, dtype: torch.dtype) -> Tensor:
    """``x (total_k, num_heads_kv, dim)`` as ``(kv heads, columns, dim)`` in the compute dtype; a view if it can be."""
    return x[columns, heads.kv].transpose(0, 1).to(dtype)


def _head_blocks(num_heads_kv: int, group: int, pairs: int) -> Iterator[tuple[slice, list[_Heads]]]:
    """Blocks of heads of which each has about ``_BLOCK_ELEMENTS`` scores: kv heads, and their group in parts."""
    kv_step = max(1, min(num_heads_kv, _BLOCK_ELEMENTS // max(1, group * pairs)))
    group_step = group if group * pairs <= _BLOCK_ELEMENTS else max(1, _BLOCK_ELEMENTS // max(1, pairs))
    for a in range(0, num_heads_kv, kv_step):
        b = min(a + kv_step, num_heads_kv)
        yield slice(a, b), [_Heads(a, b, e, min(e + group_step, group)) for e in range(0, group, group_step)]


def _largest_block(tile: Tile) -> int:
    return max(((job.s1 - job.s0) * job.num_moving for job in tile.jobs), default=1)


class _Scratch:
    """Reused memory for blocks of scores."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.like, self.dtype = like, dtype
        self.memory: list[Tensor] = []

    def block(self, slot: int, *shape: int) -> Tensor:
        while len(self.memory) <= slot:
            self.memory.append(self.like.new_empty(0, dtype=self.dtype))
        size = math.prod(shape)
        if self.memory[slot].numel() < size:
            self.memory[slot] = self.like.new_empty(size, dtype=self.dtype)
        return self.memory[slot][:size].view(shape)


def _exp_(x: Tensor) -> Tensor:
    return x.mul_(_LOG2E).exp2_()


def _by_group(x: Tensor, group: int) -> Tensor:
    """``(kv heads, group * rows, n)`` as ``(kv heads, group, rows, n)``, a view."""
    return x.view(x.shape[0], group, -1, x.shape[2])


def _moving(job: Job, device: torch.device) -> slice | Tensor:
    if job.index is None:
        return slice(job.m0, job.m1)
    return torch.from_numpy(job.index).to(device)


@in_own_precision
def forward(
    out: Tensor,
    out_acc: Tensor | None,
    lse: Tensor,
    max_logits: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    *,
    sink: Tensor | None,
    sink_layout: str,
    softmax_scale: float,
    softcap: float,
) -> None:
    """One stage forward; see :func:`magi_core.stages.attn_fwd_stage` for shapes and semantics."""
    q, k, v = _readable(q), _readable(k), _readable(v)
    dtype = compute_dtype(q.dtype)
    num_heads_kv, group = k.shape[1], q.shape[1] // k.shape[1]
    queries = _Queries(num_heads_kv, dtype)
    scratch, masks = _Scratch(q, dtype), _Masks(q, dtype, False, schedule.may_overlap)
    lse_sink = None if sink is None else lse_of_sink(sink.to(dtype), sink_layout)
    largest = None if max_logits is None else max_logits.view(num_heads_kv, group)
    for tile in schedule.forward:
        rows = tile.end - tile.begin
        tile_out = q.new_zeros(rows, num_heads_kv, group, v.shape[2], dtype=dtype)
        tile_lse = q.new_full((rows, num_heads_kv, group), -torch.inf, dtype=dtype)
        if tile.jobs:
            job_masks = [masks.of(job) for job in tile.jobs]
            for _, blocks in _head_blocks(num_heads_kv, group, _largest_block(tile)):
                for heads in blocks:
                    block_largest = None if largest is None else largest[heads.kv, heads.group]
                    acc, block_lse = _forward_tile(
                        tile, heads, q, k, v, queries, scratch, job_masks, softmax_scale, softcap, block_largest
                    )
                    tile_out[:, heads.kv, heads.group] = acc.permute(2, 0, 1, 3)
                    tile_lse[:, heads.kv, heads.group] = block_lse.squeeze(3).permute(2, 0, 1)
        finish_tile(tile, tile_out.flatten(1, 2), tile_lse.flatten(1, 2), out, out_acc, lse, lse_sink)


def finish_tile(
    tile: Tile,
    tile_out: Tensor,
    tile_lse: Tensor,
    out: Tensor,
    out_acc: Tensor | None,
    lse: Tensor,
    lse_sink: Tensor | None,
) -> None:
    """Merge a tile with the state before it and write it."""
    rows = slice(tile.begin, tile.end)
    if not tile.flags & FIRST:
        if out_acc is None:
            raise ValueError("out_acc must be given when a tile of the plan continues an earlier stage, got None")
        tile_out, tile_lse = merge(tile_out, tile_lse, out_acc[rows], lse[rows])
    elif lse_sink is not None:
        before = (lse_sink if lse_sink.dim() == 1 else lse_sink[rows]).expand_as(tile_lse)
        tile_out, tile_lse = merge(tile_out, tile_lse, torch.zeros_like(tile_out), before)
    lse[rows] = tile_lse
    if tile.flags & LAST:
        out[rows] = tile_out
    else:
        if out_acc is None:
            raise ValueError("out_acc must be given when a tile of the plan is not its last stage, got None")
        out_acc[rows] = tile_out


def _forward_tile(
    tile: Tile,
    heads: _Heads,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: _Queries,
    scratch: _Scratch,
    job_masks: list[_Mask],
    softmax_scale: float,
    softcap: float,
    largest: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of a tile and a block of heads: ``(kv heads, group, rows, head_dim_v)``, ``(..., rows, 1)``."""
    dtype = queries.dtype
    group, rows = heads.f - heads.e, tile.end - tile.begin
    tile_q = queries.read(q, slice(tile.begin, tile.end), heads)
    num_kv = tile_q.shape[0]
    acc = q.new_zeros((num_kv, group, rows, v.shape[2]), dtype=dtype)
    m = q.new_full((num_kv, group, rows, 1), -torch.inf, dtype=dtype)
    total = q.new_zeros((num_kv, group, rows, 1), dtype=dtype)
    round_p = q.dtype != dtype
    for job, mask in zip(tile.jobs, job_masks, strict=True):
        a, b, columns = job.s0 - tile.begin, job.s1 - tile.begin, job.num_moving
        is_whole = a == 0 and b == rows
        moving = _moving(job, q.device)
        job_q = tile_q if is_whole else _by_group(tile_q, group)[:, :, a:b].reshape(num_kv, -1, tile_q.shape[2])
        s = scratch.block(0, num_kv, group * (b - a), columns)
        if mask.unseen is not None:
            job_q = _by_group(job_q, group).masked_fill(mask.unseen[:, None], 0.0).flatten(1, 2)
        torch.baddbmm(s, job_q, _keys(k, moving, heads, dtype).transpose(1, 2), beta=0, alpha=softmax_scale, out=s)
        s4 = _by_group(s, group)
        if softcap > 0:
            s.div_(softcap).tanh_().mul_(softcap)
        if mask.bound is not None:
            torch.minimum(s4, mask.bound, out=s4)
        job_max = s4.amax(3, keepdim=True)
        if largest is not None:
            torch.maximum(largest, job_max.amax((2, 3)), out=largest)
        if mask.bias is not None:
            s4.add_(mask.bias)
            job_max = s4.amax(3, keepdim=True)
        old_m, job_m, job_total = m[:, :, a:b], torch.maximum(m[:, :, a:b], job_max), total[:, :, a:b]
        # A row that has seen nothing yet keeps m = -inf; 0 stands in for it, by the mask, never by a big number.
        safe_m = job_m if mask.bound is None else torch.where(job_m == -torch.inf, 0.0, job_m)
        rescale = _exp_(old_m - safe_m)
        _exp_(s4.sub_(safe_m))
        job_total.mul_(rescale).add_(s4.sum(3, keepdim=True))
        old_m.copy_(job_m)
        p = s.to(q.dtype).to(dtype) if round_p else s
        acc_rows = acc[:, :, a:b].mul_(rescale)
        job_v = _keys(v, moving, heads, dtype)
        if group == 1:
            acc_rows.squeeze(1).baddbmm_(p, job_v)
        elif is_whole:
            acc.view(num_kv, -1, acc.shape[3]).baddbmm_(p, job_v)
        else:
            acc_rows.add_(_by_group(torch.bmm(p, job_v), group))
    empty = total == 0
    safe_total = torch.where(empty, 1.0, total)
    acc.div_(safe_total)
    return acc, torch.where(empty, -torch.inf, m + safe_total.log())


@in_own_precision
def backward_prepare(dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """``delta = sum_d(dout * out) - dlse``, ``(total_q, num_heads_q)`` in the dtype of ``lse``; 0 where lse is +-inf.

    A row with infinite lse has P = 0 (it sees nothing, or a sink of +inf took everything), so its delta is never used;
    0 keeps an unspecified gradient into that lse from becoming NaN.
    """
    delta = torch.empty(lse.shape, dtype=compute_dtype(out.dtype), device=out.device)
    # Products of float32 are summed in float64: delta is subtracted from dP, and what is left is often small.
    dtype = torch.float32 if out.dtype in (torch.float16, torch.bfloat16) else torch.float64
    for begin in range(0, out.shape[0], _PREPARE_ROWS):
        rows = slice(begin, begin + _PREPARE_ROWS)
        part = torch.mul(dout[rows], out[rows].to(dtype)).sum(2)
        if dlse is not None:
            part.sub_(dlse[rows])
        delta[rows] = torch.where(lse[rows].isfinite(), part, 0.0)
    return delta


def new_dq_workspace(q: Tensor) -> Tensor:
    """Zeroed dq accumulator: ``(num_heads_q, total_q, head_dim)``, heads outside so that a block of rows is dense."""
    return q.new_zeros((q.shape[1], q.shape[0], q.shape[2]), dtype=compute_dtype(q.dtype))


@in_own_precision
def backward(
    dq_acc: Tensor,
    dk: Tensor,
    dv: Tensor,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    schedule: Schedule,
    *,
    softmax_scale: float,
    softcap: float,
) -> None:
    """One stage backward; see :func:`magi_core.stages.attn_bwd_stage` for shapes and semantics."""
    q, k, v, dout = _readable(q), _readable(k), _readable(v), _readable(dout)
    dtype = compute_dtype(q.dtype)
    num_heads_kv, group = k.shape[1], q.shape[1] // k.shape[1]
    queries = _Queries(num_heads_kv, dtype)
    scratch, masks = _Scratch(q, dtype), _Masks(q, dtype, True, schedule.may_overlap)
    # exp(s - inf) = 0: a row that sees nothing has no P, whatever its scores are.
    safe_lse = queries.scalars(torch.where(lse == -torch.inf, torch.inf, lse))
    delta = queries.scalars(delta)
    dq_by_group = dq_acc.view(num_heads_kv, group, dq_acc.shape[1], dq_acc.shape[2])
    dk.zero_()
    dv.zero_()
    for tile in schedule.backward:
        if not tile.jobs:
            continue
        job_masks = [masks.of(job) for job in tile.jobs]
        columns = slice(tile.begin, tile.end)
        for kv, blocks in _head_blocks(num_heads_kv, group, _largest_block(tile)):
            size = (kv.stop - kv.start, tile.end - tile.begin)
            tile_dk = q.new_zeros((*size, k.shape[2]), dtype=dtype)
            tile_dv = q.new_zeros((*size, v.shape[2]), dtype=dtype)
            for heads in blocks:
                _backward_tile(
                    tile,
                    heads,
                    (q, dout, safe_lse, delta),
                    (_keys(k, columns, heads, dtype), _keys(v, columns, heads, dtype)),
                    (dq_by_group[heads.kv, heads.group], tile_dk, tile_dv),
                    queries,
                    scratch,
                    job_masks,
                    softmax_scale,
                    softcap,
                )
            dk[columns, kv] = tile_dk.transpose(0, 1)
            dv[columns, kv] = tile_dv.transpose(0, 1)


def _backward_tile(
    tile: Tile,
    heads: _Heads,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
    queries: _Queries,
    scratch: _Scratch,
    job_masks: list[_Mask],
    softmax_scale: float,
    softcap: float,
) -> None:
    """Add a tile of keys and a block of heads: ``grads`` are dq ``(kv, group, total_q, d)``, and the tile's dk, dv."""
    q, dout, lse, delta = inputs
    tile_k, tile_v = keys
    dq, tile_dk, tile_dv = grads
    group, num_kv = heads.f - heads.e, tile_k.shape[0]
    for job, mask in zip(tile.jobs, job_masks, strict=True):
        a, b, rows = job.s0 - tile.begin, job.s1 - tile.begin, job.num_moving
        moving = _moving(job, q.device)
        job_k, job_v = tile_k[:, a:b], tile_v[:, a:b]
        if mask.unseen is not None:
            unseen = mask.unseen[:, None]
            job_k, job_v = job_k.masked_fill(unseen, 0.0), job_v.masked_fill(unseen, 0.0)
        job_q, job_dout = queries.read(q, moving, heads), queries.read(dout, moving, heads)
        p = scratch.block(0, num_kv, group * rows, b - a)
        torch.baddbmm(p, job_q, job_k.transpose(1, 2), beta=0, alpha=softmax_scale, out=p)
        slope = None
        if softcap > 0:
            p.div_(softcap).tanh_()
            slope = torch.mul(p, p, out=scratch.block(2, *p.shape)).neg_().add_(1.0)
            p.mul_(softcap)
        p.sub_(queries.read_scalars(lse, moving, heads))
        if mask.bound is not None:
            torch.minimum(_by_group(p, group), mask.bound, out=_by_group(p, group))
        if mask.bias is not None:
            _by_group(p, group).add_(mask.bias)
        _exp_(p)
        tile_dv[:, a:b].baddbmm_(p.transpose(1, 2), job_dout)
        ds = torch.bmm(job_dout, job_v.transpose(1, 2), out=scratch.block(1, *p.shape))
        ds.sub_(queries.read_scalars(delta, moving, heads)).mul_(p)
        if slope is not None:
            ds.mul_(slope)
        tile_dk[:, a:b].baddbmm_(ds.transpose(1, 2), job_q, alpha=softmax_scale)
        if isinstance(moving, slice) and group == 1:
            dq[:, 0, moving].baddbmm_(ds, job_k, alpha=softmax_scale)
        elif isinstance(moving, slice):
            dq[:, :, moving].add_(_by_group(torch.bmm(ds, job_k), group), alpha=softmax_scale)
        else:
            dq[:, :, moving] += _by_group(torch.bmm(ds, job_k), group).mul_(softmax_scale)
