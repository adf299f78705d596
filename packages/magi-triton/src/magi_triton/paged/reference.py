"""Decode attention over pages in plain PyTorch, a loop over sequences."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_pages(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """``(Hkv, length, D)`` of one sequence from a cache ``(pages, Hkv, block, D)``."""
    pages = cache[block_table.long()]  # (n, Hkv, block, D)
    return pages.transpose(0, 1).flatten(1, 2)[:, :length]


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    attn_scale: float,
    max_context_len: int = 0,
    num_splits: int = 0,
    *,
    window: int = -1,
    upcast: bool = False,
) -> Tensor:
    """Reference of :func:`magi_triton.paged_attention`, in the dtype of its inputs, or in float64 with ``upcast``."""
    out = query.new_zeros((*query.shape[:2], value_cache.shape[3]), dtype=torch.float64 if upcast else query.dtype)
    if upcast:
        query, key_cache, value_cache = query.double(), key_cache.double(), value_cache.double()
    group = query.shape[1] // key_cache.shape[1]
    for s, length in enumerate(context_lens.tolist()):
        if length == 0:
            continue
        k = gather_pages(key_cache, block_tables[s], length).repeat_interleave(group, 0)
        v = gather_pages(value_cache, block_tables[s], length).repeat_interleave(group, 0)
        if window > 0:
            k, v = k[:, -window:], v[:, -window:]
        logits = torch.einsum("hd,hnd->hn", query[s], k) * attn_scale
        p = (logits if upcast else logits.float()).softmax(-1)
        out[s] = torch.einsum("hn,hnd->hd", p.to(v.dtype), v)
    return out
