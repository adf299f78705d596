"""``per_block_int8`` and ``forward``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..common import checks

LAYOUTS = ("HND", "NHD")


def _heads_first(x: Tensor, layout: str) -> Tensor:
    return x if layout == "HND" else x.transpose(1, 2)


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"tensor_layout must be 'HND' or 'NHD', got {layout!r}")


def _check_block(name: str, block: int) -> None:
    if block < 16 or block > 256 or block & (block - 1):
        raise ValueError(f"{name} must be a power of two in [16, 256], got {block}")


def per_block_int8(
    q: Tensor,
    k: Tensor,
    km: Tensor | None = None,
    BLKQ: int = 128,
    BLKK: int = 64,
    sm_scale: float | None = None,
    tensor_layout: str = "HND",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise queries and keys to int8, with a scale for each block of tokens of a head.

    ``scale = absmax / 127``; values are rounded half away from zero. Queries are multiplied by ``sm_scale * log2(e)``
    first, so that logits are in base 2. A block of zeros has scale 0 and values 0.

    Args:
        q, k: ``(B, H, L, D)`` for ``"HND"``, ``(B, L, H, D)`` for ``"NHD"``; float16 or bfloat16, ``D <= 256``.
        km: mean of k over its tokens, one row per head in the layout of k; subtracted from k. None: nothing is.
        BLKQ, BLKK: tokens of a block, powers of two in [16, 256]. :func:`forward` must be told others than these.
        sm_scale: any finite number; ``D ** -0.5`` when None.

    Returns:
        ``(q_int8, q_scale, k_int8, k_scale)``: values in the layout given, scales float32 ``(B, H, ceil(L / BLK))``.

    Raises:
        ValueError, TypeError: an argument does not fit; named. RuntimeError: no kernel can run here.
    """
    _check_layout(tensor_layout)
    _check_block("BLKQ", BLKQ)
    _check_block("BLKK", BLKK)
    checks.check_tensors({"q": q, "k": k}, 4)
    checks.check_dtypes({"q": q, "k": k})
    checks.check_head_dim(q.shape[3])
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"k must have the batch and head dim of q {tuple(q.shape)}, got {tuple(k.shape)}")
    checks.check_no_grad("per_block_int8", q=q, k=k)
    scale = checks.softmax_scale(sm_scale, q.shape[3])
    q, k = _heads_first(q, tensor_layout), _heads_first(k, tensor_layout)
    if km is not None:
        checks.check_tensors({"k": k, "km": km})
        if km.numel() != k.shape[0] * k.shape[1] * k.shape[3]:
            raise ValueError(f"km must hold one row per batch and head of k, got shape {tuple(km.shape)}")
        km = km.reshape(k.shape[0], k.shape[1], k.shape[3])
    from . import ops  # noqa: F401  (registers the operators)

    q8, q_scale = torch.ops.magi_triton.sage_quantise(q, None, BLKQ, scale * math.log2(math.e))
    k8, k_scale = torch.ops.magi_triton.sage_quantise(k, km, BLKK, 1.0)
    return _heads_first(q8, tensor_layout), q_scale, _heads_first(k8, tensor_layout), k_scale


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    tensor_layout: str = "HND",
    attn_mask: Tensor | None = None,
    output_dtype: torch.dtype = torch.float16,
    return_lse: bool = False,
    maxnreg: int | None = None,
    *,
    is_causal: bool = False,
    BLKQ: int = 128,
    BLKK: int = 64,
) -> tuple[Tensor, Tensor]:
    """Attention from int8 queries and keys.

    ``z = (q8 . k8) * q_scale * k_scale`` are base-2 logits, ``out = softmax_2(z) v``; the softmax is rounded to the
    dtype of v before the product, which is summed in float32.

    Args:
        q, k: int8, as :func:`per_block_int8` gives them. v: float16 or bfloat16, the shape of k.
        q_scale, k_scale: float32 ``(B, H, ceil(L / BLK))``.
        attn_mask: broadcast to ``(B, Hq, M, N)``; bool, True keeps, or a floating-point addend to the base-2 logits.
        output_dtype: float16, bfloat16 or float32.
        return_lse: give ``log2(sum 2**z)``, float32 ``(B, Hq, M)``: base 2, of the smoothed keys.
        maxnreg: registers per thread of the kernel; a hint without effect on the result.
        is_causal: row ``m`` sees keys ``n <= m + N - M``.
        BLKQ, BLKK: the blocks that q and k were quantised with.

    Returns:
        ``(out, lse)``; ``lse`` is an empty CPU tensor unless asked for. A row that sees no key has ``out = 0`` and
        ``lse = -inf``.

    Raises:
        ValueError, TypeError: an argument does not fit, scales made with other blocks included; named.
        RuntimeError: no kernel can run here.
    """
    _check_layout(tensor_layout)
    _check_block("BLKQ", BLKQ)
    _check_block("BLKK", BLKK)
    tensors = {"q": q, "k": k, "v": v}
    checks.check_tensors(tensors, 4)
    checks.check_dtypes({"q": q, "k": k}, (torch.int8,))
    checks.check_dtypes({"v": v})
    checks.check_no_grad("sage_attention.forward", v=v)
    if output_dtype not in (*checks.HALF_TYPES, torch.float32):
        raise TypeError(f"output_dtype must be float16, bfloat16 or float32, got {output_dtype}")
    if maxnreg is not None and maxnreg <= 0:
        raise ValueError(f"maxnreg must be positive, got {maxnreg}")
    q, k, v = (_heads_first(x, tensor_layout) for x in (q, k, v))
    checks.check_head_dim(q.shape[3])
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"k must have the batch and head dim of q, got {tuple(k.shape)} for q {tuple(q.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k {tuple(k.shape)}, got {tuple(v.shape)}")
    checks.check_heads(q.shape[1], k.shape[1])
    scales = {"q_scale": (q_scale, q, "BLKQ", BLKQ), "k_scale": (k_scale, k, "BLKK", BLKK)}
    for name, (scale, x, block_name, block) in scales.items():
        checks.check_tensors({"q": q, name: scale})
        checks.check_dtypes({name: scale}, (torch.float32,))
        expected = (x.shape[0], x.shape[1], -(-x.shape[2] // block))
        if tuple(scale.shape) != expected:
            raise ValueError(f"{name} must have shape {expected} for {block_name} {block}, got {tuple(scale.shape)}")
    if attn_mask is not None:
        checks.check_tensors({"q": q, "attn_mask": attn_mask})
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise TypeError(f"attn_mask must be bool or floating-point, got {attn_mask.dtype}")
        full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        if attn_mask.dim() != 4 or any(size not in (1, whole) for size, whole in zip(attn_mask.shape, full)):
            raise ValueError(f"attn_mask must broadcast to {full}, got {tuple(attn_mask.shape)}")
        attn_mask = attn_mask.expand(full)
    from . import ops  # noqa: F401  (registers the operators)

    out, lse = torch.ops.magi_triton.sage_fwd(
        q, k, v, q_scale, k_scale, attn_mask, BLKQ, BLKK, is_causal, output_dtype, maxnreg or 0
    )
    return _heads_first(out, tensor_layout), lse if return_lse else torch.empty(0)
