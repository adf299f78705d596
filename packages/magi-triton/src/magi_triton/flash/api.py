"""``flash_attention`` and ``flash_attention_varlen``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import checks


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    sm_scale: float | None = None,
    dropout_p: float = 0.0,
    return_log_normalizer: bool = False,
    return_total_attention: bool = False,
    return_seed_offset: bool = False,
    *,
    softcap: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor | None, Tensor | None, int | None, int | None]:
    """Softmax attention, forward and backward (first order).

    Args:
        q: ``(B, Hq, M, D)``, float16 or bfloat16, ``D <= 256``; any strides.
        k, v: ``(B, Hkv, N, D)``; ``Hkv`` divides ``Hq``, query head ``h`` reads kv head ``h // (Hq // Hkv)``.
        causal: row ``m`` sees keys ``n <= m + N - M`` (aligned bottom right).
        sm_scale: factor on ``q k^T``, any finite number; ``D ** -0.5`` when None.
        dropout_p: probability to drop an element of the softmax, in ``[0, 1)``. Element ``(b, h, m, n)`` uses Philox
            number ``offset + ((b * Hq + h) * M + m) * N + n``; kept elements are scaled by ``1 / (1 - dropout_p)``.
            Seed and offset come from the default generator of q's device, which moves on by ``B * Hq * M * N``.
        return_log_normalizer: give lse. return_total_attention: give total. return_seed_offset: give seed and offset.
        softcap: ``s = softcap * tanh(s / softcap)`` on scaled products; 0 is none.
        window: ``(left, right)``: row ``m`` sees ``m + N - M - left <= n <= m + N - M + right``; -1 is no limit.
        sink: float32 ``(Hq,)``, one more logit per head in the denominator, with no value.

    Returns:
        ``out`` with shape, dtype and strides of q. With any ``return_*`` flag ``(out, lse, total, seed, offset)``, None
        where not asked for (seed and offset also without dropout). ``lse`` float32 ``(B, Hq, M)``, natural log, before
        dropout, sink included, differentiable; ``total`` float32 ``(B, Hq, N)``: sum over m of the softmax before
        dropout, not differentiable. A row that sees no key has ``out = 0`` and ``lse = -inf``.

    Raises:
        ValueError, TypeError: an argument does not fit; named. RuntimeError: no kernel can run here.

    Does not synchronise. Deterministic, the backward too. Source: FlashAttention-2, arXiv:2307.08691.
    """
    checks.check_dense(q, k, v)
    scale = checks.softmax_scale(sm_scale, q.shape[3])
    checks.check_dropout(dropout_p)
    checks.check_softcap(softcap)
    left, right = checks.check_window(window, causal)
    checks.check_sink(sink, q, q.shape[1])
    from . import ops  # noqa: F401  (registers the operators)

    batch, heads, rows = q.shape[:3]
    keys = k.shape[2]
    philox = torch.ops.magi_triton.philox_draw(q, batch * heads * rows * keys) if dropout_p > 0 else None
    out, lse, _ = torch.ops.magi_triton.flash_fwd(
        q, k, v, sink, None, None, rows, keys, scale, left, right, softcap, float(dropout_p), philox
    )
    if not (return_log_normalizer or return_total_attention or return_seed_offset):
        return out  # type: ignore[no-any-return]
    total = None
    if return_total_attention:
        total = torch.ops.magi_triton.flash_total(q.detach(), k.detach(), lse.detach(), scale, left, right, softcap)
    seed = offset = None
    if return_seed_offset and philox is not None:
        seed, offset = (int(word) for word in philox.tolist())
    return out, lse if return_log_normalizer else None, total, seed, offset


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    sm_scale: float | None = None,
    dropout_p: float = 0.0,
    return_log_normalizer: bool = False,
    *,
    softcap: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_attention` within packed sequences.

    Args:
        q: ``(total_q, Hq, D)``. k, v: ``(total_k, Hkv, D)``.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 ``(num + 1,)``, from 0 to the totals, on the device of q. Empty
            sequences are allowed.
        max_seqlen_q, max_seqlen_k: longest sequence, in tokens. Too large costs time; too small is not detected.
        dropout_p: as there, with the element's index over ``(num, Hq, max_seqlen_q, max_seqlen_k)``.
        causal, sm_scale, softcap, window, sink: as there, within each sequence.

    Returns:
        ``out`` like q; with ``return_log_normalizer`` ``(out, lse)``, lse float32 ``(total_q, Hq)``.

    Raises:
        ValueError, TypeError: an argument does not fit; named. RuntimeError: no kernel can run here.
    """
    tensors = {"q": q, "k": k, "v": v}
    checks.check_tensors(tensors, 3)
    checks.check_dtypes(tensors)
    checks.check_head_dim(q.shape[2])
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k must have the head dim of q ({q.shape[2]}), got {k.shape[2]}")
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k {tuple(k.shape)}, got {tuple(v.shape)}")
    checks.check_heads(q.shape[1], k.shape[1])
    starts = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    checks.check_tensors({"q": q, **starts})
    checks.check_integers(starts)
    for name, x in starts.items():
        if x.dim() != 1 or x.numel() < 2 or x.numel() != cu_seqlens_q.numel():
            raise ValueError(f"{name} must have one dim, the length of cu_seqlens_q, at least 2, got {tuple(x.shape)}")
    for name, size in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if size < 0:
            raise ValueError(f"{name} must not be negative, got {size}")
    scale = checks.softmax_scale(sm_scale, q.shape[2])
    checks.check_dropout(dropout_p)
    checks.check_softcap(softcap)
    left, right = checks.check_window(window, causal)
    checks.check_sink(sink, q, q.shape[1])
    from . import ops  # noqa: F401  (registers the operators)

    philox = None
    if dropout_p > 0:
        count = (cu_seqlens_q.numel() - 1) * q.shape[1] * max_seqlen_q * max_seqlen_k
        philox = torch.ops.magi_triton.philox_draw(q, count)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    cu_q, cu_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    out, lse, _ = torch.ops.magi_triton.flash_fwd(
        q, k, v, sink, cu_q, cu_k, max_seqlen_q, max_seqlen_k, scale, left, right, softcap, float(dropout_p), philox
    )
    out = out.squeeze(0).transpose(0, 1)
    return (out, lse.squeeze(0).transpose(0, 1)) if return_log_normalizer else out
