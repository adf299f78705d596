"""torch operators ``magi_triton::sage_quantise`` and ``sage_fwd``; tensors are ``(B, H, rows, D)``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.launch import block_dim, ceil_div, on_device, require_kernels, rows_ready
from ..runtime import configs

_DEVICES = ("cpu", "cuda")

torch.library.define(
    "magi_triton::sage_quantise", "(Tensor x, Tensor? mean, int block, float factor) -> (Tensor, Tensor)"
)
torch.library.define(
    "magi_triton::sage_fwd",
    "(Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, Tensor? mask, int block_q, int block_k,"
    " bool causal, ScalarType dtype, int maxnreg) -> (Tensor, Tensor)",
)


def _quantised(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    values = torch.empty_like(x, dtype=torch.int8)
    if values.stride(-1) != 1:
        values = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    return values, x.new_empty((*x.shape[:2], ceil_div(x.shape[2], block)), dtype=torch.float32)


@torch.library.impl("magi_triton::sage_quantise", _DEVICES)
def _sage_quantise(x: Tensor, mean: Tensor | None, block: int, factor: float) -> tuple[Tensor, Tensor]:
    require_kernels("per_block_int8", x)
    from .kernel import quantise_kernel

    values, scales = _quantised(x, block)
    if x.numel() == 0:
        return values, scales.zero_()
    x = rows_ready(x)
    batch, heads, rows, dim = x.shape
    with on_device(x):
        quantise_kernel[(ceil_div(rows, block), heads, batch)](
            x, mean, values, scales, x.stride()[:3], (0, 0) if mean is None else mean.stride()[:2], values.stride()[:3],
            scales.stride(), rows, factor, HEAD_DIM=dim, BLOCK_D=block_dim(dim), BLOCK=block, HAS_MEAN=mean is not None,
            num_warps=4 if block <= 64 else 8,
        )  # fmt: skip
    return values, scales


@torch.library.register_fake("magi_triton::sage_quantise")
def _sage_quantise_fake(x: Tensor, mean: Tensor | None, block: int, factor: float) -> tuple[Tensor, Tensor]:
    return _quantised(x, block)


def _outputs(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, dtype=dtype), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.impl("magi_triton::sage_fwd", _DEVICES)
def _sage_fwd(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, mask: Tensor | None,
    block_q: int, block_k: int, causal: bool, dtype: torch.dtype, maxnreg: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    require_kernels("sage_attention.forward", q)
    from .kernel import sage_fwd_kernel

    q, k, v = rows_ready(q), rows_ready(k), rows_ready(v)
    out, lse = _outputs(q, dtype)
    if q.numel() == 0:
        return out, lse
    batch, heads, rows, dim = q.shape
    tile = configs.tile("sage", block_dim(dim))
    kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.int8)
    hints: dict[str, Any] = {"maxnreg": maxnreg} if maxnreg > 0 and q.is_cuda else {}
    with on_device(q):
        block_m, block_n = min(tile.block_m, block_q), min(tile.block_n, block_k)
        sage_fwd_kernel[(ceil_div(rows, block_m), heads, batch)](
            q, k, v, q_scale, k_scale, mask, out, lse, q.stride()[:3], k.stride()[:3], v.stride()[:3],
            q_scale.stride(), k_scale.stride(), (0, 0, 0, 0) if mask is None else mask.stride(), out.stride()[:3],
            heads, heads // k.shape[1], rows, k.shape[2], HEAD_DIM=dim, BLOCK_D=max(32, block_dim(dim)),
            BLOCK_M=block_m, BLOCK_N=block_n, BLKQ=block_q, BLKK=block_k, CAUSAL=causal, MASK=kind,
            num_stages=tile.num_stages, num_warps=tile.num_warps, **hints,
        )  # fmt: skip
    return out, lse


@torch.library.register_fake("magi_triton::sage_fwd")
def _sage_fwd_fake(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, mask: Tensor | None,
    block_q: int, block_k: int, causal: bool, dtype: torch.dtype, maxnreg: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _outputs(q, dtype)
