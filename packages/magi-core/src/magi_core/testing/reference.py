"""The fp64 reference of attention over slices: dense, slow, plain, differentiable by autograd.

Semantics: contract items 1 to 9. Memory is ``O(total_q * total_k * num_heads_q)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["dense_counts", "reference_attention", "same_precision_attention"]


def dense_counts(mask: Any, total_q: int, total_k: int) -> Tensor:
    """How many slices cover each pair: ``(total_q, total_k)`` int64.

    Args:
        mask: a sequence of slices ``(q0, q1, k0, k1, type)``; or anything with ``to_counts(total_q, total_k)``
            (``Bands``) or with ``slices()`` (``Mask``); or a ``(total_q, total_k)`` tensor or array of counts.
    """
    if hasattr(mask, "to_counts"):
        return torch.from_numpy(np.asarray(mask.to_counts(total_q, total_k))).long()
    if hasattr(mask, "bands"):
        return dense_counts(mask.bands, total_q, total_k)
    if isinstance(mask, (Tensor, np.ndarray)) and tuple(mask.shape) == (total_q, total_k):
        return torch.as_tensor(mask).long()
    counts = torch.zeros(total_q, total_k, dtype=torch.int64)
    for q0, q1, k0, k1, mask_type in mask:
        rows, columns = torch.arange(q1 - q0)[:, None], torch.arange(k1 - k0)[None, :]
        seen = torch.ones(max(0, q1 - q0), max(0, k1 - k0), dtype=torch.bool)
        if mask_type in (1, 3):
            seen &= columns <= rows + (k1 - k0) - (q1 - q0)
        if mask_type in (2, 3):
            seen &= columns >= rows
        counts[q0:q1, k0:k1] += seen
    return counts


def _sink_logits(sink: Tensor | None, layout: str, total_q: int, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Extra columns ``(num_heads, total_q, s_sink)``."""
    if sink is None:
        return torch.empty(num_heads, total_q, 0, dtype=dtype)
    if layout == "sh":
        return sink.to(dtype).t()[:, None, :].expand(num_heads, total_q, sink.shape[0])
    return sink.to(dtype).permute(2, 0, 1)


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    dtype: torch.dtype,
    p_dtype: torch.dtype,
    softmax_scale: float | None,
    softcap: float,
    sink: Tensor | None,
    sink_layout: str,
) -> tuple[Tensor, Tensor, Tensor]:
    total_q, num_heads_q, head_dim = q.shape
    total_k, num_heads_kv, _ = k.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    counts = dense_counts(mask, total_q, total_k).to(q.device)
    covered = (counts > 0).any(0)[:, None, None]
    # Keys that nothing covers may hold NaN: 0 * NaN is NaN, so they are replaced, not weighted with 0.
    group = num_heads_q // num_heads_kv
    b_k = torch.where(covered, k, 0.0).to(dtype).repeat_interleave(group, 1).transpose(0, 1)
    b_v = torch.where(covered, v, 0.0).to(dtype).repeat_interleave(group, 1).transpose(0, 1)
    s = scale * (q.to(dtype).transpose(0, 1) @ b_k.transpose(1, 2))  # (num_heads_q, total_q, total_k)
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(counts == 0, -torch.inf)
    if total_q > 0 and total_k > 0:
        max_logits = s.detach().amax((1, 2))
    else:
        max_logits = torch.full((num_heads_q,), -torch.inf, dtype=dtype, device=q.device)
    sinks = _sink_logits(sink, sink_layout, total_q, num_heads_q, dtype).to(q.device)
    logits = torch.cat([s + counts.clamp_min(1).to(dtype).log(), sinks], 2)
    logits = torch.cat([logits, logits.new_full((num_heads_q, total_q, 1), -torch.inf)], 2)  # never an empty axis
    saturated = (logits == torch.inf).any(2, keepdim=True)  # a sink of +inf takes everything and passes no gradient
    logits = torch.where(saturated, -torch.inf, logits)
    largest = logits.detach().amax(2, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    p = torch.exp(logits - largest)
    total = p.sum(2, keepdim=True)
    empty = total == 0
    safe = torch.where(empty, 1.0, total)
    lse = torch.where(empty, torch.where(saturated, torch.inf, -torch.inf).to(dtype), largest + safe.log())
    # A product in p_dtype, so that its gradients with respect to weights and v are rounded to p_dtype as well.
    out = (p[:, :, :total_k] / safe).to(p_dtype) @ b_v.to(p_dtype)
    return out.transpose(0, 1), lse.squeeze(2).t(), max_logits


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any | Sequence[tuple[int, int, int, int, int]],
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over slices in float64, whatever the dtype of the inputs.

    Args:
        q: ``(total_q, num_heads_q, head_dim)``, floating.
        k: ``(total_k, num_heads_kv, head_dim)``. v: ``(total_k, num_heads_kv, head_dim_v)``.
        mask: see :func:`dense_counts`. A pair covered twice counts twice.
        softmax_scale: ``head_dim ** -0.5`` when None.
        sink: ``(s_sink, num_heads_q)`` for ``sh``, ``(total_q, s_sink, num_heads_q)`` for ``ssh``.

    Returns:
        ``out (total_q, num_heads_q, head_dim_v)``, ``lse (total_q, num_heads_q)``, ``max_logits (num_heads_q,)``, all
        float64. ``out`` and ``lse`` are differentiable with respect to q, k, v and sink.
    """
    return _dense(q, k, v, mask, torch.float64, torch.float64, softmax_scale, softcap, sink, sink_layout)


def same_precision_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any | Sequence[tuple[int, int, int, int, int]],
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with plain torch in the precision of contract item 9: the baseline that a budget is measured with.

    Scores, softmax and sums are float32 (float64 for float64 inputs), weights are rounded to the dtype of the inputs,
    and ``out`` has that dtype.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, lse, max_logits = _dense(q, k, v, mask, dtype, q.dtype, softmax_scale, softcap, sink, sink_layout)
    return out.to(q.dtype), lse, max_logits
