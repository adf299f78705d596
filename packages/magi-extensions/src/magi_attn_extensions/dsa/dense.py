"""Backends over a dense table of how often each pair is listed: plain torch, and FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["attend_dense", "attend_flex"]


def _counts(index_map: Tensor, total_k: int) -> Tensor:
    """How often a key is listed: ``(num_heads_kv, total_q, total_k)`` int32."""
    heads_kv, total_q, _ = index_map.shape
    # One column more than there are keys takes the entries that list nothing.
    counts = torch.zeros((heads_kv, total_q, total_k + 1), dtype=torch.int32, device=index_map.device)
    slots = torch.where(index_map < 0, total_k, index_map.long())
    counts = counts.scatter_add_(2, slots, torch.ones_like(slots, dtype=torch.int32))
    return counts[:, :, :total_k]


def attend_dense(q: Tensor, k: Tensor, v: Tensor, index_map: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` with all scores in memory."""
    total_q, num_heads_q, head_dim = q.shape
    total_k, num_heads_kv, _ = k.shape
    group = num_heads_q // num_heads_kv
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    counts = _counts(index_map, total_k)
    grouped = q.to(accumulate).view(total_q, num_heads_kv, group, head_dim)
    scores = scale * torch.einsum("ihgd,jhd->hgij", grouped, k.to(accumulate))
    scores = scores + counts.to(accumulate).log()[:, None]  # log 0 = -inf: not listed
    empty = ~(counts > 0).any(-1)[:, None]  # (num_heads_kv, 1, total_q)
    # Rows that list nothing: any finite scores, then probabilities 0, so that no gradient meets inf - inf.
    scores = scores.masked_fill(empty[..., None], 0.0)
    lse = torch.logsumexp(scores, -1)
    probabilities = torch.exp(scores - lse[..., None]).masked_fill(empty[..., None], 0.0)
    out = torch.einsum("hgij,jhd->ihgd", probabilities, v.to(accumulate)).reshape(total_q, num_heads_q, v.shape[2])
    lse = lse.masked_fill(empty, float("-inf")).permute(2, 0, 1).reshape(total_q, num_heads_q)
    return out.to(q.dtype), lse


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, index_map: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` by FlexAttention: pairs that are not listed are masked, the others get the log of their count."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if not q.is_cuda and needs_grad:
        raise NotImplementedError('backend "flex" has no backward on the CPU; backend="reference" has')
    (total_q, heads, _), total_k = q.shape, k.shape[0]
    group = heads // k.shape[1]
    if total_q == 0 or total_k == 0:
        return attend_dense(q, k, v, index_map, scale)
    counts = _counts(index_map, total_k)

    def is_listed(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return counts[head // group, i, j] > 0

    def score(s: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + torch.log(counts[head // group, i, j].to(torch.float32))

    block_mask = create_block_mask(is_listed, 1, heads, total_q, total_k, device=q.device)
    plain: Any = flex_attention
    call = _compiled_flex() if q.is_cuda else plain
    out, aux = call(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        score_mod=score,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=group > 1,
        return_aux=AuxRequest(lse=True),
    )
    return out[0].transpose(0, 1), aux.lse[0].t()
