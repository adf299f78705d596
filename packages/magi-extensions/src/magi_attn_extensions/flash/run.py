"""One call: the provider's kernels, then the sink; and the same backwards.

Forward: the library's own forward without a sink, then ``lse' = logaddexp(lse, lse_sink)`` and ``out' = out exp(lse -
lse')`` in place. Backward: the library's own backward is given ``out'`` and ``lse'``, which makes its ``P = exp(s -
lse')`` and ``delta = sum_d(out' dout)`` those of attention with the sink; then ``dsink = -exp(sink - lse') (delta -
dlse')``.

A gradient into lse adds ``dS = P dlse``, which no FlashAttention library takes. It is a second run of the same
backward, only where there is such a gradient, with values of zero and an output made so that ``delta`` is ``-dlse``.
"""

from __future__ import annotations

from typing import Any

import torch
from magi_core import sink as sink_maths
from torch import Tensor

from . import provider_fa3, provider_fa4, provider_flash_attn, provider_reference, provider_torch
from .call import Extras, Forward, Options, ProviderModule

__all__ = ["DOUBLE_BACKWARD", "FlashWithSink", "backward", "forward", "provider_module"]

DOUBLE_BACKWARD = "FlashAttention with sink has no double backward"

# Each imports its library at its first call.
_MODULES: dict[str, Any] = {
    "flash_attn": provider_flash_attn,
    "flash_attn_3": provider_fa3,
    "flash_attn_4": provider_fa4,
    "reference": provider_reference,
    "torch": provider_torch,
}


def provider_module(choice: str) -> ProviderModule:
    module: ProviderModule = _MODULES[choice]
    return module


def _rows(x: Tensor) -> Tensor:
    """``(rows, heads, dim)`` of a batched or packed tensor, last dim contiguous."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, *x.shape[-2:])


def _batched(lse: Tensor) -> Tensor:
    return lse if lse.dim() == 3 else lse[None]


def _row_sink(sink: Tensor) -> Tensor:
    """``(rows, s_sink, heads)`` of layout ssh, batched or packed; layout sh as it is."""
    return sink.reshape(-1, *sink.shape[-2:]) if sink.dim() == 4 else sink


def forward(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, extras: Extras, options: Options) -> Forward:
    """``out'``, ``lse'`` and what the provider keeps."""
    module = provider_module(options.provider)
    result = module.forward(q, k, v, extras, options)
    if sink is None:
        lse = result.lse
        if module.EMPTY_IS_PLUS_INF:
            lse = lse.masked_fill(lse == torch.inf, -torch.inf)
        return Forward(result.out, lse, result.rng_state, result.probs)
    out = result.out if result.out.is_contiguous() else result.out.contiguous()
    lse = sink_maths.apply_sink_(
        *(_rows(out), _batched(result.lse), _row_sink(sink).to(result.lse.dtype), options.sink_layout),
        empty_is_plus_inf=module.EMPTY_IS_PLUS_INF,
    )
    return Forward(out, lse.view(result.lse.shape), result.rng_state, result.probs)


def _through_lse(
    module: ProviderModule, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    rng_state: Tensor, extras: Extras, options: Options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What ``dlse`` adds to dq and dk, in the accumulator dtype."""
    dlse = torch.where(lse.isfinite(), dlse, 0.0)
    # Powers of two keep the half precision parts of dlse away from overflow and from subnormals; no synchronisation.
    largest = dlse.abs().amax().clamp_min(torch.finfo(dlse.dtype).tiny) if dlse.numel() else dlse.new_ones(())
    factor = torch.exp2(torch.ceil(torch.log2(largest)))
    rest = -(dlse / factor)
    rest = rest.transpose(1, 2) if rest.dim() == 3 else rest.t()  # (batch, seqlen, heads) or (total, heads)
    dout2, out2 = torch.zeros_like(out), torch.zeros_like(out)
    for column in range(min(3, out.shape[-1])):  # three parts in 8 or 11 bits hold the 24 of float32
        part = rest.to(out.dtype)
        dout2[..., column], out2[..., column] = 1.0, part
        rest = rest - part.to(rest.dtype)
    dq, dk, _ = module.backward(dout2, q, k, torch.zeros_like(v), out2, lse, rng_state, extras, options)
    return dq.to(lse.dtype) * factor, dk.to(lse.dtype) * factor


def backward(
    dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, out: Tensor,
    lse: Tensor, rng_state: Tensor, extras: Extras, options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """``(dq, dk, dv, dsink)``; ``dout`` or ``dlse`` may be None, not both."""
    module = provider_module(options.provider)
    given = torch.zeros_like(out) if dout is None else dout if dout.stride(-1) == 1 else dout.contiguous()
    dq, dk, dv = module.backward(given, q, k, v, out, lse, rng_state, extras, options)
    if dlse is not None:
        more_q, more_k = _through_lse(module, dlse, q, k, v, out, lse, rng_state, extras, options)
        dq, dk = (dq + more_q).to(q.dtype), (dk + more_k).to(k.dtype)
    if sink is None:
        return dq, dk, dv, None
    _, dsink = sink_maths.sink_gradient_of_output(
        *(_rows(out), _rows(given), _batched(lse), None if dlse is None else _batched(dlse)),
        *(_row_sink(sink).to(lse.dtype), options.sink_layout),
    )
    return dq, dk, dv, dsink.view(sink.shape).to(sink.dtype)


class FlashWithSink(torch.autograd.Function):
    """The eager path: straight to the provider, without the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, extras: Extras, options: Options
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        result = forward(q, k, v, sink, extras, options)
        ctx.save_for_backward(q, k, v, sink, result.out, result.lse, result.rng_state, *extras.tensors())
        ctx.options = options
        ctx.set_materialize_grads(False)
        if result.probs is not None:
            ctx.mark_non_differentiable(result.probs)
        return result.out, result.lse, result.probs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * 6
        q, k, v, sink, out, lse, rng_state, *extras = ctx.saved_tensors
        grads = backward(dout, dlse, q, k, v, sink, out, lse, rng_state, Extras(*extras), ctx.options)
        return (*grads, None, None)
