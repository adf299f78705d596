"""The fused pair of Triton kernels behind :mod:`magi_core.sink`: correction of a forward, gradient of a sink.

Rows are tokens of a batch: row ``r`` is token ``r % seqlen`` of sequence ``r // seqlen``, so that the lse of a
FlashAttention library, ``(batch, num_heads_q, seqlen)``, is read where it is. Packed tokens are a batch of one.

Importing this module imports Triton; :mod:`magi_core.sink` does so at its first call on a CUDA tensor.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["forward_correction", "sink_backward"]


@triton.jit
def _lse_of_sink(sink, m_m, o_m, i_h, stride_row, stride_sink, stride_head, num_sinks, BLOCK_M: tl.constexpr):
    """logsumexp over a head's sinks: [BLOCK_M]; -inf where all are -inf, +inf where one is +inf."""
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    for i_s in range(num_sinks):
        p_sink = sink + o_m * stride_row + i_s * stride_sink + i_h * stride_head
        b_sink = tl.load(p_sink, mask=m_m, other=float("-inf")).to(tl.float32)
        b_new = tl.maximum(b_max, b_sink)
        # An infinite maximum stands for itself: its sum is 1, and inf - inf is never evaluated.
        m_finite = (b_new > float("-inf")) & (b_new < float("inf"))
        b_ref = tl.where(m_finite, b_new, 0.0)
        b_old = tl.where(m_finite, b_max, float("-inf"))
        b_add = tl.where(m_finite, b_sink, float("-inf"))
        b_sum = b_sum * tl.exp(b_old - b_ref) + tl.exp(b_add - b_ref)
        b_max = b_new
    m_finite = (b_max > float("-inf")) & (b_max < float("inf"))
    return tl.where(m_finite, b_max + tl.log(tl.where(m_finite, b_sum, 1.0)), b_max)


@triton.jit
def sink_fwd_kernel(out, lse, new_lse, sink, stride_ot, stride_oh, stride_lb, stride_lh, stride_ls,
                    stride_sink_row, stride_sink, stride_sink_head, rows, seqlen, num_heads, num_sinks, head_dim,
                    EMPTY_IS_PLUS_INF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """out *= exp(lse - lse'), lse' = logaddexp(lse, lse_sink); one program per (rows, head)."""
    i_x = tl.program_id(0).to(tl.int64)  # one axis: the others of a grid end at 65535
    i_m, i_h = i_x // num_heads, i_x % num_heads
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < rows
    o_b, o_s = o_m // seqlen, o_m % seqlen
    b_lse = tl.load(lse + o_b * stride_lb + i_h * stride_lh + o_s * stride_ls, mask=m_m, other=float("-inf"))
    if EMPTY_IS_PLUS_INF:  # FlashAttention-2 writes +inf for a row without keys
        b_lse = tl.where(b_lse == float("inf"), float("-inf"), b_lse)
    b_sink = _lse_of_sink(sink, m_m, o_m, i_h, stride_sink_row, stride_sink, stride_sink_head, num_sinks, BLOCK_M)
    b_max, b_min = tl.maximum(b_lse, b_sink), tl.minimum(b_lse, b_sink)
    m_finite = (b_max > float("-inf")) & (b_max < float("inf"))
    b_ref = tl.where(m_finite, b_max, 0.0)
    b_new = b_max + tl.log(1.0 + tl.exp(tl.where(m_finite, b_min, float("-inf")) - b_ref))
    b_weight = tl.exp(tl.where(m_finite, b_lse, float("-inf")) - tl.where(m_finite, b_new, 0.0))
    tl.store(new_lse + (o_b * num_heads + i_h) * seqlen + o_s, b_new, mask=m_m)
    o_d = tl.arange(0, BLOCK_D)
    m_o = m_m[:, None] & (o_d < head_dim)[None, :]
    p_out = out + o_m[:, None] * stride_ot + i_h * stride_oh + o_d[None, :]
    b_out = tl.load(p_out, mask=m_o, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_D]
    b_out = tl.where(b_weight[:, None] > 0, b_out * b_weight[:, None], 0.0)
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_o)


@triton.jit
def sink_bwd_kernel(out, dout, lse, dlse, sink, dsink, delta, stride_ot, stride_oh, stride_dt, stride_dh,
                    stride_lb, stride_lh, stride_ls, stride_gb, stride_gh, stride_gs,
                    stride_sink_row, stride_sink, stride_sink_head, rows, seqlen, num_heads, num_sinks, head_dim,
                    IS_SHARED: tl.constexpr, HAS_DLSE: tl.constexpr, BLOCK_M: tl.constexpr,
                    BLOCK_D: tl.constexpr):  # fmt: skip
    """delta = sum_d(out dout) - dlse; dsink = -exp(sink - lse') delta, summed over the rows of a program if shared."""
    i_x = tl.program_id(0).to(tl.int64)  # one axis: the others of a grid end at 65535
    i_m, i_h = i_x // num_heads, i_x % num_heads
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < rows
    o_b, o_s = o_m // seqlen, o_m % seqlen
    o_d = tl.arange(0, BLOCK_D)
    m_o = m_m[:, None] & (o_d < head_dim)[None, :]
    b_out = tl.load(out + o_m[:, None] * stride_ot + i_h * stride_oh + o_d[None, :], mask=m_o, other=0.0)
    b_dout = tl.load(dout + o_m[:, None] * stride_dt + i_h * stride_dh + o_d[None, :], mask=m_o, other=0.0)
    b_delta = tl.sum(b_out.to(tl.float32) * b_dout.to(tl.float32), 1)  # [BLOCK_M]
    if HAS_DLSE:
        b_delta -= tl.load(dlse + o_b * stride_gb + i_h * stride_gh + o_s * stride_gs, mask=m_m, other=0.0)
    b_lse = tl.load(lse + o_b * stride_lb + i_h * stride_lh + o_s * stride_ls, mask=m_m, other=float("inf"))
    m_finite = (b_lse > float("-inf")) & (b_lse < float("inf"))
    b_delta = tl.where(m_finite, b_delta, 0.0)
    b_ref = tl.where(m_finite, b_lse, 0.0)
    tl.store(delta + (o_b * num_heads + i_h) * seqlen + o_s, b_delta, mask=m_m)
    for i_s in range(num_sinks):
        p_sink = sink + o_m * stride_sink_row + i_s * stride_sink + i_h * stride_sink_head
        b_sink = tl.load(p_sink, mask=m_m, other=float("-inf")).to(tl.float32)
        m_share = m_finite & (b_sink > float("-inf")) & (b_sink < float("inf"))
        b_share = tl.exp(tl.where(m_share, tl.minimum(b_sink - b_ref, 0.0), float("-inf")))
        b_grad = -b_share * b_delta
        if IS_SHARED:
            tl.store(dsink + (i_m * num_sinks + i_s) * num_heads + i_h, tl.sum(b_grad, 0))
        else:
            tl.store(dsink + (o_m * num_sinks + i_s) * num_heads + i_h, b_grad, mask=m_m)


# Rows of a program: 8192 elements of out each, 4 warps. Both kernels are bound by memory.
_BLOCK_ELEMENTS = 8192


def _blocks(head_dim: int) -> dict[str, Any]:
    block_d = max(16, triton.next_power_of_2(head_dim))
    return dict(BLOCK_D=block_d, BLOCK_M=max(16, _BLOCK_ELEMENTS // block_d), num_warps=4)


def _sink_strides(sink: Tensor, sink_layout: str) -> tuple[int, int, int]:
    """Strides of row, sink, head."""
    return (0, *sink.stride()) if sink_layout == "sh" else sink.stride()  # type: ignore[return-value]


def forward_correction(
    out: Tensor, lse: Tensor, sink: Tensor, sink_layout: str, *, empty_is_plus_inf: bool = False
) -> Tensor:
    """Scale ``out (rows, num_heads_q, head_dim_v)`` in place; return the new lse ``(batch, num_heads_q, seqlen)``.

    Args:
        out: last dim contiguous. lse: ``(batch, num_heads_q, seqlen)`` float32, any strides, ``rows = batch * seqlen``.
        empty_is_plus_inf: +inf in ``lse`` stands for a row without keys.
    """
    (batch, num_heads, seqlen), head_dim = lse.shape, out.shape[2]
    new_lse = torch.empty((batch, num_heads, seqlen), dtype=torch.float32, device=lse.device)
    rows = batch * seqlen
    if rows == 0:
        return new_lse
    blocks = _blocks(head_dim)
    sink_fwd_kernel[(num_heads * triton.cdiv(rows, blocks["BLOCK_M"]),)](
        *(out, lse, new_lse, sink, out.stride(0), out.stride(1), *lse.stride(), *_sink_strides(sink, sink_layout)),
        *(rows, seqlen, num_heads, sink.shape[-2], head_dim),
        EMPTY_IS_PLUS_INF=empty_is_plus_inf,
        **blocks,
    )
    return new_lse


def sink_backward(
    out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, sink: Tensor, sink_layout: str
) -> tuple[Tensor, Tensor]:
    """``(delta, dsink)``: delta ``(batch, num_heads_q, seqlen)`` float32, dsink like sink, float32. Deterministic.

    Args:
        out, dout: ``(rows, num_heads_q, head_dim_v)``, last dim contiguous. lse, dlse: ``(batch, num_heads_q,
        seqlen)``, float32, any strides, the sink in them.
    """
    (batch, num_heads, seqlen), head_dim = lse.shape, out.shape[2]
    delta = torch.empty((batch, num_heads, seqlen), dtype=torch.float32, device=lse.device)
    rows, num_sinks, is_shared = batch * seqlen, sink.shape[-2], sink_layout == "sh"
    if rows == 0:
        return delta, torch.zeros(sink.shape, dtype=torch.float32, device=sink.device)
    blocks = _blocks(head_dim)
    tiles = triton.cdiv(rows, blocks["BLOCK_M"])
    shape = (tiles if is_shared else rows, num_sinks, num_heads)
    dsink = torch.empty(shape, dtype=torch.float32, device=sink.device)
    given = lse if dlse is None else dlse
    sink_bwd_kernel[(num_heads * tiles,)](
        *(out, dout, lse, given, sink, dsink, delta, *out.stride()[:2], *dout.stride()[:2], *lse.stride()),
        *(*given.stride(), *_sink_strides(sink, sink_layout), rows, seqlen, num_heads, num_sinks, head_dim),
        IS_SHARED=is_shared,
        HAS_DLSE=dlse is not None,
        **blocks,
    )
    return delta, dsink.sum(0) if is_shared else dsink
