"""torch operators ``magi_triton::piecewise_fwd`` and ``piecewise_bwd``; tensors are ``(B, H, rows, D)``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.launch import block_dim, ceil_div, empty_like_rows, on_device, require_kernels, rows_ready
from ..flash.ops import delta_of, refuse_double_backward
from ..runtime import configs

_DEVICES = ("cpu", "cuda")
_INPUTS = "Tensor q1, Tensor k1, Tensor q2, Tensor k2, Tensor v"
_OPTIONS = "int threshold, float scale, bool causal"
_FAR = 2**30  # a threshold beyond every distance; keeps sums of positions and threshold in int32

torch.library.define("magi_triton::piecewise_fwd", f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)")
torch.library.define(
    "magi_triton::piecewise_bwd",
    f"(Tensor dout, {_INPUTS}, Tensor out, Tensor lse, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _outputs(q1: Tensor) -> tuple[Tensor, Tensor]:
    return empty_like_rows(q1), q1.new_empty(q1.shape[:3], dtype=torch.float32)


@torch.library.impl("magi_triton::piecewise_fwd", _DEVICES)
def _piecewise_fwd(
    q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, threshold: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    require_kernels("piecewise_attention", q1)
    from .kernel import piecewise_fwd_kernel

    out, lse = _outputs(q1)
    if q1.numel() == 0:
        return out, lse
    q1, k1, q2, k2, v = (rows_ready(x) for x in (q1, k1, q2, k2, v))
    batch, heads, rows, dim = q1.shape
    tile = configs.tile("piecewise_fwd", block_dim(dim))
    with on_device(q1):
        piecewise_fwd_kernel[(ceil_div(rows, tile.block_m), heads, batch)](
            q1, k1, q2, k2, v, out, lse, *(x.stride()[:3] for x in (q1, k1, q2, k2, v, out)), heads,
            heads // k1.shape[1], rows, k1.shape[2], max(-_FAR, min(_FAR, threshold)), scale,
            HEAD_DIM=dim, BLOCK_D=block_dim(dim), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, CAUSAL=causal,
            SCALE_FIRST=scale <= 0, num_stages=tile.num_stages, num_warps=tile.num_warps,
        )  # fmt: skip
    return out, lse


@torch.library.register_fake("magi_triton::piecewise_fwd")
def _piecewise_fwd_fake(
    q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, threshold: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    return _outputs(q1)


@torch.library.impl("magi_triton::piecewise_bwd", _DEVICES)
def _piecewise_bwd(
    dout: Tensor, q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    threshold: int, scale: float, causal: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    require_kernels("piecewise_attention", q1)
    from .kernel import piecewise_dkdv_kernel, piecewise_dq_kernel

    dq1, dk1, dq2, dk2, dv = grads = tuple(empty_like_rows(x) for x in (q1, k1, q2, k2, v))
    if q1.numel() == 0 or k1.numel() == 0:
        return tuple(x.zero_() for x in grads)
    inputs = q1, k1, q2, k2, v = tuple(rows_ready(x) for x in (q1, k1, q2, k2, v))
    out, dout = rows_ready(out), rows_ready(dout)
    batch, heads, rows, dim = q1.shape
    sizes = (heads, heads // k1.shape[1], rows, k1.shape[2], max(-_FAR, min(_FAR, threshold)), scale)
    strides = tuple(x.stride()[:3] for x in (*inputs, dout))
    delta = torch.empty_like(lse)
    with on_device(q1):
        delta_of(out, dout, None, delta)
        tile = configs.tile("piecewise_dkdv", block_dim(dim))
        piecewise_dkdv_kernel[(ceil_div(k1.shape[2], tile.block_n), k1.shape[1], batch)](
            *inputs, dout, lse, delta, dk1, dk2, dv, *strides, *(x.stride()[:3] for x in (dk1, dk2, dv)), *sizes,
            HEAD_DIM=dim, BLOCK_D=block_dim(dim), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, CAUSAL=causal,
            num_stages=tile.num_stages, num_warps=tile.num_warps,
        )  # fmt: skip
        tile = configs.tile("piecewise_dq", block_dim(dim))
        piecewise_dq_kernel[(ceil_div(rows, tile.block_m), heads, batch)](
            *inputs, dout, lse, delta, dq1, dq2, *strides, *(x.stride()[:3] for x in (dq1, dq2)), *sizes,
            HEAD_DIM=dim, BLOCK_D=block_dim(dim), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, CAUSAL=causal,
            num_stages=tile.num_stages, num_warps=tile.num_warps,
        )  # fmt: skip
    return grads


@torch.library.register_fake("magi_triton::piecewise_bwd")
def _piecewise_bwd_fake(
    dout: Tensor, q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    threshold: int, scale: float, causal: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(empty_like_rows(x) for x in (q1, k1, q2, k2, v))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(*inputs[:5], out, lse)
    ctx.options = inputs[5:]


def _backward(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = torch.ops.magi_triton.piecewise_bwd(dout, *ctx.saved_tensors, *ctx.options)
    return (*grads, None, None, None)


torch.library.register_autograd("magi_triton::piecewise_fwd", _backward, setup_context=_setup_context)
torch.library.register_autograd("magi_triton::piecewise_bwd", refuse_double_backward)
