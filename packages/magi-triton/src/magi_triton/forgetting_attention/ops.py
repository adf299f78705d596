"""torch operators ``magi_triton::forget_fwd`` and ``forget_bwd``; tensors are ``(B, H, rows, D)``, c ``(B, Hq, N)``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.launch import block_dim, ceil_div, empty_like_rows, on_device, require_kernels, rows_ready
from ..flash.ops import delta_of, refuse_double_backward
from ..runtime import configs

_DEVICES = ("cpu", "cuda")
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor c, Tensor? starts"

torch.library.define("magi_triton::forget_fwd", f"({_INPUTS}, float scale, float? threshold) -> (Tensor, Tensor)")
torch.library.define(
    "magi_triton::forget_bwd",
    f"(Tensor dout, {_INPUTS}, Tensor out, Tensor lse, float scale) -> (Tensor, Tensor, Tensor, Tensor)",
)


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    return empty_like_rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.impl("magi_triton::forget_fwd", _DEVICES)
def _forget_fwd(
    q: Tensor, k: Tensor, v: Tensor, c: Tensor, starts: Tensor | None, scale: float, threshold: float | None
) -> tuple[Tensor, Tensor]:
    require_kernels("forgetting_attention", q)
    from .kernel import forget_fwd_kernel

    out, lse = _outputs(q)
    if q.numel() == 0:
        return out, lse
    q, k, v, c = rows_ready(q), rows_ready(k), rows_ready(v), c.contiguous()
    batch, heads, rows, dim = q.shape
    tile = configs.tile("forget_fwd", block_dim(dim))
    with on_device(q):
        forget_fwd_kernel[(ceil_div(rows, tile.block_m), heads, batch)](
            q, k, v, c, starts, out, lse, *(x.stride()[:3] for x in (q, k, v, out)), heads, heads // k.shape[1], rows,
            k.shape[2], scale, threshold or 0.0, HEAD_DIM=dim, BLOCK_D=block_dim(dim), BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n, HAS_START=starts is not None, PRUNE=threshold is not None,
            num_stages=tile.num_stages, num_warps=tile.num_warps,
        )  # fmt: skip
    return out, lse


@torch.library.register_fake("magi_triton::forget_fwd")
def _forget_fwd_fake(
    q: Tensor, k: Tensor, v: Tensor, c: Tensor, starts: Tensor | None, scale: float, threshold: float | None
) -> tuple[Tensor, Tensor]:
    return _outputs(q)


@torch.library.impl("magi_triton::forget_bwd", _DEVICES)
def _forget_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, c: Tensor, starts: Tensor | None, out: Tensor, lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    require_kernels("forgetting_attention", q)
    from .kernel import forget_dkdv_kernel, forget_dq_kernel

    dq, dk, dv = (empty_like_rows(x) for x in (q, k, v))
    dc = torch.empty_like(c, memory_format=torch.contiguous_format)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), dc.zero_()
    q, k, v, c, out, dout = (
        rows_ready(q),
        rows_ready(k),
        rows_ready(v),
        c.contiguous(),
        rows_ready(out),
        rows_ready(dout),
    )
    batch, heads, rows, dim = q.shape
    delta, dc_row = torch.empty_like(lse), torch.empty_like(lse)
    sizes = (heads, heads // k.shape[1], rows, k.shape[2], scale)
    options = dict(HEAD_DIM=dim, BLOCK_D=block_dim(dim), HAS_START=starts is not None)
    with on_device(q):
        delta_of(out, dout, None, delta)
        tile = configs.tile("forget_dkdv", block_dim(dim))
        forget_dkdv_kernel[(ceil_div(k.shape[2], tile.block_n), k.shape[1], batch)](
            q, k, v, c, starts, dout, lse, delta, dk, dv, dc, *(x.stride()[:3] for x in (q, k, v, dout, dk, dv)),
            *sizes, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_stages=tile.num_stages, num_warps=tile.num_warps,
            **options,
        )  # fmt: skip
        tile = configs.tile("forget_dq", block_dim(dim))
        forget_dq_kernel[(ceil_div(rows, tile.block_m), heads, batch)](
            q, k, v, c, starts, dout, lse, delta, dq, dc_row, *(x.stride()[:3] for x in (q, k, v, dout, dq)), *sizes,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_stages=tile.num_stages, num_warps=tile.num_warps, **options,
        )  # fmt: skip
    dc.neg_()
    dc[..., k.shape[2] - rows :] += dc_row
    return dq, dk, dv, dc


@torch.library.register_fake("magi_triton::forget_bwd")
def _forget_bwd_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, c: Tensor, starts: Tensor | None, out: Tensor, lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dc = torch.empty_like(c, memory_format=torch.contiguous_format)
    return empty_like_rows(q), empty_like_rows(k), empty_like_rows(v), dc


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(*inputs[:5], out, lse)
    ctx.scale = inputs[5]


def _backward(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = torch.ops.magi_triton.forget_bwd(dout, *ctx.saved_tensors, ctx.scale)
    return (*grads, None, None, None)


torch.library.register_autograd("magi_triton::forget_fwd", _backward, setup_context=_setup_context)
torch.library.register_autograd("magi_triton::forget_bwd", refuse_double_backward)
