"""The lightning indexer: which keys a query shall attend to.

``I[t, s] = sum_h weights[t, h] * relu(q_index[t, h] . k_index[s])``; the ``topk`` keys of largest ``I`` among those the
query may see. Source: DeepSeek-V3.2-Exp, section 2 (lightning indexer, fine-grained token selection).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["indexer_scores", "lightning_indexer"]

_BLOCK_ELEMENTS = 1 << 26  # scores, or gathered elements, of one block of rows


def _check(q_index: Tensor, k_index: Tensor, weights: Tensor) -> None:
    if q_index.dim() != 3 or k_index.dim() != 2 or k_index.shape[1] != q_index.shape[2]:
        raise ValueError(
            "q_index must have shape (total_q, heads, dim) and k_index (total_k, dim), got "
            f"{tuple(q_index.shape)} and {tuple(k_index.shape)}"
        )
    if weights.shape != q_index.shape[:2]:
        raise ValueError(f"weights must have shape {tuple(q_index.shape[:2])}, got {tuple(weights.shape)}")
    if not q_index.is_floating_point() or k_index.dtype != q_index.dtype or not weights.is_floating_point():
        raise TypeError(
            "q_index and k_index must have one floating point dtype and weights a floating point one, "
            f"got {q_index.dtype}, {k_index.dtype} and {weights.dtype}"
        )
    for name, x in (("k_index", k_index), ("weights", weights)):
        if x.device != q_index.device:
            raise ValueError(f"{name} must be on the device of q_index ({q_index.device}), got {x.device}")


def _accumulate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def indexer_scores(q_index: Tensor, k_index: Tensor, weights: Tensor) -> Tensor:
    """All scores, dense: ``(total_q, total_k)`` float32 (float64 for float64 inputs), differentiable.

    Args:
        q_index: ``(total_q, heads, dim)``. k_index: ``(total_k, dim)``. weights: ``(total_q, heads)``.

    Memory is ``heads * total_q * total_k`` with gradients; :func:`lightning_indexer` needs one block of rows.
    """
    _check(q_index, k_index, weights)
    dtype = _accumulate(q_index.dtype)
    products = torch.einsum("thd,sd->ths", q_index.to(dtype), k_index.to(dtype)).relu()
    return torch.einsum("ths,th->ts", products, weights.to(dtype))


def _scores_block(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Scores of some rows ``(rows, total_k)``, by the Triton kernel on CUDA."""
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        from .indexer_kernel import scores

        with torch.cuda.device(q.device):
            return scores(q, k, weights)
    dtype = _accumulate(q.dtype)
    total, k = q.new_zeros((q.shape[0], k.shape[0]), dtype=dtype), k.to(dtype).t()
    for head in range(q.shape[1]):
        total += weights[:, head, None].to(dtype) * (q[:, head].to(dtype) @ k).relu_()
    return total


def _bounds(bound: Tensor | None, default: Tensor, name: str, total_q: int) -> Tensor:
    if bound is None:
        return default
    if bound.shape != (total_q,) or bound.is_floating_point() or bound.device != default.device:
        raise ValueError(
            f"{name} must hold integers of shape ({total_q},) on {default.device}, got {bound.dtype} "
            f"{tuple(bound.shape)} on {bound.device}"
        )
    return bound.long()


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, weights: Tensor, begin: Tensor, end: Tensor, topk: int
    ) -> tuple[Tensor, Tensor]:
        total_q, total_k = q.shape[0], k.shape[0]
        dtype = _accumulate(q.dtype)
        index = torch.full((total_q, topk), -1, dtype=torch.int32, device=q.device)
        values = torch.full((total_q, topk), -torch.inf, dtype=dtype, device=q.device)
        found, step = min(topk, total_k), max(1, _BLOCK_ELEMENTS // max(1, total_k))
        columns = torch.arange(total_k, device=q.device)
        for first in range(0, total_q if found else 0, step):
            rows = slice(first, min(first + step, total_q))
            scores = _scores_block(q[rows], k, weights[rows])
            unseen = (columns[None, :] < begin[rows, None]) | (columns[None, :] >= end[rows, None])
            scores = scores.masked_fill_(unseen, -torch.inf)
            best, keys = scores.topk(found, 1)
            values[rows, :found] = best
            index[rows, :found] = torch.where(best == -torch.inf, -1, keys).int()
        ctx.save_for_backward(q, k, weights, index)
        ctx.mark_non_differentiable(index)
        ctx.set_materialize_grads(False)
        return index, values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor | None, dvalues: Tensor | None) -> tuple[Tensor | None, ...]:
        if dvalues is None:
            return (None,) * 6
        q, k, weights, index = ctx.saved_tensors
        dtype = dvalues.dtype
        dq, dweights = torch.empty_like(q), torch.empty_like(weights)
        dk = torch.zeros(k.shape, dtype=dtype, device=k.device)
        wide = index.shape[1] * (k.shape[1] + 2 * q.shape[1])
        step = max(1, _BLOCK_ELEMENTS // max(1, wide))
        for first in range(0, q.shape[0], step):
            rows = slice(first, min(first + step, q.shape[0]))
            listed, ids = index[rows] >= 0, index[rows].clamp_min(0).long()
            grad = torch.where(listed, dvalues[rows], 0.0)[:, None, :]  # (rows, 1, topk)
            b_q, b_k, b_w = q[rows].to(dtype), k[ids].to(dtype), weights[rows].to(dtype)
            products = torch.bmm(b_q, b_k.transpose(1, 2))  # (rows, heads, topk)
            dweights[rows] = (products.relu() * grad).sum(2).to(weights.dtype)
            slope = torch.where(products > 0, grad * b_w[:, :, None], 0.0)
            dq[rows] = torch.bmm(slope, b_k).to(q.dtype)
            # index_put_ adds in a fixed order, index_add_ does not.
            dk.index_put_((ids,), torch.bmm(slope.transpose(1, 2), b_q), accumulate=True)
        return dq, dk.to(k.dtype), dweights, None, None, None


def lightning_indexer(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    topk: int,
    *,
    causal: bool = True,
    k_begin: Tensor | None = None,
    k_end: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``topk`` best keys of every query by ``sum_h weights * relu(q_index . k_index)``, and their scores.

    Args:
        q_index: ``(total_q, heads, dim)``, floating point. k_index: ``(total_k, dim)``, shared by the heads.
        weights: ``(total_q, heads)``, any scale folded in.
        topk: entries of a row; rows that may see fewer keys end with -1.
        causal: query ``t`` may see keys up to ``t + total_k - total_q``, unless ``k_end`` is given.
        k_begin, k_end: integers ``(total_q,)``: keys ``[k_begin, k_end)`` that a query may see, e.g. its document up
            to itself.

    Returns:
        ``index_map (1, total_q, topk)`` int32, best first, as :func:`dsa_attn_func` takes it for one kv head
        (``expand`` it for more), and ``scores (total_q, topk)`` float32 (float64 for float64 inputs), -inf beside -1,
        differentiable in ``q_index``, ``k_index`` and ``weights``. Equal scores may be listed in any order.

    Raises:
        ValueError, TypeError: an argument does not fit.

    Memory is one block of rows. Does not synchronise.
    """
    _check(q_index, k_index, weights)
    if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
        raise ValueError(f"topk must be a positive int, got {topk!r}")
    total_q, total_k = q_index.shape[0], k_index.shape[0]
    rows = torch.arange(total_q, device=q_index.device)
    last = rows + 1 + total_k - total_q if causal else torch.full_like(rows, total_k)
    begin = _bounds(k_begin, torch.zeros_like(rows), "k_begin", total_q)
    end = _bounds(k_end, last, "k_end", total_q)
    index, scores = _Select.apply(q_index, k_index, weights, begin, end, topk)
    return index[None], scores
