"""SageAttention in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..flash.reference import expand_heads, softmax_of, visible


def per_block_int8(x: Tensor, block: int, factor: float, mean: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """int8 values and float32 scales of ``x (B, H, L, D)``, block by block."""
    x = (x.float() - (0.0 if mean is None else mean.float())) * torch.tensor(factor, dtype=torch.float32)
    values, scales = torch.zeros(x.shape, dtype=torch.int8, device=x.device), []
    for start in range(0, x.shape[2], block):
        part = x[:, :, start : start + block]
        scale = part.abs().amax((2, 3)) / 127
        divided = part / torch.where(scale > 0, scale, 1.0)[..., None, None]
        values[:, :, start : start + block] = (divided + 0.5 * divided.sign()).trunc().clamp(-127, 127).to(torch.int8)
        scales.append(scale)
    return values, torch.stack(scales, -1)


def dequantise(x: Tensor, scales: Tensor, block: int) -> Tensor:
    """float64 ``(B, H, L, D)``."""
    return x.double() * scales.double().repeat_interleave(block, -1)[..., : x.shape[2], None]


def forward(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, attn_mask: Tensor | None = None,
    is_causal: bool = False, BLKQ: int = 128, BLKK: int = 64,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Reference of :func:`magi_triton.sage_attention.forward` on ``(B, H, L, D)``: float64 out, base-2 lse."""
    z = dequantise(q, q_scale, BLKQ) @ expand_heads(dequantise(k, k_scale, BLKK), q.shape[1]).transpose(-1, -2)
    seen = visible(q.shape[2], k.shape[2], -1, 0 if is_causal else -1, q.device).expand(z.shape)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        z = z + attn_mask
    p, lse = softmax_of(z * math.log(2), seen)
    return p @ expand_heads(v.double(), q.shape[1]), lse / math.log(2)
