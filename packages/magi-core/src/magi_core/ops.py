"""The torch operators of :mod:`magi_core.schemas`: definition, implementation, fake kernels and autograd.

Importing this module registers them under ``torch.ops.magi_core``. Host work (planning ranges, reading a plan) happens
inside the operators, so a compiled graph never traces it and lengths may be dynamic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import stages
from .flex_attn import DOUBLE_BACKWARD, Options, empty_outputs, host_plan, run_backward, run_forward
from .index_attn import IndexMask
from .plan_cache import plan_from_buffer
from .schemas import NAMESPACE, SCHEMAS

__all__ = ["flex_attn", "index_attn"]

for _name, _schema in SCHEMAS.items():
    torch.library.define(f"{NAMESPACE}::{_name}", _schema)


def flex_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ranges: Tensor | None,
    k_ranges: Tensor | None,
    mask_types: Tensor | None,
    plan: Tensor | None,
    sink: Tensor | None,
    options: Options,
    allow_overlap: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Call ``magi_core::flex_attn_fwd``: ``(out, lse, max_logits)``."""
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.magi_core.flex_attn_fwd(
        *(q, k, v, q_ranges, k_ranges, mask_types, plan, sink, options.sink_layout, options.softmax_scale),
        *(options.softcap, allow_overlap, options.return_max_logits, options.deterministic, options.sm_margin),
        options.backend,
    )
    return result


@torch.library.impl(f"{NAMESPACE}::flex_attn_fwd", "default")
def _fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ranges: Tensor | None,
    k_ranges: Tensor | None,
    mask_types: Tensor | None,
    plan: Tensor | None,
    sink: Tensor | None,
    sink_layout: str,
    softmax_scale: float,
    softcap: float,
    allow_overlap: bool,
    return_max_logits: bool,
    deterministic: bool,
    sm_margin: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    options = Options(sink_layout, softmax_scale, softcap, return_max_logits, deterministic, sm_margin, backend)
    chosen = host_plan(q, k, q_ranges, k_ranges, mask_types, plan, allow_overlap, backend)
    return run_forward(q, k, v, sink, chosen, options)


@torch.library.register_fake(f"{NAMESPACE}::flex_attn_fwd")
def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_outputs(q, v, return_max_logits=rest[9])


def _fwd_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, q_ranges, k_ranges, mask_types, plan, sink = inputs[:8]
    out, lse, max_logits = output
    ctx.save_for_backward(q, k, v, q_ranges, k_ranges, mask_types, plan, sink, out, lse)
    ctx.mark_non_differentiable(max_logits)
    ctx.set_materialize_grads(False)
    ctx.options = inputs[8:]


def _fwd_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * 16
    q, k, v, q_ranges, k_ranges, mask_types, plan, sink, out, lse = ctx.saved_tensors
    layout, scale, softcap, allow_overlap, _, deterministic, sm_margin, backend = ctx.options
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, dsink = torch.ops.magi_core.flex_attn_bwd(
        *(dout, dlse, q, k, v, out, lse, q_ranges, k_ranges, mask_types, plan, sink, layout, scale, softcap),
        *(allow_overlap, deterministic, sm_margin, backend),
    )
    return (dq, dk, dv, None, None, None, None, None if sink is None else dsink, *(None,) * 8)


torch.library.register_autograd(f"{NAMESPACE}::flex_attn_fwd", _fwd_backward, setup_context=_fwd_setup)


@torch.library.impl(f"{NAMESPACE}::flex_attn_bwd", "default")
def _bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_ranges: Tensor | None,
    k_ranges: Tensor | None,
    mask_types: Tensor | None,
    plan: Tensor | None,
    sink: Tensor | None,
    sink_layout: str,
    softmax_scale: float,
    softcap: float,
    allow_overlap: bool,
    deterministic: bool,
    sm_margin: int,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = Options(sink_layout, softmax_scale, softcap, False, deterministic, sm_margin, backend)
    chosen = host_plan(q, k, q_ranges, k_ranges, mask_types, plan, allow_overlap, backend)
    dq, dk, dv, dsink = run_backward(dout, dlse, q, k, v, sink, out, lse, chosen, options)
    assert dq is not None and dk is not None and dv is not None
    return dq, dk, dv, lse.new_empty(0) if dsink is None else dsink


def _empty_gradients(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, sink: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsink = lse.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


@torch.library.register_fake(f"{NAMESPACE}::flex_attn_bwd")
def _bwd_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_gradients(q, k, v, lse, sink=rest[4])


def _refuse_double_backward(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(DOUBLE_BACKWARD)


torch.library.register_autograd(f"{NAMESPACE}::flex_attn_bwd", _refuse_double_backward)


def index_attn(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, sink: Tensor | None, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Call ``magi_core::index_attn_fwd``: ``(out, lse, max_logits)``."""
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.magi_core.index_attn_fwd(
        *(q, k, v, indices, sink, options.sink_layout, options.softmax_scale, options.softcap),
        options.return_max_logits,
    )
    return result


@torch.library.impl(f"{NAMESPACE}::index_attn_fwd", "default")
def _index_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    sink_layout: str,
    softmax_scale: float,
    softcap: float,
    return_max_logits: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    options = Options(sink_layout, softmax_scale, softcap, return_max_logits, True, 0, "reference")
    return run_forward(q, k, v, sink, IndexMask(indices), options)


@torch.library.register_fake(f"{NAMESPACE}::index_attn_fwd")
def _index_fwd_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_outputs(q, v, return_max_logits=rest[5])


def _index_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, indices, sink, *ctx.score = inputs[:8]
    out, lse, max_logits = output
    ctx.save_for_backward(q, k, v, indices, sink, out, lse)
    ctx.mark_non_differentiable(max_logits)
    ctx.set_materialize_grads(False)


def _index_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * 9
    q, k, v, indices, sink, out, lse = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    dq, dk, dv, dsink = torch.ops.magi_core.index_attn_bwd(*(dout, dlse, q, k, v, out, lse, indices, sink, *ctx.score))
    return dq, dk, dv, None, None if sink is None else dsink, *(None,) * 4


torch.library.register_autograd(f"{NAMESPACE}::index_attn_fwd", _index_backward, setup_context=_index_setup)


@torch.library.impl(f"{NAMESPACE}::index_attn_bwd", "default")
def _index_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    sink_layout: str,
    softmax_scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = Options(sink_layout, softmax_scale, softcap, False, True, 0, "reference")
    dq, dk, dv, dsink = run_backward(dout, dlse, q, k, v, sink, out, lse, IndexMask(indices), options)
    assert dq is not None and dk is not None and dv is not None
    return dq, dk, dv, lse.new_empty(0) if dsink is None else dsink


@torch.library.register_fake(f"{NAMESPACE}::index_attn_bwd")
def _index_bwd_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_gradients(q, k, v, lse, sink=rest[1])


torch.library.register_autograd(f"{NAMESPACE}::index_attn_bwd", _refuse_double_backward)


@torch.library.impl(f"{NAMESPACE}::flex_attn_fwd_stage", "default")
def _fwd_stage(
    out: Tensor,
    out_acc: Tensor,
    lse: Tensor,
    max_logits: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Tensor,
    sink: Tensor | None,
    sink_layout: str,
    softmax_scale: float,
    softcap: float,
    sm_margin: int,
    backend: str,
) -> None:
    stages.attn_fwd_stage(
        *(out, out_acc, lse, max_logits, q, k, v, plan_from_buffer(plan)),
        sink=sink,
        sink_layout=sink_layout,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sm_margin=sm_margin,
        backend=backend,
    )


@torch.library.impl(f"{NAMESPACE}::flex_attn_bwd_stage", "default")
def _bwd_stage(
    dq_acc: Tensor,
    dk: Tensor,
    dv: Tensor,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    plan: Tensor,
    softmax_scale: float,
    softcap: float,
    deterministic: bool,
    sm_margin: int,
    backend: str,
) -> None:
    stages.attn_bwd_stage(
        *(dq_acc, dk, dv, dout, q, k, v, lse, delta, plan_from_buffer(plan)),
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        backend=backend,
    )


def _nothing(*args: Any) -> None:
    """A stage mutates its arguments and gives nothing."""


for _name in ("flex_attn_fwd_stage", "flex_attn_bwd_stage"):
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _nothing)
