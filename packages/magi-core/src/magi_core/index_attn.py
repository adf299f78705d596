"""Attention over listed keys (token-level top-k): row r of q sees the rows of k that ``indices[r]`` names.

Entries are row ids, ended by -1; a row of k listed twice counts twice. The blockwise torch backend gathers the keys of
some rows at a time; memory is O(block). Scatter-adds of the backward have a fixed order on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .backends import reference
from .backends.reference import compute_dtype, in_own_precision
from .backends.schedule import FIRST, LAST, Tile
from .sink import lse_of_sink

__all__ = ["IndexMask", "check_indices", "index_backward", "index_forward"]

_BLOCK_ELEMENTS = 1 << 21  # gathered elements of k of one block of rows


@dataclass(frozen=True)
class IndexMask:
    """A mask that lists keys: ``indices (total_q, max_topk)`` int32."""

    indices: Tensor


def check_indices(indices: Tensor, q: Tensor, k: Tensor, q_block_size: int, k_block_size: int) -> Tensor:
    """``indices`` as ``(total_q, max_topk)``.

    Raises:
        TypeError: no int32 tensor. ValueError: shape or device. NotImplementedError: blocks of several tokens.
    """
    if q_block_size != 1 or k_block_size != 1:
        raise NotImplementedError(
            f"q_block_size and k_block_size must be 1 with index_attn_indices, got {q_block_size} and {k_block_size}"
        )
    if not isinstance(indices, Tensor) or indices.dtype != torch.int32:
        came = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
        raise TypeError(f"index_attn_indices must be an int32 tensor, got {came}")
    if indices.dim() != 3:
        raise ValueError(
            f"index_attn_indices must have 3 dims (tokens, kv heads, max_topk), got shape {tuple(indices.shape)}"
        )
    if indices.device != q.device:
        raise ValueError(f"index_attn_indices must be on the device of q ({q.device}), got {indices.device}")
    if indices.shape[0] * indices.shape[1] != q.shape[0]:
        raise ValueError(
            f"index_attn_indices must have tokens * kv heads = {q.shape[0]} rows, one for each row of q, "
            f"got {tuple(indices.shape)}"
        )
    if k.shape[1] != 1:
        raise ValueError(
            f"k and v must have one head with index_attn_indices (fold kv heads into rows), got {k.shape[1]} heads"
        )
    return indices.reshape(q.shape[0], indices.shape[2])


def _blocks(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
    """Rows, ids ``(rows, topk)``, the bound of their scores, and their keys and values ``(rows, topk, dim)``."""
    if k.device.type == "cpu" and indices.numel() > 0 and int(indices.max()) >= k.shape[0]:
        raise ValueError(f"index_attn_indices must be below the {k.shape[0]} rows of k, got {int(indices.max())}")
    dtype = compute_dtype(q.dtype)
    step = max(1, _BLOCK_ELEMENTS // max(1, indices.shape[1] * max(k.shape[2], v.shape[2], q.shape[1])))
    flat_k, flat_v = k[:, 0], v[:, 0]
    infinity = torch.full((), torch.inf, dtype=dtype, device=q.device)
    for begin in range(0, q.shape[0] if k.shape[0] > 0 and indices.shape[1] > 0 else 0, step):
        rows = slice(begin, min(begin + step, q.shape[0]))
        is_listed = indices[rows] >= 0
        ids = indices[rows].clamp_min(0).long()
        bound = torch.where(is_listed, infinity, -infinity)[:, None, :]
        # Row 0 stands in for the ended part of a list; it may hold NaN, which a weight of 0 does not silence.
        block_k, block_v = (torch.where(is_listed[:, :, None], x[ids].to(dtype), 0.0) for x in (flat_k, flat_v))
        yield rows, ids, bound, block_k, block_v


@in_own_precision
def index_forward(
    out: Tensor,
    lse: Tensor,
    max_logits: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: IndexMask,
    *,
    sink: Tensor | None,
    sink_layout: str,
    softmax_scale: float,
    softcap: float,
) -> None:
    """Fill ``out (total_q, num_heads_q, head_dim_v)``, ``lse`` and ``max_logits``; ``k (total_k, 1, head_dim)``."""
    dtype = compute_dtype(q.dtype)
    lse_sink = None if sink is None else lse_of_sink(sink.to(dtype), sink_layout)
    out.zero_()
    lse.copy_(lse.new_full((), -torch.inf) if lse_sink is None else lse_sink.expand_as(lse))
    for rows, _, bound, block_k, block_v in _blocks(q, k, v, mask.indices):
        s = torch.bmm(q[rows].to(dtype), block_k.transpose(1, 2)).mul_(softmax_scale)  # (rows, num_heads_q, topk)
        if softcap > 0:
            s.div_(softcap).tanh_().mul_(softcap)
        torch.minimum(s, bound, out=s)
        m = s.amax(2, keepdim=True)
        if max_logits is not None:
            torch.maximum(max_logits, m.amax((0, 2)), out=max_logits)
        p = torch.exp(s - torch.where(m == -torch.inf, 0.0, m))
        total = p.sum(2, keepdim=True)
        empty = total == 0
        safe_total = torch.where(empty, 1.0, total)
        block_lse = torch.where(empty, -torch.inf, m + safe_total.log()).squeeze(2)
        block_out = torch.bmm(p.to(q.dtype).to(dtype), block_v) / safe_total
        tile = Tile(rows.start, rows.stop, FIRST | LAST, ())
        reference.finish_tile(tile, block_out, block_lse, out, None, lse, lse_sink)


@in_own_precision
def index_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    mask: IndexMask,
    *,
    softmax_scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` in the dtypes of q, k, v."""
    dtype = compute_dtype(q.dtype)
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    dk = torch.zeros(k.shape, dtype=dtype, device=k.device)
    dv = torch.zeros(v.shape, dtype=dtype, device=v.device)
    safe_lse = torch.where(lse == -torch.inf, torch.inf, lse)[:, :, None]
    for rows, ids, bound, block_k, block_v in _blocks(q, k, v, mask.indices):
        block_q, block_dout = q[rows].to(dtype), dout[rows].to(dtype)
        s = torch.bmm(block_q, block_k.transpose(1, 2)).mul_(softmax_scale)
        slope = None
        if softcap > 0:
            s.div_(softcap).tanh_()
            slope = 1 - s * s
            s.mul_(softcap)
        p = torch.exp(torch.minimum(s.sub_(safe_lse[rows]), bound))
        ds = torch.bmm(block_dout, block_v.transpose(1, 2)).sub_(delta[rows][:, :, None]).mul_(p)
        if slope is not None:
            ds.mul_(slope)
        dq[rows] = torch.bmm(ds, block_k).mul_(softmax_scale).to(q.dtype)
        # Entries past the end of a list add zeros to row 0. index_put_ adds in a fixed order, index_add_ does not.
        dk[:, 0].index_put_((ids,), torch.bmm(ds.transpose(1, 2), block_q).mul_(softmax_scale), accumulate=True)
        dv[:, 0].index_put_((ids,), torch.bmm(p.transpose(1, 2), block_dout), accumulate=True)
    return dq, dk.to(k.dtype), dv.to(v.dtype)
