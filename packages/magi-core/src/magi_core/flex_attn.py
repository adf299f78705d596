"""Flex flash attention on one device: the public function over slices.

``out = softmax(softmax_scale * q @ k^T restricted to the slices) @ v``; what every argument means is the contract's
(``docs``), names and defaults are those of MagiAttention's function of the same name.

An eager call goes through one ``autograd.Function`` straight to the backend; under ``torch.compile`` the same code runs
behind the operators of :mod:`magi_core.ops`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from . import stages
from .backends.reference import compute_dtype
from .backends.select import select_backend
from .checks import check_bool, check_hints, check_qkv, check_score_options, check_sink
from .errors import INT32_MAX, checked_int
from .index_attn import IndexMask, check_indices, index_backward, index_forward
from .mask import Mask
from .mask_type import AttnMaskType
from .plan import FlexPlan
from .plan_cache import DevicePlan, plan_from_buffer, plan_from_device_ranges, plan_from_ranges

if TYPE_CHECKING:
    from .ranges import AttnRanges

    Plan = FlexPlan | DevicePlan | IndexMask

__all__ = ["AttnForwardMeta", "flex_flash_attn_func"]


@dataclass
class AttnForwardMeta:
    """What attention gives besides ``out``.

    Attributes:
        lse: ``(total_q, num_heads_q)`` float32 (float64 for float64 inputs), natural log, sink included, -inf where a
            row sees nothing. Differentiable.
        max_logits: ``(num_heads_q,)`` of the same dtype, the largest score over visible pairs (after softcap, sink
            excluded), -inf if none; None unless asked for.
    """

    lse: Tensor | None = None
    max_logits: Tensor | None = None


class Options(NamedTuple):
    """How scores are made and which backend runs; plain values, so that operators can carry them."""

    sink_layout: str
    softmax_scale: float
    softcap: float
    return_max_logits: bool
    deterministic: bool
    sm_margin: int
    backend: str  # "" picks by device


def empty_outputs(q: Tensor, v: Tensor, return_max_logits: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``out``, ``lse``, ``max_logits`` (no elements when not asked for): one allocator for real and fake tensors."""
    dtype = compute_dtype(q.dtype)
    out = torch.empty((q.shape[0], q.shape[1], v.shape[2]), dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[0], q.shape[1]), dtype=dtype, device=q.device)
    max_logits = torch.empty((q.shape[1] if return_max_logits else 0,), dtype=dtype, device=q.device)
    return out, lse, max_logits


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, plan: Plan, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, lse, max_logits)`` of the one-stage case."""
    out, lse, max_logits = empty_outputs(q, v, options.return_max_logits)
    max_logits.fill_(-torch.inf)
    if isinstance(plan, IndexMask):
        index_forward(
            *(out, lse, max_logits if options.return_max_logits else None, q, k, v, plan),
            sink=sink,
            sink_layout=options.sink_layout,
            softmax_scale=options.softmax_scale,
            softcap=options.softcap,
        )
        return out, lse, max_logits
    stages.attn_fwd_stage(
        *(out, None, lse, max_logits if options.return_max_logits else None, q, k, v, plan),
        sink=sink,
        sink_layout=options.sink_layout,
        softmax_scale=options.softmax_scale,
        softcap=options.softcap,
        sm_margin=options.sm_margin,
        backend=options.backend,
    )
    return out, lse, max_logits


def run_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    plan: Plan,
    options: Options,
    needs_qkv: bool = True,
    needs_sink: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """``(dq, dk, dv, dsink)`` of the one-stage case; None for what was not needed."""
    backend = options.backend
    if dout is None:
        dout = torch.zeros_like(out)
    delta = stages.attn_bwd_prepare(dout, out, lse, dlse, backend=backend)
    dq = dk = dv = dsink = None
    if sink is not None and needs_sink:
        dsink = stages.sink_backward_from_delta(delta, lse, sink, options.sink_layout)
    if needs_qkv and isinstance(plan, IndexMask):
        dq, dk, dv = index_backward(
            *(dout, q, k, v, lse, delta, plan), softmax_scale=options.softmax_scale, softcap=options.softcap
        )
    elif needs_qkv:
        assert not isinstance(plan, IndexMask)
        dq_acc = stages.new_dq_workspace(q, backend=backend)
        dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
        dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        stages.attn_bwd_stage(
            *(dq_acc, dk, dv, dout, q, k, v, lse, delta, plan),
            softmax_scale=options.softmax_scale,
            softcap=options.softcap,
            deterministic=options.deterministic,
            sm_margin=options.sm_margin,
            backend=backend,
        )
        dq = stages.dq_from_workspace(dq_acc, q, backend=backend)
    return dq, dk, dv, dsink


DOUBLE_BACKWARD = (
    "flex_flash_attn_func is differentiable once: a gradient of its gradient (double backward) is not supported"
)


class _FlexAttnBackward(torch.autograd.Function):
    """The backward, as a node of its own under ``create_graph=True``, so that differentiating it can be refused."""

    @staticmethod
    def forward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, state: tuple[Any, ...], *tensors: Tensor) -> Any:
        q, k, v, sink, out, lse = tensors
        return run_backward(dout, dlse, q, k, v, sink, out, lse, *state)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(DOUBLE_BACKWARD)


class _FlexAttn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, plan: Plan, options: Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, max_logits = run_forward(q, k, v, sink, plan, options)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.plan, ctx.options = plan, options
        ctx.mark_non_differentiable(max_logits)
        ctx.set_materialize_grads(False)
        return out, lse, max_logits

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> Any:
        if dout is None and dlse is None:
            return (None,) * 6
        needs = ctx.needs_input_grad
        state = (ctx.plan, ctx.options, any(needs[:3]), needs[3])
        grads = _FlexAttnBackward.apply(dout, dlse, state, *ctx.saved_tensors)
        return (*(g if need else None for g, need in zip(grads, needs, strict=False)), None, None)


def check_whole(plan: FlexPlan) -> FlexPlan:
    """Refuse a plan that leaves rows of the output to other stages. Raises ValueError."""
    if plan.header["num_stages"] != 1:
        raise ValueError(
            f"plan must be for one stage, got stage {plan.header['stage']} of {plan.header['num_stages']}; "
            "magi_core.stages runs the stages of an attention"
        )
    return plan


def host_plan(
    q: Tensor,
    k: Tensor,
    q_ranges: Any,
    k_ranges: Any,
    mask_types: Any,
    plan: FlexPlan | Tensor | None,
    allow_overlap: bool,
    backend: str,
) -> Plan:
    """The plan to run: the given one, or that of the ranges (cached by content).

    Ranges that are CUDA tensors are planned on the device when a compiled kernel runs.
    """
    if plan is not None:
        if not isinstance(plan, Tensor):
            return plan
        return check_whole(plan_from_buffer(plan))
    if isinstance(q_ranges, Tensor) and q_ranges.device.type == "cuda":
        library = select_backend(backend, q.device, q.dtype)
        if library is not None:
            _check_device_ranges(q_ranges, k_ranges, mask_types, q.device)
            return plan_from_device_ranges(library, q_ranges, k_ranges, mask_types, q.shape[0], k.shape[0])
    return plan_from_ranges(q_ranges, k_ranges, mask_types, q.shape[0], k.shape[0], allow_overlap)


def _check_device_ranges(q_ranges: Any, k_ranges: Any, mask_types: Any, device: torch.device) -> None:
    """What can be checked of device tensors without a synchronisation."""
    for name, x, dim in (("q_ranges", q_ranges, 2), ("k_ranges", k_ranges, 2), ("attn_type_map", mask_types, 1)):
        if x is None and name == "attn_type_map":
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor like q_ranges, got {type(x).__name__}")
        if x.device != device:
            raise ValueError(f"{name} must be on the device of q ({device}), got {x.device}")
        if x.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, got {x.dtype}")
        shape = (len(q_ranges), 2)[:dim]
        if tuple(x.shape) != shape or not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous with shape {shape}, got {tuple(x.shape)}")


def _range_tensor(ranges: Any, name: str) -> Tensor:
    """Ranges as an operator takes them; a tensor stays the graph input that it is."""
    if isinstance(ranges, Tensor):
        return ranges
    if hasattr(ranges, "to_naive_ranges"):
        ranges = ranges.to_naive_ranges()
    if not isinstance(ranges, (list, tuple)):  # an array, which the compiler takes for a tensor
        return torch.as_tensor(ranges)
    pairs = [_pair(pair, f"{name}[{i}]") for i, pair in enumerate(ranges)]
    return torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2)


def _pair(pair: Any, name: str) -> tuple[int, int]:
    """A range of a list, checked here because a tensor of int32 would take, and truncate, more than integers."""
    ends = (pair.start, pair.end) if hasattr(pair, "start") else tuple(pair)
    if len(ends) != 2:
        raise ValueError(f"{name} must be a pair (start, end), got {len(ends)} numbers")
    start, end = (checked_int(end, name, minimum=-INT32_MAX) for end in ends)
    return start, end


def _type_tensor(types: Any, num_slices: int) -> Tensor | None:
    if types is None or isinstance(types, Tensor):
        return types
    if isinstance(types, (str, int, AttnMaskType)):
        types = [types] * num_slices
    return torch.tensor([AttnMaskType.from_any(t).to_int_type() for t in types], dtype=torch.int32)


def flex_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ranges: AttnRanges | Tensor | Any | None = None,
    k_ranges: AttnRanges | Tensor | Any | None = None,
    attn_type_map: Tensor | Any | None = None,
    *,
    index_attn_indices: Tensor | None = None,
    q_block_size: int = 1,
    k_block_size: int = 1,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    disable_fwd_atomic_reduction: bool = False,
    disable_bwd_dkv_atomic_reduction: bool = False,
    ref_block_size: tuple[int, int] | None = None,
    max_seqlen_q: int | None = None,
    auto_range_merge: bool = False,
    swap_ab: bool = False,
    pack_gqa: bool = False,
    cat_gqa: bool = False,
    sparse_load: bool = False,
    index_attn: bool = False,
    swap_bwd_qk_loop: bool = False,
    return_max_logits: bool = False,
    plan: FlexPlan | Tensor | None = None,
    backend: str | None = None,
    allow_overlap: bool = False,
) -> tuple[Tensor, AttnForwardMeta]:
    """Attend over slices.

    Args:
        q: ``(total_q, num_heads_q, head_dim)``: float16 or bfloat16; also float32 and float64 on the ``reference``
            backend.
        k: ``(total_k, num_heads_kv, head_dim)``; ``num_heads_kv`` divides ``num_heads_q``, and query head h reads kv
            head ``h // (num_heads_q // num_heads_kv)``.
        v: ``(total_k, num_heads_kv, head_dim_v)``.
        q_ranges, k_ranges: slice n lets tokens of ``q_ranges[n]`` see tokens of ``k_ranges[n]``: half-open, as
            ``AttnRanges``, ``(n, 2)`` array, nested list or int32 tensor. Tensors on the device of a compiled kernel
            are planned there, without a synchronisation.
        attn_type_map: type of each slice: 0 full, 1 causal (bottom-right aligned), 2 inverse causal (top-left
            aligned), 3 both; or ``AttnMaskType`` members, or their names; one for all or one each. None is full.
        index_attn_indices: instead of ranges, int32 ``(tokens, kv heads, max_topk)``: row r of its view ``(-1,
            max_topk)`` lists the rows of k that row r of q sees, ended by -1; then ``k`` and ``v`` have one head. A
            row of k listed twice counts twice.
        q_block_size, k_block_size: tokens per index of ``index_attn_indices``; only 1.
        sink: extra logits of the denominator, float32, ``(s_sink, num_heads_q)`` for ``sink_layout="sh"``, ``(total_q,
            s_sink, num_heads_q)`` for ``"ssh"``.
        softmax_scale: factor on ``q @ k^T``; ``head_dim ** -0.5`` when None. Any sign.
        softcap: when positive, scores become ``softcap * tanh(score / softcap)``.
        deterministic: the backward, too, gives the same bits every time. The forward always does.
        return_max_logits: fill ``meta.max_logits``.
        plan: a ``FlexPlan`` (or the tensor that holds one) instead of ranges.
        backend: None picks the compiled kernels for CUDA tensors and ``reference`` for CPU tensors.
        allow_overlap: let slices cover a pair twice; it then counts twice. Otherwise that is an error.
        sm_margin, disable_fwd_atomic_reduction, disable_bwd_dkv_atomic_reduction, ref_block_size, max_seqlen_q,
        auto_range_merge, swap_ab, pack_gqa, cat_gqa, sparse_load, index_attn, swap_bwd_qk_loop: hints for kernels,
            type-checked, without effect on results.

    Returns:
        ``out (total_q, num_heads_q, head_dim_v)`` in the dtype of q, and :class:`AttnForwardMeta`. A row that sees
        nothing gives 0, and lse -inf.

    Raises:
        ValueError, TypeError: an argument that does not fit; the message names it. NotImplementedError: a device, dtype
            or combination that no backend takes. ArchNotInstalledError: the wheel for this GPU is missing.

    Differentiable once, in q, k, v and sink, from ``out`` and ``meta.lse``. Does not synchronise.
    """
    check_qkv(q, k, v)
    scale, cap = check_score_options(softmax_scale, softcap, q.shape[2])
    check_hints(
        ref_block_size=ref_block_size,
        max_seqlen_q=max_seqlen_q,
        disable_fwd_atomic_reduction=disable_fwd_atomic_reduction,
        disable_bwd_dkv_atomic_reduction=disable_bwd_dkv_atomic_reduction,
        auto_range_merge=auto_range_merge,
        swap_ab=swap_ab,
        pack_gqa=pack_gqa,
        cat_gqa=cat_gqa,
        sparse_load=sparse_load,
        index_attn=index_attn,
        swap_bwd_qk_loop=swap_bwd_qk_loop,
    )
    options = Options(
        sink_layout,
        scale,
        cap,
        check_bool(return_max_logits, "return_max_logits"),
        check_bool(deterministic, "deterministic"),
        checked_int(sm_margin, "sm_margin", minimum=0),
        backend or "",
    )
    check_bool(allow_overlap, "allow_overlap")
    for name, size in (("q_block_size", q_block_size), ("k_block_size", k_block_size)):
        checked_int(size, name, minimum=1)
    if sink is not None:
        check_sink(sink, sink_layout, q.shape[0], q.shape[1], q.device)
    elif sink_layout not in ("sh", "ssh"):
        raise ValueError(f"sink_layout must be one of sh, ssh, got {sink_layout!r}")
    select_backend(backend, q.device, q.dtype)

    given = [
        name
        for name, is_given in (
            ("q_ranges and k_ranges", q_ranges is not None or k_ranges is not None),
            ("index_attn_indices", index_attn_indices is not None),
            ("plan", plan is not None),
        )
        if is_given
    ]
    if len(given) != 1:
        raise ValueError(
            "exactly one of q_ranges and k_ranges, index_attn_indices, plan must be given, "
            f"got {'; '.join(given) if given else 'none'}"
        )
    if index_attn_indices is not None:
        if attn_type_map is not None:
            raise ValueError("attn_type_map must be None when index_attn_indices is given")
        if select_backend(backend, q.device, q.dtype) is not None:
            raise NotImplementedError(
                'index_attn_indices has no compiled kernel; pass backend="reference" for the blockwise torch backend'
            )
        indices = check_indices(index_attn_indices, q, k, q_block_size, k_block_size)
        if torch.compiler.is_compiling():
            from . import ops

            out, lse, max_logits = ops.index_attn(q, k, v, indices, sink, options)
        else:
            out, lse, max_logits = _FlexAttn.apply(q, k, v, sink, IndexMask(indices), options)
        return out, AttnForwardMeta(lse=lse, max_logits=max_logits if return_max_logits else None)
    if plan is None and (q_ranges is None or k_ranges is None):
        missing = "q_ranges" if q_ranges is None else "k_ranges"
        hint = "; a Mask is given as *mask.slices()" if isinstance(q_ranges, Mask) else ""
        raise ValueError(f"q_ranges and k_ranges must be given together, got {missing}=None{hint}")
    if plan is not None:
        if not isinstance(plan, (FlexPlan, DevicePlan, Tensor)):
            raise TypeError(f"plan must be a FlexPlan or an int32 tensor that holds one, got {type(plan).__name__}")
        if isinstance(plan, FlexPlan):
            check_whole(plan)
        if attn_type_map is not None:
            raise ValueError("attn_type_map must be None when plan is given: the plan holds the types")

    if torch.compiler.is_compiling():
        from . import ops

        if plan is None:
            b_q, b_k = _range_tensor(q_ranges, "q_ranges"), _range_tensor(k_ranges, "k_ranges")
            types = _type_tensor(attn_type_map, b_q.shape[0])
            out, lse, max_logits = ops.flex_attn(q, k, v, b_q, b_k, types, None, sink, options, allow_overlap)
        else:
            buffer = plan if isinstance(plan, Tensor) else plan.tensor(q.device)
            out, lse, max_logits = ops.flex_attn(q, k, v, None, None, None, buffer, sink, options, allow_overlap)
    else:
        chosen = host_plan(q, k, q_ranges, k_ranges, attn_type_map, plan, allow_overlap, options.backend)
        out, lse, max_logits = _FlexAttn.apply(q, k, v, sink, chosen, options)
    return out, AttnForwardMeta(lse=lse, max_logits=max_logits if return_max_logits else None)
