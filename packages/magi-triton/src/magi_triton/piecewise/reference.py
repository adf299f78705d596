"""Piecewise attention in plain PyTorch, in the dtype of its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..flash.reference import expand_heads, softmax_of, visible


def piecewise_attention(
    q1: Tensor,
    k1: Tensor,
    q2: Tensor,
    k2: Tensor,
    v: Tensor,
    dist_threshold: int,
    causal: bool = False,
    sm_scale: float | None = None,
    *,
    upcast: bool = False,
) -> Tensor:
    """Reference of :func:`magi_triton.piecewise_attention`; in float64 with ``upcast``."""
    dtype = q1.dtype
    if upcast:
        q1, k1, q2, k2, v = (x.double() for x in (q1, k1, q2, k2, v))
    k1, k2, v = (expand_heads(x, q1.shape[1]) for x in (k1, k2, v))
    rows, keys = q1.shape[2], k1.shape[2]
    m, n = torch.arange(rows, device=v.device)[:, None], torch.arange(keys, device=v.device)[None]
    is_far = m + keys - rows - n >= dist_threshold
    logits = torch.where(is_far, q2 @ k2.transpose(-1, -2), q1 @ k1.transpose(-1, -2))
    logits = logits * (q1.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    logits = logits if upcast or logits.dtype == torch.float64 else logits.float()
    p, _ = softmax_of(logits, visible(rows, keys, -1, 0 if causal else -1, v.device))
    return (p.to(v.dtype) @ v).to(dtype)
