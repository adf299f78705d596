"""Attention in stages, as distributed attention needs it: one stage per arrived part of the keys.

All stages of one attention share the tile boundaries of the queries; each plan carries per tile whether its stage is
the first or the last that touches it. A first tile reads no state and applies the sink, a last tile writes ``out`` in
the output dtype, the tiles between carry their state in ``out_acc`` and ``lse``. One-device attention is the case of
one stage. A stage's plan addresses the rank's query tokens and the rows of *that stage's* k and v.

Shapes: ``q (total_q, num_heads_q, head_dim)``, ``k (total_k, num_heads_kv, head_dim)``, ``v (total_k, num_heads_kv,
head_dim_v)``, ``out`` and ``out_acc (total_q, num_heads_q, head_dim_v)``, ``lse`` and ``delta (total_q, num_heads_q)``,
``max_logits (num_heads_q,)``. "Accumulator dtype" is float64 for float64 inputs and float32 otherwise.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .backends import reference
from .backends.reference import compute_dtype
from .backends.schedule import Schedule
from .backends.select import select_backend
from .checks import check_score_options
from .errors import checked_int
from .sink import LAYOUTS, sink_gradient

if TYPE_CHECKING:
    from .plan import FlexPlan
    from .plan_cache import DevicePlan

__all__ = [
    "attn_bwd_prepare",
    "attn_bwd_stage",
    "attn_fwd_stage",
    "dq_from_workspace",
    "new_dq_workspace",
    "sink_backward",
    "sink_backward_from_delta",
]

_SCHEDULES_KEPT = 64
# Schedules of the blockwise backend, by plan and number of heads. The plan is kept with its schedule, so that its id
# cannot be given to another one.
_schedules: OrderedDict[tuple[int, int], tuple[FlexPlan, Schedule]] = OrderedDict()


def _schedule(given: FlexPlan | DevicePlan, num_heads: int) -> Schedule:
    from .plan import FlexPlan

    plan = given if isinstance(given, FlexPlan) else given.host()
    key = (id(plan), num_heads)
    found = _schedules.pop(key, None)
    if found is None:
        schedule = Schedule.build(
            plan.bands, plan.total_q, plan.total_k, _segments(plan.fwd_tiles), num_heads, plan.may_overlap
        )
        found = plan, schedule
        while len(_schedules) >= _SCHEDULES_KEPT:
            _schedules.popitem(last=False)
    _schedules[key] = found
    return found[1]


def _segments(tiles: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Runs of touching tiles with equal stage flags: ``(n, 3)`` begin, end, flags."""
    if len(tiles) == 0:
        return np.empty((0, 3), np.int64)
    tiles = tiles[np.argsort(tiles[:, 0], kind="stable")]
    begin, end, flags = tiles[:, 0], tiles[:, 1], tiles[:, 4] & 3
    starts = np.concatenate([[True], (begin[1:] != end[:-1]) | (flags[1:] != flags[:-1])])
    first = np.flatnonzero(starts)
    last = np.concatenate([first[1:], [len(tiles)]]) - 1
    return np.stack([begin[first], end[last], flags[first]], 1).astype(np.int64)


def _check_plan(plan: FlexPlan | DevicePlan, q: Tensor, k: Tensor) -> None:
    for name, tensor, total in (("q", q, plan.total_q), ("k", k, plan.total_k)):
        if tensor.shape[0] != total:
            raise ValueError(f"plan must be for the tokens of {name} ({tensor.shape[0]}), got a plan for {total}")


def attn_fwd_stage(
    out: Tensor,
    out_acc: Tensor | None,
    lse: Tensor,
    max_logits: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: FlexPlan | DevicePlan,
    *,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sm_margin: int = 0,
    backend: str | None = None,
) -> None:
    """One stage forward, into the given tensors; only rows of tiles in ``plan`` are read or written.

    Args:
        out: the dtype of q; written at tiles flagged last.
        out_acc: accumulator dtype; read at tiles not flagged first, written at tiles not flagged last. May be None when
            the plan has no such tile.
        lse: accumulator dtype, natural log, sink included. Written at every tile; read at those not flagged first.
        max_logits: accumulator dtype, raised to the largest score of this stage; fill with -inf before the first.
        sink: given to every stage, applied at tiles flagged first; see :mod:`magi_core.sink`.
        sm_margin: SMs left free by a compiled kernel. A hint without effect on results.

    Raises:
        ValueError: a plan for other token counts, or a missing ``out_acc``.
    """
    scale, cap = check_score_options(softmax_scale, softcap, q.shape[2])
    if sink_layout not in LAYOUTS:
        raise ValueError(f"sink_layout must be one of {', '.join(LAYOUTS)}, got {sink_layout!r}")
    library = select_backend(backend, q.device, q.dtype)
    _check_plan(plan, q, k)
    if library is not None:
        kernel = library.function("attn_fwd")
        kernel(
            *(out, out_acc, lse, max_logits, q, k, v, plan.tensor(q.device)),
            *(sink, LAYOUTS.index(sink_layout), scale, cap, checked_int(sm_margin, "sm_margin", minimum=0)),
        )
        return
    reference.forward(
        *(out, out_acc, lse, max_logits, q, k, v, _schedule(plan, q.shape[1])),
        sink=sink,
        sink_layout=sink_layout,
        softmax_scale=scale,
        softcap=cap,
    )


def attn_bwd_prepare(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """``delta = sum_d(dout * out) - dlse``: what every stage of the backward needs of the output.

    Args:
        dout, out: ``out`` and its gradient. lse: of the whole attention. dlse: its gradient, or None.

    Returns:
        ``(total_q, num_heads_q)``, accumulator dtype; 0 where lse is infinite (such a row has no gradient).
    """
    library = select_backend(backend, out.device, out.dtype)
    if library is not None:
        delta = torch.empty_like(lse)
        library.function("attn_bwd_prepare")(delta, dout, out, lse, dlse)
        return delta
    return reference.backward_prepare(dout, out, lse, dlse)


def new_dq_workspace(q: Tensor, *, backend: str | None = None) -> Tensor:
    """A zeroed accumulator for dq over all stages. Its layout is the backend's own: convert it, do not read it."""
    library = select_backend(backend, q.device, q.dtype)
    if library is not None:
        words = int(library.function("dq_workspace_words")(*q.shape))
        return torch.zeros(words, dtype=torch.float32, device=q.device)
    return reference.new_dq_workspace(q)


def dq_from_workspace(workspace: Tensor, q: Tensor, *, backend: str | None = None) -> Tensor:
    """dq, contiguous, in the shape and dtype of ``q``, from the accumulator that all stages have added to."""
    library = select_backend(backend, q.device, q.dtype)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if library is not None:
        library.function("dq_convert")(dq, workspace)
        return dq
    with torch.no_grad():
        return dq.copy_(workspace.transpose(0, 1))


def attn_bwd_stage(
    dq_acc: Tensor,
    dk: Tensor,
    dv: Tensor,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    plan: FlexPlan | DevicePlan,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    backend: str | None = None,
) -> None:
    """One stage backward: adds to ``dq_acc``, *stores* every element of ``dk`` and ``dv`` (0 for keys nobody sees).

    Args:
        dq_acc: from :func:`new_dq_workspace`.
        dk, dv: shaped like k and v, in the dtype that the caller wants them in.
        dout: gradient of ``out``. lse: of the whole attention, sink included. delta: from :func:`attn_bwd_prepare`.
        plan, softmax_scale, softcap: those of the stage's forward.
        deterministic: the same bits every time. The blockwise torch backend always is.

    Raises:
        ValueError: a plan for other token counts.
    """
    scale, cap = check_score_options(softmax_scale, softcap, q.shape[2])
    library = select_backend(backend, q.device, q.dtype)
    _check_plan(plan, q, k)
    if library is not None:
        kernel = library.function("attn_bwd")
        kernel(
            *(dq_acc, dk, dv, dout, q, k, v, lse, delta, plan.tensor(q.device)),
            *(scale, cap, int(deterministic), checked_int(sm_margin, "sm_margin", minimum=0)),
        )
        return
    reference.backward(
        *(dq_acc, dk, dv, dout, q, k, v, lse, delta, _schedule(plan, q.shape[1])),
        softmax_scale=scale,
        softcap=cap,
    )


def sink_backward(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, sink: Tensor, sink_layout: str = "sh"
) -> Tensor:
    """Gradient of the sink: ``exp(sink - lse) * (dlse - sum_d(out * dout))``, summed over rows for layout ``sh``.

    Args:
        dout, out, lse, dlse: as for :func:`attn_bwd_prepare`; the lse has the sink in it.

    Returns:
        Like ``sink``.
    """
    return sink_backward_from_delta(reference.backward_prepare(dout, out, lse, dlse), lse, sink, sink_layout)


def sink_backward_from_delta(delta: Tensor, lse: Tensor, sink: Tensor, sink_layout: str) -> Tensor:
    """:func:`sink_backward` where :func:`attn_bwd_prepare` has already been run."""
    with torch.no_grad():
        return sink_gradient(delta.to(compute_dtype(lse.dtype)), lse, sink, sink_layout)
