"""torch operators of softmax attention: ``magi_triton::flash_fwd``, ``flash_bwd``, ``flash_total``, ``philox_draw``.

Dense tensors are ``(B, H, rows, D)``. With ``cu_seqlens`` the batch is 1 and sequences lie one after another on the row
dim. ``left`` and ``right`` are the window, -1 for none (a causal mask is ``right = 0``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..common.launch import block_dim, ceil_div, empty_like_rows, on_device, require_kernels, rows_ready
from ..runtime import configs

_DEVICES = ("cpu", "cuda")
_MASK = "float scale, int left, int right, float softcap"
_LENGTHS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_RANDOM = "float dropout_p, Tensor? philox"

torch.library.define("magi_triton::philox_draw", "(Tensor x, SymInt count) -> Tensor",
                     tags=(torch.Tag.nondeterministic_seeded,))  # fmt: skip
torch.library.define(
    "magi_triton::flash_fwd",
    f"(Tensor q, Tensor k, Tensor v, Tensor? sink, {_LENGTHS}, {_MASK}, {_RANDOM}) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "magi_triton::flash_bwd",
    f"(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_LENGTHS}, {_MASK}, {_RANDOM})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define("magi_triton::flash_total", f"(Tensor q, Tensor k, Tensor lse, {_MASK}) -> Tensor")


@torch.library.impl("magi_triton::philox_draw", _DEVICES)
def _philox_draw(x: Tensor, count: int) -> Tensor:
    """(seed, offset) int64 on the CPU; the default generator of x's device moves on by ``count`` numbers."""
    if x.is_cuda:
        index = torch.cuda.current_device() if x.device.index is None else x.device.index
        generator = torch.cuda.default_generators[index]
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.set_offset(offset + ceil_div(count, 4) * 4)
        return torch.tensor([seed & (2**63 - 1), offset], dtype=torch.int64)
    return torch.stack([torch.randint(2**62, ()), 4 * torch.randint(2**40, ())])


@torch.library.register_fake("magi_triton::philox_draw")
def _philox_draw_fake(x: Tensor, count: int) -> Tensor:
    return torch.empty(2, dtype=torch.int64)


def _fwd_outputs(q: Tensor, dropout_p: float) -> tuple[Tensor, Tensor, Tensor]:
    """out like q, lse (B, H, rows) fp32, and out again in fp32 where dropout's backward wants it (else empty)."""
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    out32 = q.new_empty(q.shape if dropout_p > 0 else (0,), dtype=torch.float32)
    return empty_like_rows(q), lse, out32


def _philox_words(philox: Tensor | None) -> tuple[int, int]:
    return (0, 0) if philox is None else (int(philox[0]), int(philox[1]))


def _options(scale: float, left: int, right: int, softcap: float) -> dict[str, Any]:
    return dict(HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0, SOFTCAP=softcap > 0, SCALE_FIRST=scale <= 0)


@torch.library.impl("magi_triton::flash_fwd", _DEVICES)
def _flash_fwd(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int,
    max_k: int, scale: float, left: int, right: int, softcap: float, dropout_p: float, philox: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    require_kernels("flash_attention", q)
    from .kernel import attn_fwd_kernel

    out, lse, out32 = _fwd_outputs(q, dropout_p)
    q, k, v = rows_ready(q), rows_ready(k), rows_ready(v)
    batch, heads, rows, dim = q.shape
    if q.numel() == 0:
        return out, lse, out32
    num = batch if cu_q is None else cu_q.numel() - 1
    tile = configs.tile("fwd", block_dim(dim))
    seed, offset = _philox_words(philox)
    with on_device(q):
        attn_fwd_kernel[(ceil_div(max_q, tile.block_m), heads, num)](
            q, k, v, sink, out, out32, lse, cu_q, cu_k, q.stride()[:3], k.stride()[:3], v.stride()[:3],
            out.stride()[:3], out32.stride()[:3] if dropout_p > 0 else (0, 0, 0), heads, heads // k.shape[1], rows,
            max_q, max_k, scale, softcap, left, right, dropout_p, seed, offset,
            HEAD_DIM=dim, BLOCK_D=block_dim(dim), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, VARLEN=cu_q is not None,
            DROPOUT=dropout_p > 0, HAS_SINK=sink is not None, HAS_OUT32=dropout_p > 0,
            num_stages=tile.num_stages, num_warps=tile.num_warps, **_options(scale, left, right, softcap),
        )  # fmt: skip
    return out, lse, out32


@torch.library.register_fake("magi_triton::flash_fwd")
def _flash_fwd_fake(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int,
    max_k: int, scale: float, left: int, right: int, softcap: float, dropout_p: float, philox: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _fwd_outputs(q, dropout_p)


def _bwd_outputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    delta = q.new_empty(q.shape[:3], dtype=torch.float32)
    return empty_like_rows(q), empty_like_rows(k), empty_like_rows(v), delta


def delta_of(out: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor) -> None:
    """Launch the kernel of delta = sum_d out dout - dlse; tensors ``(B, H, rows, D)`` with contiguous last dims."""
    from .kernel import attn_delta_kernel

    batch, heads, rows, dim = out.shape
    attn_delta_kernel[(ceil_div(rows, 64), heads, batch)](
        out, dout, dlse, delta, out.stride()[:3], dout.stride()[:3], (0, 0, 0) if dlse is None else dlse.stride(),
        heads, rows, HEAD_DIM=dim, BLOCK_D=block_dim(dim), BLOCK_M=64, HAS_DLSE=dlse is not None,
    )  # fmt: skip


@torch.library.impl("magi_triton::flash_bwd", _DEVICES)
def _flash_bwd(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None,
    cu_k: Tensor | None, max_q: int, max_k: int, scale: float, left: int, right: int, softcap: float,
    dropout_p: float, philox: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    require_kernels("flash_attention", q)
    from .kernel import attn_bwd_dkdv_kernel, attn_bwd_dq_kernel

    dq, dk, dv, delta = _bwd_outputs(q, k, v)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_(), delta.zero_()
    q, k, v, out, dout = (rows_ready(x) for x in (q, k, v, out, dout))
    batch, heads, rows, dim = q.shape
    heads_kv = k.shape[1]
    num = batch if cu_q is None else cu_q.numel() - 1
    seed, offset = _philox_words(philox)
    sizes = (heads, heads // heads_kv, rows, max_q, max_k, scale, softcap, left, right, dropout_p, seed, offset)
    options = dict(HEAD_DIM=dim, BLOCK_D=block_dim(dim), VARLEN=cu_q is not None, DROPOUT=dropout_p > 0,
                   **_options(scale, left, right, softcap))  # fmt: skip
    with on_device(q):
        delta_of(out, dout, dlse, delta)
        tile = configs.tile("dkdv", block_dim(dim))
        attn_bwd_dkdv_kernel[(ceil_div(max_k, tile.block_n), heads_kv, num)](
            q, k, v, dout, lse, delta, dk, dv, cu_q, cu_k, q.stride()[:3], k.stride()[:3], v.stride()[:3],
            dout.stride()[:3], dk.stride()[:3], dv.stride()[:3], *sizes, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            num_stages=tile.num_stages, num_warps=tile.num_warps, **options,
        )  # fmt: skip
        tile = configs.tile("dq", block_dim(dim))
        attn_bwd_dq_kernel[(ceil_div(max_q, tile.block_m), heads, num)](
            q, k, v, dout, lse, delta, dq, cu_q, cu_k, q.stride()[:3], k.stride()[:3], v.stride()[:3],
            dout.stride()[:3], dq.stride()[:3], *sizes, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            num_stages=tile.num_stages, num_warps=tile.num_warps, **options,
        )  # fmt: skip
    return dq, dk, dv, delta


@torch.library.register_fake("magi_triton::flash_bwd")
def _flash_bwd_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None,
    cu_k: Tensor | None, max_q: int, max_k: int, scale: float, left: int, right: int, softcap: float,
    dropout_p: float, philox: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _bwd_outputs(q, k, v)


def sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """dsink[h] = -sum of exp(sink - lse) * delta over batch and rows; 0 where sink is infinite."""
    gap = sink.view(1, -1, 1) - lse
    share = torch.where(sink.view(1, -1, 1).isfinite(), gap, float("-inf")).exp()
    return -(share * delta).sum((0, 2))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, sink, cu_q, cu_k, max_q, max_k, scale, left, right, softcap, dropout_p, philox = inputs
    out, lse, out32 = output
    ctx.mark_non_differentiable(out32)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sink, cu_q, cu_k, philox, out32 if dropout_p > 0 else out, lse)
    ctx.sizes = (max_q, max_k, scale, left, right, softcap, dropout_p)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sink, cu_q, cu_k, philox, out, lse = ctx.saved_tensors
    max_q, max_k, scale, left, right, softcap, dropout_p = ctx.sizes
    if dout is None:
        dout = torch.zeros_like(q)
    dq, dk, dv, delta = torch.ops.magi_triton.flash_bwd(
        dout, dlse, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, scale, left, right, softcap, dropout_p, philox
    )
    dsink = None if sink is None else sink_gradient(sink, lse, delta)
    return (dq, dk, dv, dsink) + (None,) * 10


def refuse_double_backward(ctx: Any, *grads: Any) -> Any:
    """Gradients are of first order."""
    raise NotImplementedError("magi_triton has gradients of first order only; a second backward was asked for")


torch.library.register_autograd("magi_triton::flash_fwd", _backward, setup_context=_setup_context)
torch.library.register_autograd("magi_triton::flash_bwd", refuse_double_backward)


@torch.library.impl("magi_triton::flash_total", _DEVICES)
def _flash_total(q: Tensor, k: Tensor, lse: Tensor, scale: float, left: int, right: int, softcap: float) -> Tensor:
    require_kernels("flash_attention", q)
    from .kernel import attn_total_kernel

    total: Tensor = _flash_total_fake(q, k, lse, scale, left, right, softcap)
    if q.numel() == 0:
        return total.zero_()
    q, k = rows_ready(q), rows_ready(k)
    batch, heads, rows, dim = q.shape
    num_keys = k.shape[2]
    tile = configs.tile("dkdv", block_dim(dim))
    with on_device(q):
        attn_total_kernel[(ceil_div(num_keys, tile.block_n), heads, batch)](
            q, k, lse, total, q.stride()[:3], k.stride()[:3], heads, heads // k.shape[1], rows, num_keys, scale,
            softcap, left, right, HEAD_DIM=dim, BLOCK_D=block_dim(dim), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            num_stages=tile.num_stages, num_warps=tile.num_warps, **_options(scale, left, right, softcap),
        )  # fmt: skip
    return total


@torch.library.register_fake("magi_triton::flash_total")
def _flash_total_fake(q: Tensor, k: Tensor, lse: Tensor, scale: float, left: int, right: int, softcap: float) -> Tensor:
    return torch.empty((q.shape[0], q.shape[1], k.shape[2]), dtype=torch.float32, device=q.device)
