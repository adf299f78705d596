"""Operators over :mod:`.kernel`: ``magi_extensions::dsa_fwd`` and ``dsa_bwd``, and the autograd of the eager path."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["attend"]

torch.library.define(
    "magi_extensions::dsa_fwd", "(Tensor q, Tensor k, Tensor v, Tensor index, float scale) -> (Tensor, Tensor)"
)
torch.library.define(
    "magi_extensions::dsa_bwd",
    "(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor index, Tensor out, Tensor lse, float scale) "
    "-> (Tensor, Tensor, Tensor)",
)


def attend(q: Tensor, k: Tensor, v: Tensor, index: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``(out, lse)``, differentiable in q, k and v through both."""
    if torch.compiler.is_compiling():
        out, lse = torch.ops.magi_extensions.dsa_fwd(q, k, v, index, scale)
        return out, lse
    out, lse = _Attend.apply(q, k, v, index, scale)
    return out, lse


def _ready(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _forward(q: Tensor, k: Tensor, v: Tensor, index: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    from . import kernel

    index = index.to(torch.int32).contiguous()
    with torch.cuda.device(q.device) if q.is_cuda else torch.no_grad():
        return kernel.forward(_ready(q), _ready(k), _ready(v), index, scale)


def _backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, index: Tensor, out: Tensor, lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from . import kernel

    dout = torch.zeros_like(out) if dout is None else _ready(dout)
    delta = (out.float() * dout.float()).sum(2)
    if dlse is not None:
        delta = delta - dlse
    delta = torch.where(lse.isfinite(), delta, 0.0).contiguous()
    index = index.to(torch.int32).contiguous()
    with torch.cuda.device(q.device) if q.is_cuda else torch.no_grad():
        return kernel.backward(dout, _ready(q), _ready(k), _ready(v), index, lse, delta, scale)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, index: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = _forward(q, k, v, index, scale)
        ctx.save_for_backward(q, k, v, index, out, lse)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * 5
        return (*_backward(dout, dlse, *(*ctx.saved_tensors, ctx.scale)), None, None)


torch.library.impl("magi_extensions::dsa_fwd", "default", _forward)
torch.library.impl("magi_extensions::dsa_bwd", "default", _backward)


@torch.library.register_fake("magi_extensions::dsa_fwd")
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, index: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.register_fake("magi_extensions::dsa_bwd")
def _backward_fake(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, index, scale = inputs
    ctx.save_for_backward(q, k, v, index, *output)
    ctx.scale = scale
    ctx.set_materialize_grads(False)


def _through_op(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * 5
    return (*torch.ops.magi_extensions.dsa_bwd(dout, dlse, *ctx.saved_tensors, ctx.scale), None, None)


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError("dsa_attn_func has no double backward")


torch.library.register_autograd("magi_extensions::dsa_fwd", _through_op, setup_context=_setup)
torch.library.register_autograd("magi_extensions::dsa_bwd", _refuse)
