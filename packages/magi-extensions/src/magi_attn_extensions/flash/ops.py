"""The torch operators ``magi_extensions::flash_fwd`` and ``flash_bwd``, which compiled graphs call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import run
from .call import Extras, Options

__all__ = ["flash"]

_EXTRAS = (
    "Tensor? cu_q, Tensor? cu_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? alibi_slopes, Tensor? block_table, "
    "Tensor? qv, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale"
)
_OPTIONS = (
    "str provider, SymInt max_q, SymInt max_k, float softmax_scale, bool causal, int window_left, int window_right, "
    "float softcap, float dropout_p, bool deterministic, bool return_probs, str sink_layout, int attention_chunk, "
    "int num_splits, int pack_gqa, int sm_margin"
)
_NUM_EXTRAS = 10

torch.library.define(
    "magi_extensions::flash_fwd",
    f"(Tensor q, Tensor k, Tensor v, Tensor? sink, {_EXTRAS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "magi_extensions::flash_bwd",
    "(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor out, Tensor lse, "
    f"Tensor rng_state, {_EXTRAS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)


def flash(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, extras: Extras, options: Options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Call ``magi_extensions::flash_fwd``: ``(out, lse, probs)``."""
    out, lse, _, probs = torch.ops.magi_extensions.flash_fwd(q, k, v, sink, *extras.tensors(), *options.values())
    return out, lse, probs if options.return_probs and options.dropout_p > 0 else None


def _split(rest: tuple[Any, ...]) -> tuple[Extras, Options]:
    return Extras(*rest[:_NUM_EXTRAS]), Options(*rest[_NUM_EXTRAS:])


@torch.library.impl("magi_extensions::flash_fwd", "default")
def _fwd(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    result = run.forward(q, k, v, sink, *_split(rest))
    probs = result.out.new_empty(0) if result.probs is None else result.probs
    # Rng states differ in shape and dtype between providers; the graph sees them as int64.
    state = result.rng_state.reshape(-1).view(torch.int64)
    return result.out, result.lse, state, probs


@torch.library.register_fake("magi_extensions::flash_fwd")
def _fwd_fake(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    extras, options = _split(rest)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    is_packed = extras.cu_q is not None
    batch = q.shape[0] if extras.cu_q is None else extras.cu_q.shape[0] - 1
    shape = (q.shape[1], q.shape[0]) if is_packed else (q.shape[0], q.shape[2], q.shape[1])
    probs = q.new_empty(0)
    if options.return_probs and options.dropout_p > 0:
        if options.provider != "reference":
            raise NotImplementedError("return_attn_probs with dropout cannot be compiled on this provider")
        probs = q.new_empty((batch, q.shape[-2], options.max_q, options.max_k))
    return out, q.new_empty(shape, dtype=dtype), q.new_empty(2, dtype=torch.int64), probs


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    q, k, v, sink, *rest = inputs
    out, lse, state, probs = output
    ctx.save_for_backward(q, k, v, sink, out, lse, state, *rest[:_NUM_EXTRAS])
    ctx.mark_non_differentiable(state, probs)
    ctx.set_materialize_grads(False)
    ctx.options = tuple(rest[_NUM_EXTRAS:])


def _fwd_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (_NUM_EXTRAS + len(ctx.options))
    if dout is None and dlse is None:
        return (None, None, None, None, *nothing)
    q, k, v, sink, *rest = ctx.saved_tensors
    dq, dk, dv, dsink = torch.ops.magi_extensions.flash_bwd(dout, dlse, q, k, v, sink, *rest, *ctx.options)
    return (dq, dk, dv, None if sink is None else dsink, *nothing)


torch.library.register_autograd("magi_extensions::flash_fwd", _fwd_backward, setup_context=_setup)


@torch.library.impl("magi_extensions::flash_bwd", "default")
def _bwd(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, out: Tensor,
    lse: Tensor, state: Tensor, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    extras, options = _split(rest)
    if options.provider in ("torch", "flash_attn"):
        state = state.view(torch.uint64) if options.provider == "torch" else state
    dq, dk, dv, dsink = run.backward(dout, dlse, q, k, v, sink, out, lse, state, extras, options)
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), lse.new_empty(0) if dsink is None else dsink


@torch.library.register_fake("magi_extensions::flash_bwd")
def _bwd_fake(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, out: Tensor,
    lse: Tensor, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dsink = lse.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsink


def _refuse_double_backward(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(run.DOUBLE_BACKWARD)


torch.library.register_autograd("magi_extensions::flash_bwd", _refuse_double_backward)
