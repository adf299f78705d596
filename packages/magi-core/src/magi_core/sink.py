"""Attention sinks: extra logits of the denominator that carry no value (contract item 7).

With ``lse_sink = logsumexp(sink)``: ``lse' = logaddexp(lse, lse_sink)``, ``out' = out * exp(lse - lse')``, and
``dsink = exp(sink - lse') * (dlse' - sum_d(out' * dout))``, summed over rows for layout ``sh``. Every ``exp`` has a
non-positive argument and ``inf - inf`` is never evaluated.

Layouts: ``sh`` ``(s_sink, num_heads_q)``, shared by all rows; ``ssh`` ``(total_q, s_sink, num_heads_q)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "apply_sink",
    "apply_sink_",
    "check_sink",
    "lse_of_sink",
    "merge",
    "merge_lse",
    "merge_weight",
    "sink_gradient",
    "sink_gradient_of_output",
]

LAYOUTS = ("sh", "ssh")


def check_sink(sink: Tensor, sink_layout: str, total_q: int, num_heads_q: int, device: torch.device) -> None:
    """Refuse a sink whose layout, dtype, shape or device does not fit.

    Raises:
        TypeError: not a tensor, or not float32 (or float64). ValueError: layout, shape or device.
    """
    if sink_layout not in LAYOUTS:
        raise ValueError(f"sink_layout must be one of {', '.join(LAYOUTS)}, got {sink_layout!r}")
    if not isinstance(sink, Tensor):
        raise TypeError(f"sink must be a tensor, got {type(sink).__name__}")
    if sink.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"sink must be float32 (or float64), got {sink.dtype}")
    if sink.device != device:
        raise ValueError(f"sink must be on the device of q ({device}), got {sink.device}")
    if sink_layout == "sh":
        fits = sink.dim() == 2 and sink.shape[1] == num_heads_q and sink.shape[0] >= 1
        expected = f"(s_sink, num_heads_q={num_heads_q})"
    else:
        fits = sink.dim() == 3 and sink.shape[0] == total_q and sink.shape[2] == num_heads_q and sink.shape[1] >= 1
        expected = f"(total_q={total_q}, s_sink, num_heads_q={num_heads_q})"
    if not fits:
        raise ValueError(
            f"sink of layout {sink_layout!r} must have shape {expected} with s_sink >= 1, got {tuple(sink.shape)}"
        )


def lse_of_sink(sink: Tensor, sink_layout: str = "sh") -> Tensor:
    """``logsumexp`` over the sinks of a head: ``(num_heads_q,)`` for ``sh``, ``(total_q, num_heads_q)`` for ``ssh``.

    -inf where every sink is -inf, +inf where one is +inf. Dtype of ``sink``.
    """
    return torch.logsumexp(sink, 0 if sink_layout == "sh" else 1)


def merge_weight(lse: Tensor, merged: Tensor) -> Tensor:
    """``exp(lse - merged)`` for ``lse <= merged``; 0 where ``merged`` is infinite."""
    difference = torch.where(merged.isfinite(), lse - merged, -torch.inf)
    return torch.exp(difference)


def merge_lse(lse1: Tensor, lse2: Tensor) -> Tensor:
    """``log(exp(lse1) + exp(lse2))``; -inf of two empty states, +inf when one is +inf."""
    largest, smallest = torch.maximum(lse1, lse2), torch.minimum(lse1, lse2)
    difference = torch.where(largest.isfinite(), smallest - largest, -torch.inf)
    return largest + torch.log1p(torch.exp(difference))


def merge(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Exact attention over the union of two disjoint key sets (or of a multiset).

    Args:
        out1, out2: ``(..., head_dim_v)``. lse1, lse2: the same without the last dim.

    Returns:
        ``(out, lse)``; two empty states give ``(0, -inf)``. ``out`` has the promoted dtype of outs and lses.
    """
    lse = merge_lse(lse1, lse2)
    weight1, weight2 = merge_weight(lse1, lse)[..., None], merge_weight(lse2, lse)[..., None]
    # An empty state may hold anything in out: it is dropped, not weighted with 0.
    part1 = torch.where(weight1 > 0, out1 * weight1, 0.0)
    part2 = torch.where(weight2 > 0, out2 * weight2, 0.0)
    return part1 + part2, lse


def apply_sink(out: Tensor, lse: Tensor, sink: Tensor, sink_layout: str = "sh") -> tuple[Tensor, Tensor]:
    """``(out', lse')`` of attention that has no sink yet.

    Args:
        out: ``(total_q, num_heads_q, head_dim_v)``. lse: ``(total_q, num_heads_q)`` float32 or float64.
    """
    lse_sink = lse_of_sink(sink.to(lse.dtype), sink_layout).expand_as(lse)
    merged = merge_lse(lse, lse_sink)
    weight = merge_weight(lse, merged)[..., None]
    return torch.where(weight > 0, out * weight, 0.0).to(out.dtype), merged


def sink_gradient(delta: Tensor, lse: Tensor, sink: Tensor, sink_layout: str = "sh") -> Tensor:
    """Gradient of the sink from ``delta = sum_d(out * dout) - dlse``.

    Args:
        delta, lse: ``(total_q, num_heads_q)``, the lse with the sink in it.

    Returns:
        Like ``sink``. 0 where ``lse`` or the sink is infinite.
    """
    is_shared = sink_layout == "sh"
    logits, state, slope = sink[None] if is_shared else sink, lse[:, None, :], delta[:, None, :]
    finite = state.isfinite() & logits.isfinite()
    difference = torch.where(finite, logits.to(state.dtype) - state, -torch.inf)
    share = torch.exp(difference.clamp_max(0.0))
    gradient = torch.where(finite, -share * slope, 0.0)
    return (gradient.sum(0) if is_shared else gradient).to(sink.dtype)


def apply_sink_(
    out: Tensor, lse: Tensor, sink: Tensor, sink_layout: str = "sh", *, empty_is_plus_inf: bool = False
) -> Tensor:
    """:func:`apply_sink` around the kernels of a FlashAttention library: ``out`` in place, heads-first lse.

    One fused Triton kernel on CUDA (out in a 16-bit dtype or float32), plain torch elsewhere.

    Args:
        out: ``(rows, num_heads_q, head_dim_v)``, ``rows = batch * seqlen``, last dim contiguous; scaled in place.
        lse: ``(batch, num_heads_q, seqlen)``, any strides; packed tokens are a batch of one.
        sink: ``(s_sink, num_heads_q)`` or ``(rows, s_sink, num_heads_q)``, the dtype of ``lse``.
        empty_is_plus_inf: +inf in ``lse`` stands for a row without keys, as FlashAttention-2 writes it.

    Returns:
        The new lse, ``(batch, num_heads_q, seqlen)`` contiguous.
    """
    if out.is_cuda and out.dtype != torch.float64:
        from .sink_kernels import forward_correction

        with torch.cuda.device(out.device):
            return forward_correction(out, lse, sink, sink_layout, empty_is_plus_inf=empty_is_plus_inf)
    if empty_is_plus_inf:
        lse = torch.where(lse == torch.inf, -torch.inf, lse)
    batch, num_heads, seqlen = lse.shape
    corrected, merged = apply_sink(out, lse.transpose(1, 2).reshape(batch * seqlen, num_heads), sink, sink_layout)
    out.copy_(corrected)
    return merged.view(batch, seqlen, num_heads).transpose(1, 2).contiguous()


def sink_gradient_of_output(
    out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, sink: Tensor, sink_layout: str = "sh"
) -> tuple[Tensor, Tensor]:
    """``(delta, dsink)`` from a corrected output; the backward of :func:`apply_sink_`. Bitwise repeatable.

    Args:
        out, dout: ``(rows, num_heads_q, head_dim_v)``, last dim contiguous. lse, dlse: ``(batch, num_heads_q,
        seqlen)``, the sink in them.

    Returns:
        delta ``(batch, num_heads_q, seqlen)``, 0 where lse is infinite; dsink like ``sink``.
    """
    if out.is_cuda and out.dtype != torch.float64:
        from .sink_kernels import sink_backward

        with torch.cuda.device(out.device):
            delta, dsink = sink_backward(out, dout, lse, dlse, sink, sink_layout)
        return delta, dsink.to(sink.dtype)
    batch, num_heads, seqlen = lse.shape
    delta = (out.to(lse.dtype) * dout.to(lse.dtype)).sum(2).view(batch, seqlen, num_heads).transpose(1, 2)
    if dlse is not None:
        delta = delta - dlse
    delta = torch.where(lse.isfinite(), delta, 0.0)
    row_delta, row_lse = (x.transpose(1, 2).reshape(batch * seqlen, num_heads) for x in (delta, lse))
    return delta, sink_gradient(row_delta, row_lse, sink, sink_layout)
