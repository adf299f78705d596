"""``forgetting_attention``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import checks


def forgetting_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_fgate: Tensor,
    *,
    head_first: bool = False,
    seq_start: Tensor | None = None,
    sm_scale: float | None = None,
    adaptive_threshold: float | None = None,
) -> Tensor:
    """Causal attention whose logits decay by gates, forward and backward (first order).

    ``s[i,j] = sm_scale q_i.k_j + C_i - C_j`` with ``C = cumsum(log_fgate)`` over keys; row ``i`` stands at key
    ``i + N - M`` and sees the keys up to it.

    Args:
        q: ``(B, M, Hq, D)``, or ``(B, Hq, M, D)`` with ``head_first``; float16 or bfloat16, ``D <= 256``, ``M <= N``.
        k, v: ``(B, N, Hkv, D)``, or heads first; ``Hkv`` divides ``Hq``.
        log_fgate: float32 ``(B, N, Hq)``, or ``(B, Hq, N)`` with ``head_first``; normally a log-sigmoid.
        seq_start: integer ``(B,)``: tokens before it (left padding) are seen by none, and their gates count as 0.
        sm_scale: any finite number; ``D ** -0.5`` when None.
        adaptive_threshold: None, or a number <= 0: the forward skips leading key tiles all of whose decays
            ``C_i - C_j`` are below it, for gates that are not positive. The backward is that of the
            function without skipping.

    Returns:
        ``out`` with shape, dtype and strides of q; rows that see no key are 0.

    Raises:
        ValueError, TypeError: an argument does not fit; named. RuntimeError: no kernel can run here.

    Does not synchronise. Deterministic, the backward too. Source: Forgetting Transformer, arXiv:2503.02130.
    """
    checks.check_tensors({"q": q, "k": k, "v": v}, 4)
    if not head_first:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    checks.check_dense(q, k, v)
    checks.check_tensors({"q": q, "log_fgate": log_fgate})
    checks.check_dtypes({"log_fgate": log_fgate}, (torch.float32,))
    batch, heads, rows, keys = *q.shape[:3], k.shape[2]
    expected = (batch, heads, keys) if head_first else (batch, keys, heads)
    if tuple(log_fgate.shape) != expected:
        raise ValueError(f"log_fgate must have shape {expected}, got {tuple(log_fgate.shape)}")
    if rows > keys:
        raise ValueError(f"q must have at most as many rows as k has keys, got {rows} and {keys}")
    scale = checks.softmax_scale(sm_scale, q.shape[3])
    if adaptive_threshold is not None and not -checks.INFINITY < adaptive_threshold <= 0:
        raise ValueError(f"adaptive_threshold must be None or a finite number <= 0, got {adaptive_threshold}")
    gates = log_fgate if head_first else log_fgate.transpose(1, 2)
    if seq_start is not None:
        checks.check_tensors({"q": q, "seq_start": seq_start})
        checks.check_integers({"seq_start": seq_start})
        if tuple(seq_start.shape) != (batch,):
            raise ValueError(f"seq_start must have shape ({batch},), got {tuple(seq_start.shape)}")
        padding = torch.arange(keys, device=q.device) < seq_start[:, None, None]
        gates = gates.masked_fill(padding, 0.0)
    from . import ops  # noqa: F401  (registers the operators)

    threshold = None if adaptive_threshold is None else float(adaptive_threshold)
    out, _ = torch.ops.magi_triton.forget_fwd(q, k, v, gates.cumsum(-1), seq_start, scale, threshold)
    return out if head_first else out.transpose(1, 2)  # type: ignore[no-any-return]
