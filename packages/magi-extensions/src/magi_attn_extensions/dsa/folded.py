"""Backends of magi_core: kv heads folded into rows, then ``flex_flash_attn_func`` with listed keys."""

from __future__ import annotations

import torch
from magi_core import flex_flash_attn_func
from torch import Tensor

__all__ = ["attend_folded"]


def attend_folded(
    q: Tensor, k: Tensor, v: Tensor, index_map: Tensor, scale: float, backend: str | None, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """``(out, lse)``; row ``g * total + t`` of the folded tensors is token ``t`` of kv head ``g``."""
    (total_q, heads, dim), (total_k, heads_kv, dim_v) = q.shape, v.shape
    group = heads // heads_kv
    rows_q = q.reshape(total_q, heads_kv, group, dim).transpose(0, 1).reshape(heads_kv * total_q, group, dim)
    rows_k, rows_v = (x.transpose(0, 1).reshape(heads_kv * total_k, 1, x.shape[2]) for x in (k, v))
    first = torch.arange(heads_kv, dtype=torch.int32, device=q.device)[:, None, None] * total_k
    ids = torch.where(index_map < 0, -1, index_map.to(torch.int32) + first)
    out, meta = flex_flash_attn_func(
        *(rows_q, rows_k, rows_v),
        index_attn_indices=ids.reshape(heads_kv * total_q, 1, -1),
        softmax_scale=scale,
        deterministic=deterministic,
        backend=backend,
    )
    assert meta.lse is not None
    out = out.unflatten(0, (heads_kv, total_q)).transpose(0, 1).reshape(total_q, heads, dim_v)
    return out, meta.lse.unflatten(0, (heads_kv, total_q)).transpose(0, 1).reshape(total_q, heads)
