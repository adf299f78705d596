"""Merging partial attention results, and sinks, as differentiable torch functions.

Shapes: ``out (total_q, num_heads_q, head_dim_v)``, ``lse (total_q, num_heads_q)`` natural log, -inf where a row saw no
key. Two empty states merge to ``(0, -inf)``; no ``exp`` has a positive argument; ``inf - inf`` is never evaluated. With
``inplace=True`` the result is also written into the first ``out`` or ``lse``, which then must not require a gradient.

Source: the identities ``lse = log(exp(lse1) + exp(lse2))``, ``out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2``, and
the sink maths of ``magi_core.sink``.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from magi_core.sink import check_sink, lse_of_sink, merge_lse, merge_weight, sink_gradient
from torch import Tensor

__all__ = [
    "calc_lse_rescale_weight",
    "calc_lse_sink",
    "correct_attn_lse",
    "correct_attn_lse_with_sink",
    "correct_attn_out",
    "correct_attn_out_lse",
    "correct_attn_out_lse_with_sink",
    "correct_attn_out_with_sink",
    "safe_lse",
    "safe_softmax",
    "safe_subtract",
    "sink_bwd",
    "softmax_bwd",
]


def _check_state(out: Tensor | None, lse: Tensor, name: str = "") -> None:
    if lse.dim() != 2:
        raise ValueError(f"lse{name} must be (total_q, num_heads_q), got shape {tuple(lse.shape)}")
    if not lse.is_floating_point():
        raise TypeError(f"lse{name} must be floating point, got {lse.dtype}")
    if out is not None and (out.dim() != 3 or out.shape[:2] != lse.shape):
        raise ValueError(
            f"out{name} must be (total_q, num_heads_q, head_dim_v) with the lse's {tuple(lse.shape)}, "
            f"got shape {tuple(out.shape)}"
        )


def _check_same(lse1: Tensor, lse2: Tensor, name: str = "lse2") -> None:
    if lse1.shape != lse2.shape:
        raise ValueError(f"{name} must have the shape of lse1 {tuple(lse1.shape)}, got {tuple(lse2.shape)}")


def _given(result: Tensor, target: Tensor, inplace: bool) -> Tensor:
    return target.copy_(result) if inplace else result


def safe_subtract(a: Tensor, b: Tensor) -> Tensor:
    """``a - b``, and -inf where both are the same infinity (so that ``exp`` of it is weight 0, not NaN)."""
    is_same = a.isinf() & (a == b)
    return torch.where(is_same, -torch.inf, torch.where(is_same, 0.0, a) - torch.where(is_same, 0.0, b))


def safe_lse(logits: Tensor, dim: int = -1, keepdim: bool = False) -> Tensor:
    """``log(sum(exp(logits)))`` along ``dim``; -inf, with zero gradient, where every logit is -inf.

    Args:
        logits: floating point, at least one element along ``dim``.
    """
    largest = logits.detach().amax(dim, keepdim=True)
    is_infinite = largest.isinf()
    shifted = torch.where(is_infinite, 0.0, logits - torch.where(is_infinite, 0.0, largest))
    lse = torch.where(is_infinite, largest, shifted.exp().sum(dim, keepdim=True).log() + largest)
    return lse if keepdim else lse.squeeze(dim)


def safe_softmax(logits: Tensor, dim: int = -1) -> Tensor:
    """Softmax along ``dim``; a row of only -inf gives zeros, and zero gradient."""
    is_empty = (logits == -torch.inf).all(dim, keepdim=True)
    return torch.where(is_empty, 0.0, torch.softmax(torch.where(is_empty, 0.0, logits), dim))


def softmax_bwd(dout: Tensor, out: Tensor, dim: int = -1) -> Tensor:
    """Gradient of softmax's input from its output: ``out * (dout - sum(out * dout))``."""
    return out * (dout - (out * dout).sum(dim, keepdim=True))


def calc_lse_rescale_weight(lse_to_rescale: Tensor, rescaled_lse: Tensor) -> Tensor:
    """``exp(lse_to_rescale - rescaled_lse)`` with one more dim at the end, to multiply an out with.

    0 where the new lse is infinite.
    """
    return merge_weight(lse_to_rescale, rescaled_lse)[..., None]


def calc_lse_sink(sink: Tensor, seqlen_q: int, sink_layout: str = "sh") -> Tensor:
    """``logsumexp`` of the sinks of every row: ``(seqlen_q, num_heads_q)``.

    Args:
        sink: ``(s_sink, num_heads_q)`` for ``"sh"``, ``(seqlen_q, s_sink, num_heads_q)`` for ``"ssh"``.

    Raises:
        NotImplementedError: layout ``"shd"``. ValueError, TypeError: another layout, shape or dtype.
    """
    _check_layout(sink_layout)
    check_sink(
        sink, sink_layout, seqlen_q, sink.shape[-1] if isinstance(sink, Tensor) and sink.dim() else 0, sink.device
    )
    lse = lse_of_sink(sink, sink_layout)
    return lse.expand(seqlen_q, -1) if sink_layout == "sh" else lse


def _check_layout(sink_layout: str) -> None:
    if sink_layout == "shd":
        raise NotImplementedError("sink_layout 'shd' is not implemented; use 'sh' or 'ssh'")


def correct_attn_lse(lse1: Tensor, lse2: Tensor, inplace: bool = False) -> Tensor:
    """lse of the union of two key sets, ``(total_q, num_heads_q)``, in the wider dtype."""
    _check_state(None, lse1, "1")
    _check_same(lse1, lse2)
    return _given(merge_lse(lse1, lse2), lse1, inplace)


def correct_attn_out(
    out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor, lse: Tensor, inplace: bool = False
) -> Tensor:
    """out of the union of two key sets, in the dtype of ``out1``.

    Args:
        out1, lse1, out2, lse2: the two states. What ``out`` holds where its lse is -inf does not matter.
        lse: ``correct_attn_lse(lse1, lse2)``.
    """
    _check_state(out1, lse1, "1")
    _check_state(out2, lse2, "2")
    _check_same(lse1, lse2)
    _check_same(lse1, lse, "lse")
    weight1, weight2 = calc_lse_rescale_weight(lse1, lse), calc_lse_rescale_weight(lse2, lse)
    out = torch.where(weight1 > 0, out1 * weight1, 0.0) + torch.where(weight2 > 0, out2 * weight2, 0.0)
    return _given(out.to(out1.dtype), out1, inplace)


def correct_attn_out_lse(
    out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of the union of two key sets."""
    lse = correct_attn_lse(lse1, lse2)
    out = correct_attn_out(out1, lse1, out2, lse2, lse, inplace)
    return out, _given(lse, lse1, inplace)


def _lse_with_sink(lse: Tensor, sink: Tensor, sink_layout: str) -> Tensor:
    _check_state(None, lse)
    _check_layout(sink_layout)
    check_sink(sink, sink_layout, lse.shape[0], lse.shape[1], lse.device)
    return merge_lse(lse, calc_lse_sink(sink, lse.shape[0], sink_layout).to(lse.dtype))


def correct_attn_lse_with_sink(lse: Tensor, sink: Tensor, sink_layout: str = "sh", inplace: bool = False) -> Tensor:
    """lse with a sink in the denominator: ``logaddexp(lse, logsumexp(sink))``.

    Raises:
        NotImplementedError: layout ``"shd"``. ValueError, TypeError: a sink that does not fit.
    """
    return _given(_lse_with_sink(lse, sink, sink_layout), lse, inplace)


def correct_attn_out_with_sink(
    out: Tensor, lse: Tensor, sink: Tensor, sink_layout: str = "sh", inplace: bool = False
) -> Tensor:
    """out with a sink in the denominator: ``out * exp(lse - lse')``. ``lse`` is the one without the sink."""
    _check_state(out, lse)
    weight = calc_lse_rescale_weight(lse, _lse_with_sink(lse, sink, sink_layout))
    return _given(torch.where(weight > 0, out * weight, 0.0).to(out.dtype), out, inplace)


def correct_attn_out_lse_with_sink(
    out: Tensor, lse: Tensor, sink: Tensor, sink_layout: str = "sh", inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` with a sink in the denominator."""
    merged = _lse_with_sink(lse, sink, sink_layout)
    out = correct_attn_out_with_sink(out, lse, sink, sink_layout, inplace)
    return out, _given(merged, lse, inplace)


def sink_bwd(
    sink: Tensor, lse: Tensor, o: Tensor, do: Tensor, sink_layout: str = "sh", dsink: Tensor | None = None
) -> Tensor:
    """Gradient of a sink: ``-exp(sink - lse) * sum_d(o * do)``, summed over rows for ``"sh"``.

    Args:
        sink: ``(s_sink, num_heads_q)`` or ``(total_q, s_sink, num_heads_q)``.
        lse, o: of the forward, with the sink in them. do: gradient of ``o``.
        dsink: add the gradient to this tensor, and return it.

    Returns:
        Like ``sink``. 0 where ``lse`` or the sink is infinite.
    """
    _check_state(o, lse)
    _check_layout(sink_layout)
    check_sink(sink, sink_layout, lse.shape[0], lse.shape[1], lse.device)
    if do.shape != o.shape:
        raise ValueError(f"do must have the shape of o {tuple(o.shape)}, got {tuple(do.shape)}")
    gradient = sink_gradient((o.to(lse.dtype) * do.to(lse.dtype)).sum(-1), lse, sink, sink_layout)
    return gradient if dsink is None else dsink.add_(gradient)


@cache
def _compiled(name: str) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(globals()[name])
    return compiled


def __getattr__(name: str) -> Any:
    """``<name>_compiled`` of a correction function is that function under ``torch.compile``."""
    plain = name.removesuffix("_compiled")
    if plain != name and plain.startswith("correct_attn_") and plain in __all__:
        return _compiled(plain)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
