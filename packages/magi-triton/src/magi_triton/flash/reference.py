"""Dense attention in plain PyTorch, in the dtype of its inputs: slow, differentiable, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def visible(rows: int, keys: int, left: int, right: int, device: torch.device) -> Tensor:
    """bool ``(rows, keys)``: key n in ``[m + keys - rows - left, m + keys - rows + right]``; -1 is no limit."""
    distance = torch.arange(keys, device=device)[None] - torch.arange(rows, device=device)[:, None] - (keys - rows)
    seen = torch.ones((rows, keys), dtype=torch.bool, device=device)
    if right >= 0:
        seen &= distance <= right
    if left >= 0:
        seen &= distance >= -left
    return seen


def softmax_of(logits: Tensor, seen: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(softmax over seen keys, lse); rows that see nothing have softmax 0. ``sink (H,)`` joins the denominator."""
    masked = logits.masked_fill(~seen, float("-inf"))
    if sink is not None:
        column = sink.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        masked = torch.cat([masked, column], -1)
    empty = (masked == float("-inf")).all(-1, keepdim=True)
    lse = torch.logsumexp(masked.masked_fill(empty, 0.0), -1, keepdim=True)
    p = (masked - lse).exp().masked_fill(empty, 0.0)
    return p[..., : logits.shape[-1]], lse.masked_fill(empty, float("-inf")).squeeze(-1)


def expand_heads(x: Tensor, num_heads_q: int) -> Tensor:
    """``(B, Hkv, N, D)`` with each head repeated for its group of query heads."""
    return x.repeat_interleave(num_heads_q // x.shape[1], 1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    sm_scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_mask: Tensor | None = None,
    *,
    softcap: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    sink: Tensor | None = None,
    logit_bias: Tensor | None = None,
    upcast: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, lse, total)`` of :func:`magi_triton.flash_attention`.

    Args:
        dropout_mask: True where an element of the softmax is kept.
        logit_bias: added to the logits (broadcast to ``(B, Hq, M, N)``).
        upcast: compute in float64 and round ``out`` at the end.
    """
    dtype = q.dtype
    if upcast:
        q, k, v = q.double(), k.double(), v.double()
    k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
    logits = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    if logit_bias is not None:
        logits = logits + logit_bias
    seen = visible(q.shape[2], k.shape[2], window[0], 0 if causal else window[1], q.device)
    p, lse = softmax_of(logits, seen, sink)
    total = p.sum(2)
    if dropout_mask is not None:
        p = p * dropout_mask / (1.0 - dropout_p)
    out = p.to(v.dtype) @ v
    return out.to(dtype), lse, total


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    sm_scale: float | None = None,
    dropout_p: float = 0.0,
    return_log_normalizer: bool = False,
    return_total_attention: bool = False,
    *,
    upcast: bool = False,
    dropout_mask: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor | None, Tensor | None]:
    """Reference of :func:`magi_triton.flash_attention`; dropout needs the keep mask (``recompute_mask``).

    Raises:
        ValueError: ``dropout_p > 0`` without a mask.
    """
    if dropout_p > 0 and dropout_mask is None:
        raise ValueError("dropout_mask must be given when dropout_p > 0; recompute_mask makes it")
    out, lse, total = attention(q, k, v, causal, sm_scale, dropout_p, dropout_mask, upcast=upcast)
    if not (return_log_normalizer or return_total_attention):
        return out
    return out, lse if return_log_normalizer else None, total if return_total_attention else None
