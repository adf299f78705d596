"""Forgetting attention in plain PyTorch, in the dtype of its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..flash.reference import expand_heads, softmax_of, visible


def forgetting_attention(
    q: Tensor, k: Tensor, v: Tensor, log_fgate: Tensor, *, seq_start: Tensor | None = None,
    sm_scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Reference of :func:`magi_triton.forgetting_attention.forgetting_attention` with heads second to tokens."""
    q, k, v, gates = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), log_fgate.transpose(1, 2)
    rows, keys = q.shape[2], k.shape[2]
    k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
    seen = visible(rows, keys, -1, 0, q.device)[None, None]
    if seq_start is not None:
        is_token = torch.arange(keys, device=q.device) >= seq_start[:, None, None]
        gates = gates.masked_fill(~is_token, 0.0)
        seen = seen & is_token[:, :, None]
    c = gates.cumsum(-1)
    logits = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    logits = logits.to(c.dtype) + c[..., keys - rows :, None] - c[..., None, :]
    p, _ = softmax_of(logits, seen.expand(logits.shape))
    return (p.to(v.dtype) @ v).transpose(1, 2)
