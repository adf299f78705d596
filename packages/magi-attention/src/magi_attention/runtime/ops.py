"""The distributed calls as torch operators, for ``torch.compile``.

An operator receives the plan as a handle, a 0-d int64 CPU tensor: a value to the compiler, so that a new mask of the
same local lengths runs the graph that is there. Lengths that depend on the plan come as integers beside it, and fake
kernels need nothing else. Eager calls do not come here: an ``autograd.Function`` costs a fifth of an operator.
"""

from __future__ import annotations

from typing import Any

import torch
from magi_core.backends.reference import compute_dtype
from torch import Tensor

from .attention import DOUBLE_BACKWARD, backward, forward
from .handles import handles
from .transport import roll_along

NAMESPACE = "magi_attention"

SCHEMAS = {
    "dispatch": "(Tensor x, Tensor handle, str role, float pad_value, SymInt shard_len) -> Tensor",
    "undispatch": "(Tensor x, Tensor handle, str role, bool is_partial_grad, SymInt total) -> Tensor",
    "reduce_scatter": "(Tensor x, Tensor handle, str role, SymInt shard_len) -> Tensor",
    "roll": "(Tensor x, Tensor handle, str role, SymInt shift, int dim, float pad_value) -> Tensor",
    "position_ids": "(Tensor handle, str role, SymInt shard_len, Device device) -> Tensor",
    "calc_attn_fwd": "(Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor handle, float softmax_scale, float softcap, "
    "bool return_max_logits) -> (Tensor out, Tensor lse, Tensor max_logits)",
    "calc_attn_bwd": "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? sink, "
    "Tensor handle, float softmax_scale, float softcap, bool needs_q, bool needs_kv, bool needs_sink) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
}


def _define(name: str) -> None:
    torch.library.define(f"{NAMESPACE}::{name}", SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag,))


def _impl(name: str) -> Any:
    return torch.library.impl(f"{NAMESPACE}::{name}", "CompositeExplicitAutograd")


def _fake(name: str) -> Any:
    return torch.library.register_fake(f"{NAMESPACE}::{name}")


for _name in SCHEMAS:
    _define(_name)


@_impl("dispatch")
def _dispatch(x: Tensor, handle: Tensor, role: str, pad_value: float, shard_len: int) -> Tensor:
    return handles.get(handle).transport_of_whole(x, role).scatter(x, pad_value)


@_fake("dispatch")
def _dispatch_fake(x: Tensor, handle: Tensor, role: str, pad_value: float, shard_len: int) -> Tensor:
    return x.new_empty((shard_len, *x.shape[1:]))


@_impl("undispatch")
def _undispatch(x: Tensor, handle: Tensor, role: str, is_partial_grad: bool, total: int) -> Tensor:
    return handles.get(handle).transport_of_shard(x, 0, role).gather(x)


@_fake("undispatch")
def _undispatch_fake(x: Tensor, handle: Tensor, role: str, is_partial_grad: bool, total: int) -> Tensor:
    return x.new_empty((total, *x.shape[1:]))


@_impl("reduce_scatter")
def _reduce_scatter(x: Tensor, handle: Tensor, role: str, shard_len: int) -> Tensor:
    return handles.get(handle).transport_of_whole(x, role).reduce_scatter(x)


@_fake("reduce_scatter")
def _reduce_scatter_fake(x: Tensor, handle: Tensor, role: str, shard_len: int) -> Tensor:
    return x.new_empty((shard_len, *x.shape[1:]))


@_impl("roll")
def _roll(x: Tensor, handle: Tensor, role: str, shift: int, dim: int, pad_value: float) -> Tensor:
    transport = handles.get(handle).transport_of_shard(x, dim, role)
    return roll_along(transport, x, shift, dim, pad_value).contiguous()


@_fake("roll")
def _roll_fake(x: Tensor, handle: Tensor, role: str, shift: int, dim: int, pad_value: float) -> Tensor:
    return x.new_empty(x.shape)


@_impl("position_ids")
def _position_ids(handle: Tensor, role: str, shard_len: int, device: torch.device) -> Tensor:
    return handles.get(handle).transport(role).positions(device).clone()


@_fake("position_ids")
def _position_ids_fake(handle: Tensor, role: str, shard_len: int, device: torch.device) -> Tensor:
    return torch.empty((shard_len,), dtype=torch.int64, device=device)


@_impl("calc_attn_fwd")
def _calc_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    handle: Tensor,
    softmax_scale: float,
    softcap: float,
    return_max_logits: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    runtime = handles.get(handle).runtime
    return forward(runtime, q, k, v, sink, softmax_scale, softcap, return_max_logits)


@_fake("calc_attn_fwd")
def _calc_attn_fwd_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    handle: Tensor,
    softmax_scale: float,
    softcap: float,
    return_max_logits: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = compute_dtype(q.dtype)
    return (
        q.new_empty((q.shape[0], q.shape[1], v.shape[2])),
        q.new_empty((q.shape[0], q.shape[1]), dtype=wide),
        q.new_empty((q.shape[1] if return_max_logits else 0,), dtype=wide),
    )


def _given(gradient: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty((0,)) if gradient is None else gradient.contiguous()


@_impl("calc_attn_bwd")
def _calc_attn_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    handle: Tensor,
    softmax_scale: float,
    softcap: float,
    needs_q: bool,
    needs_kv: bool,
    needs_sink: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    runtime = handles.get(handle).runtime
    needs = (needs_q, needs_kv, needs_sink)
    dq, dk, dv, dsink = backward(runtime, dout, dlse, q, k, v, out, lse, sink, softmax_scale, softcap, needs)
    return _given(dq, q), _given(dk, k), _given(dv, v), _given(dsink, lse)


@_fake("calc_attn_bwd")
def _calc_attn_bwd_fake(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    handle: Tensor,
    softmax_scale: float,
    softcap: float,
    needs_q: bool,
    needs_kv: bool,
    needs_sink: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        q.new_empty(q.shape if needs_q else (0,)),
        k.new_empty(k.shape if needs_kv else (0,)),
        v.new_empty(v.shape if needs_kv else (0,)),
        lse.new_empty((0,)) if sink is None or not needs_sink else sink.new_empty(sink.shape),
    )


def _dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, handle, role, _, _ = inputs
    ctx.save_for_backward(handle)
    ctx.role, ctx.total = role, x.shape[0]


def _dispatch_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (handle,) = ctx.saved_tensors
    return torch.ops.magi_attention.undispatch(grad, handle, ctx.role, False, ctx.total), None, None, None, None


def _undispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, handle, role, is_partial_grad, _ = inputs
    ctx.save_for_backward(handle)
    ctx.role, ctx.is_partial_grad, ctx.shard_len = role, is_partial_grad, x.shape[0]


def _undispatch_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (handle,) = ctx.saved_tensors
    if ctx.is_partial_grad:
        local = torch.ops.magi_attention.reduce_scatter(grad, handle, ctx.role, ctx.shard_len)
    else:
        local = torch.ops.magi_attention.dispatch(grad, handle, ctx.role, 0.0, ctx.shard_len)
    return local, None, None, None, None


def _roll_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, handle, role, shift, dim, _ = inputs
    ctx.save_for_backward(handle)
    ctx.role, ctx.shift, ctx.dim = role, shift, dim


def _roll_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (handle,) = ctx.saved_tensors
    return torch.ops.magi_attention.roll(grad, handle, ctx.role, -ctx.shift, ctx.dim, 0.0), *(None,) * 5


def _calc_attn_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sink, handle, softmax_scale, softcap, _ = inputs
    out, lse, max_logits = output
    ctx.mark_non_differentiable(max_logits)
    ctx.save_for_backward(q, k, v, out, lse, sink, handle)
    ctx.softmax_scale, ctx.softcap = softmax_scale, softcap


def _calc_attn_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Any, ...]:
    q, k, v, out, lse, sink, handle = ctx.saved_tensors
    needs_q, needs_k, needs_v, needs_sink = ctx.needs_input_grad[:4]
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, dsink = torch.ops.magi_attention.calc_attn_bwd(
        dout,
        dlse,
        q,
        k,
        v,
        out,
        lse,
        sink,
        handle,
        ctx.softmax_scale,
        ctx.softcap,
        needs_q,
        needs_k or needs_v,
        needs_sink,
    )
    given = (dq if needs_q else None, dk if needs_k else None, dv if needs_v else None, dsink if needs_sink else None)
    return *given, None, None, None, None


def _refuse_double_backward(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(DOUBLE_BACKWARD)


torch.library.register_autograd(f"{NAMESPACE}::calc_attn_bwd", _refuse_double_backward)
torch.library.register_autograd(f"{NAMESPACE}::dispatch", _dispatch_backward, setup_context=_dispatch_setup)
torch.library.register_autograd(f"{NAMESPACE}::undispatch", _undispatch_backward, setup_context=_undispatch_setup)
torch.library.register_autograd(f"{NAMESPACE}::roll", _roll_backward, setup_context=_roll_setup)
torch.library.register_autograd(f"{NAMESPACE}::calc_attn_fwd", _calc_attn_backward, setup_context=_calc_attn_setup)

__all__ = ["NAMESPACE", "SCHEMAS"]
