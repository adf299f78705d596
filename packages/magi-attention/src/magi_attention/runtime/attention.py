"""Distributed attention over stages: compute what is here while the next keys travel.

Forward: stage 0 is the local keys; stage ``s`` computes while the keys of stage ``s + 1`` are in flight. A tile's
state (accumulated out and lse) passes from stage to stage, and the last stage that touches a tile writes it; no pass
merges anything afterwards. Backward: the same walk with keys fetched again (nothing remote is kept); a remote stage's
dK and dV go back to their owners while the next stage computes, and are added there in the order of stages and ranks.
Queries, out and their gradients never travel.

Source: the stages and their tile flags are ours (plan_format.h); lse-weighted accumulation as in FlashAttention-2,
arXiv:2307.08691, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from magi_comm.groups import Communicator
from magi_comm.range_exchange import RangeExchange
from magi_core.backends.reference import compute_dtype
from magi_core.plan import FlexPlan
from magi_core.stages import (
    attn_bwd_prepare,
    attn_bwd_stage,
    attn_fwd_stage,
    dq_from_workspace,
    new_dq_workspace,
    sink_backward_from_delta,
)
from torch import Tensor

from ..utils.nvtx import add_nvtx_event


@dataclass(frozen=True)
class RemoteStage:
    """Keys fetched together, and the work on them.

    Attributes:
        plan: local queries against the stage's keys, which are its received ranges back to back.
        exchange: fetches keys and values, returns their gradients.
        num_keys: tokens received.
    """

    plan: FlexPlan
    exchange: RangeExchange
    num_keys: int


@dataclass(frozen=True)
class DistAttnRuntime:
    """One rank's part of a planned attention: stages, transfers and the options that steer them.

    Holds no state of any call, so a plan may be used by many calls at once and again in their backward passes.

    Attributes:
        comm: the ranks that share the work.
        local: plan of stage 0, local queries against local keys.
        remote: further stages, as many on every rank.
        is_blocking: wait for all keys before computing anything (overlap degree 0).
        num_q, num_k: true tokens of the rank; shards may end in padding, which no stage sees.
        owes_keys: another rank reads a key of this one, so dK and dV receive contributions.
        backend, deterministic, fwd_sm_margin, bwd_sm_margin: passed to every stage.
        dsink_reduce: reduction of the sink's gradient over the group.
    """

    comm: Communicator
    local: FlexPlan
    remote: tuple[RemoteStage, ...]
    is_blocking: bool
    num_q: int
    num_k: int
    owes_keys: bool
    backend: str | None
    deterministic: bool
    fwd_sm_margin: int
    bwd_sm_margin: int
    dsink_reduce: Literal["none", "sum", "avg"]


def sink_layout_of(sink: Tensor | None) -> str:
    """``"ssh"`` for a sink with a row per query, else ``"sh"``."""
    return "ssh" if isinstance(sink, Tensor) and sink.dim() == 3 else "sh"


class _Fetches:
    """Keys and values of the remote stages, one stage ahead of the computation."""

    def __init__(self, runtime: DistAttnRuntime, k: Tensor, v: Tensor) -> None:
        self._runtime, self._tensors = runtime, (k, v)
        self._next: Any = None
        self._ready: list[tuple[Tensor, Tensor]] = []
        if runtime.is_blocking:
            self._ready = [self._issue(s).wait() for s in range(len(runtime.remote))]
        elif runtime.remote:
            self._next = self._issue(0)

    def _issue(self, stage: int) -> Any:
        return self._runtime.remote[stage].exchange.cast(self._tensors, async_op=True)

    def take(self, stage: int) -> tuple[Tensor, Tensor]:
        """The keys and values of a stage; the next stage's set off before this returns."""
        if self._runtime.is_blocking:
            return self._ready[stage]
        keys, values = self._next.wait()
        self._next = self._issue(stage + 1) if stage + 1 < len(self._runtime.remote) else None
        return keys, values


def _rows(x: Tensor, num_rows: int) -> Tensor:
    return x if x.shape[0] == num_rows else x[:num_rows]


def _tokens(x: Tensor, num_rows: int) -> Tensor:
    """The first rows of q, k or v, with the contiguous last dim that every backend takes."""
    x = _rows(x, num_rows)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def forward(
    runtime: DistAttnRuntime,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    softmax_scale: float,
    softcap: float,
    return_max_logits: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, lse, max_logits)`` of this rank's shard; padding rows are 0 and -inf. ``max_logits`` is over all ranks,
    and of length 0 when not asked for."""
    shard_q, num_heads_q = q.shape[0], q.shape[1]
    wide = compute_dtype(q.dtype)
    out = q.new_empty((shard_q, num_heads_q, v.shape[2]))
    lse = q.new_empty((shard_q, num_heads_q), dtype=wide)
    out[runtime.num_q :] = 0
    lse[runtime.num_q :] = float("-inf")
    max_logits = q.new_full((num_heads_q if return_max_logits else 0,), float("-inf"), dtype=wide)
    layout = sink_layout_of(sink)
    if sink is not None and layout == "ssh":
        sink = _rows(sink, runtime.num_q)
    q, k, v = _tokens(q, runtime.num_q), _tokens(k, runtime.num_k), _tokens(v, runtime.num_k)
    true_out, true_lse = _rows(out, runtime.num_q), _rows(lse, runtime.num_q)
    out_acc = out.new_empty(true_out.shape, dtype=wide) if runtime.remote else None  # state between stages

    fetches = _Fetches(runtime, k, v)
    for stage in range(len(runtime.remote) + 1):
        plan = runtime.local if stage == 0 else runtime.remote[stage - 1].plan
        keys, values = (k, v) if stage == 0 else fetches.take(stage - 1)
        with add_nvtx_event(partial("attn_fwd stage {}".format, stage)):
            attn_fwd_stage(
                true_out,
                out_acc,
                true_lse,
                max_logits if return_max_logits else None,
                q,
                keys,
                values,
                plan,
                sink=sink,
                sink_layout=layout,
                softmax_scale=softmax_scale,
                softcap=softcap,
                sm_margin=runtime.fwd_sm_margin,
                backend=runtime.backend,
            )
    if return_max_logits and runtime.comm.size > 1:
        runtime.comm.all_reduce(max_logits, op="max").wait()
    return out, lse, max_logits


def backward(
    runtime: DistAttnRuntime,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    softmax_scale: float,
    softcap: float,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """``(dq, dk, dv, dsink)`` of this rank's shard, zero at padding.

    ``needs`` says whether the gradient of q, of k or v, and of the sink is asked for; it must be equal on all ranks,
    since each rank's dk holds what the others found.
    """
    shard_q, shard_k = q.shape[0], k.shape[0]
    layout = sink_layout_of(sink)
    full_sink = sink
    q, dout, out = (_tokens(x, runtime.num_q) for x in (q, dout, out))
    k, v = _tokens(k, runtime.num_k), _tokens(v, runtime.num_k)
    lse = _rows(lse, runtime.num_q)
    dlse = None if dlse is None else _rows(dlse, runtime.num_q).contiguous()
    needs_q, needs_kv, needs_sink = needs

    fetches = _Fetches(runtime, k, v) if needs_q or needs_kv else None  # on its way while delta is made
    delta = attn_bwd_prepare(dout, out, lse, dlse, backend=runtime.backend)
    dsink, dsink_work = None, None
    if needs_sink and full_sink is not None:
        rows = _rows(full_sink, runtime.num_q) if layout == "ssh" else full_sink
        dsink = sink_backward_from_delta(delta, lse, rows, layout).contiguous()
        if layout == "ssh":
            dsink = _padded(dsink, full_sink.shape[0])
        elif runtime.dsink_reduce != "none" and runtime.comm.size > 1:
            dsink_work = runtime.comm.all_reduce(dsink, op=runtime.dsink_reduce, async_op=True)
    if fetches is None:
        if dsink_work is not None:
            dsink_work.wait()
        return None, None, None, dsink

    workspace = new_dq_workspace(q, backend=runtime.backend)
    wide = compute_dtype(k.dtype) if runtime.owes_keys and needs_kv else k.dtype
    dk, dv = k.new_empty(k.shape, dtype=wide), v.new_empty(v.shape, dtype=wide)
    returns: list[Any] = []
    for stage in range(len(runtime.remote) + 1):
        if stage == 0:
            plan, keys, values, stage_dk, stage_dv = runtime.local, k, v, dk, dv
        else:
            plan = runtime.remote[stage - 1].plan
            keys, values = fetches.take(stage - 1)
            stage_dk, stage_dv = keys.new_empty(keys.shape), values.new_empty(values.shape)
        with add_nvtx_event(partial("attn_bwd stage {}".format, stage)):
            attn_bwd_stage(
                workspace,
                stage_dk,
                stage_dv,
                dout,
                q,
                keys,
                values,
                lse,
                delta,
                plan,
                softmax_scale=softmax_scale,
                softcap=softcap,
                deterministic=runtime.deterministic,
                sm_margin=runtime.bwd_sm_margin,
                backend=runtime.backend,
            )
        if stage > 0 and needs_kv:
            # One return in flight: the one before is added while this one travels, so the order of sums is fixed.
            returns.append(runtime.remote[stage - 1].exchange.reduce((stage_dk, stage_dv), (dk, dv), async_op=True))
            if len(returns) > 1:
                returns.pop(0).wait()
    for work in returns:
        work.wait()
    if dsink_work is not None:
        dsink_work.wait()
    dq = _padded(dq_from_workspace(workspace, q, backend=runtime.backend), shard_q) if needs_q else None
    if not needs_kv:
        return dq, None, None, dsink
    return dq, _padded(dk.to(k.dtype), shard_k), _padded(dv.to(v.dtype), shard_k), dsink


def _padded(x: Tensor, num_rows: int) -> Tensor:
    if x.shape[0] == num_rows:
        return x
    return torch.cat([x, x.new_zeros((num_rows - x.shape[0], *x.shape[1:]))])


DOUBLE_BACKWARD = "calc_attn is differentiable once: a gradient of its gradient (double backward) is not supported"


class _DistAttentionBackward(torch.autograd.Function):
    """The backward, as a node of its own under ``create_graph=True``, so that differentiating it can be refused."""

    @staticmethod
    def forward(ctx: Any, dout: Tensor, dlse: Tensor | None, state: tuple[Any, ...], *tensors: Tensor) -> Any:
        """``(dq, dk, dv, dsink)``; see ``backward`` of this module."""
        runtime, softmax_scale, softcap, needs = state
        q, k, v, out, lse, sink = tensors
        return backward(runtime, dout, dlse, q, k, v, out, lse, sink, softmax_scale, softcap, needs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Refused."""
        raise NotImplementedError(DOUBLE_BACKWARD)


class DistAttention(torch.autograd.Function):
    """The eager path: ``forward`` and ``backward`` above, the plan held between them."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        runtime: DistAttnRuntime,
        softmax_scale: float,
        softcap: float,
        return_max_logits: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``(out, lse, max_logits)``; see ``forward`` of this module."""
        out, lse, max_logits = forward(runtime, q, k, v, sink, softmax_scale, softcap, return_max_logits)
        ctx.save_for_backward(q, k, v, out, lse, sink)
        ctx.runtime, ctx.softmax_scale, ctx.softcap = runtime, softmax_scale, softcap
        ctx.mark_non_differentiable(max_logits)
        ctx.set_materialize_grads(False)
        return out, lse, max_logits

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        """Gradients of the four tensors; see ``backward`` of this module."""
        q, k, v, out, lse, sink = ctx.saved_tensors
        needs_q, needs_k, needs_v, needs_sink = ctx.needs_input_grad[:4]
        if dout is None:
            dout = torch.zeros_like(out)
        state = (ctx.runtime, ctx.softmax_scale, ctx.softcap, (needs_q, needs_k or needs_v, needs_sink))
        dq, dk, dv, dsink = _DistAttentionBackward.apply(dout, dlse, state, q, k, v, out, lse, sink)
        return dq, dk if needs_k else None, dv if needs_v else None, dsink, None, None, None, None


__all__ = [
    "DOUBLE_BACKWARD",
    "DistAttention",
    "DistAttnRuntime",
    "RemoteStage",
    "backward",
    "forward",
    "sink_layout_of",
]
