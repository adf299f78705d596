"""Triton kernels of attention over listed keys: one program per (query, kv head, block of its query heads).

Keys and values are gathered once for all the query heads of a program. Dims are cut into a power of two and a rest
(576 = 512 + 64), so that a tile wastes little. An entry outside ``[0, total_k)`` lists nothing; a key listed twice
counts twice. The backward adds to fp32 dk and dv with atomics: their last bits may differ between runs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["backward", "forward"]


@triton.jit
def dsa_fwd_kernel(q, k, v, index, out, lse, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
                   total_q, total_k, topk, num_heads_q, scale, GROUP: tl.constexpr, DIM: tl.constexpr,
                   DIM_V: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                   BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """out[i, h] = sum_t exp(s_t - lse) v[index[g, i, t]], s_t = scale q k[index[g, i, t]]."""
    # Tokens and head blocks share the first axis of the grid: the others end at 65535.
    i_x, i_g, n_h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.cdiv(GROUP, BLOCK_H)
    i_t, i_h = i_x // n_h, i_x % n_h
    o_h = i_h * BLOCK_H + tl.arange(0, BLOCK_H)
    m_h = o_h < GROUP
    o_head = i_g * GROUP + o_h
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    m_d, m_v = o_d < DIM, o_v < DIM_V
    p_q = q + i_t * stride_qt + o_head[:, None] * stride_qh
    b_q = tl.load(p_q + o_d[None, :], mask=m_h[:, None] & m_d[None, :], other=0.0)  # [BLOCK_H, BLOCK_D]
    if BLOCK_R > 0:
        o_r = BLOCK_D + tl.arange(0, BLOCK_R)
        b_qr = tl.load(p_q + o_r[None, :], mask=m_h[:, None] & (o_r < DIM)[None, :], other=0.0)
    b_m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    b_l = tl.zeros([BLOCK_H], tl.float32)
    b_o = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    p_index = index + (i_g * total_q + i_t) * topk
    for i_n in range(0, topk, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        b_i = tl.load(p_index + o_n, mask=o_n < topk, other=-1).to(tl.int64)
        m_n = (b_i >= 0) & (b_i < total_k)
        p_k = k + b_i[None, :] * stride_kt + i_g * stride_kh
        b_k = tl.load(p_k + o_d[:, None], mask=m_d[:, None] & m_n[None, :], other=0.0)  # [BLOCK_D, BLOCK_N]
        b_s = tl.dot(b_q, b_k, input_precision=PRECISION)
        if BLOCK_R > 0:
            b_kr = tl.load(p_k + o_r[:, None], mask=(o_r < DIM)[:, None] & m_n[None, :], other=0.0)
            b_s = tl.dot(b_qr, b_kr, b_s, input_precision=PRECISION)
        b_s = tl.where(m_n[None, :], b_s * scale, float("-inf"))
        b_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_ref = tl.where(b_new > float("-inf"), b_new, 0.0)
        b_p = tl.exp(b_s - b_ref[:, None])
        b_old = tl.exp(b_m - b_ref)
        b_l = b_l * b_old + tl.sum(b_p, 1)
        b_m = b_new
        p_v = v + b_i[:, None] * stride_vt + i_g * stride_vh + o_v[None, :]
        b_v = tl.load(p_v, mask=m_n[:, None] & m_v[None, :], other=0.0)  # [BLOCK_N, BLOCK_V]
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_old[:, None], input_precision=PRECISION)
    m_some = b_l > 0
    b_safe = tl.where(m_some, b_l, 1.0)
    b_o = b_o / b_safe[:, None]
    p_out = out + (i_t * num_heads_q + o_head)[:, None] * DIM_V + o_v[None, :]
    tl.store(p_out, b_o.to(out.dtype.element_ty), mask=m_h[:, None] & m_v[None, :])
    tl.store(lse + i_t * num_heads_q + o_head, tl.where(m_some, b_m + tl.log(b_safe), float("-inf")), mask=m_h)


@triton.jit
def dsa_bwd_kernel(q, k, v, index, dout, lse, delta, dq, dk, dv, stride_qt, stride_qh, stride_kt, stride_kh,
                   stride_vt, stride_vh, stride_dt, stride_dh, total_q, total_k, topk, num_heads_q, num_heads_kv,
                   scale, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_H: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """ds = p (dout v^T - delta); dq = scale ds k, stored; dk += scale ds^T q and dv += p^T dout, fp32 atomics."""
    # Tokens and head blocks share the first axis of the grid: the others end at 65535.
    i_x, i_g, n_h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.cdiv(GROUP, BLOCK_H)
    i_t, i_h = i_x // n_h, i_x % n_h
    o_h = i_h * BLOCK_H + tl.arange(0, BLOCK_H)
    m_h = o_h < GROUP
    o_head = i_g * GROUP + o_h
    o_d, o_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    m_d, m_v = o_d < DIM, o_v < DIM_V
    p_q = q + i_t * stride_qt + o_head[:, None] * stride_qh
    b_q = tl.load(p_q + o_d[None, :], mask=m_h[:, None] & m_d[None, :], other=0.0)
    if BLOCK_R > 0:
        o_r = BLOCK_D + tl.arange(0, BLOCK_R)
        m_r = o_r < DIM
        b_qr = tl.load(p_q + o_r[None, :], mask=m_h[:, None] & m_r[None, :], other=0.0)
        b_dqr = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
    p_do = dout + i_t * stride_dt + o_head[:, None] * stride_dh + o_v[None, :]
    b_do = tl.load(p_do, mask=m_h[:, None] & m_v[None, :], other=0.0)  # [BLOCK_H, BLOCK_V]
    b_lse = tl.load(lse + i_t * num_heads_q + o_head, mask=m_h, other=float("-inf"))
    b_lse = tl.where(b_lse > float("-inf"), b_lse, float("inf"))  # no key: p = exp(-inf)
    b_delta = tl.load(delta + i_t * num_heads_q + o_head, mask=m_h, other=0.0)
    b_dq = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    p_index = index + (i_g * total_q + i_t) * topk
    for i_n in range(0, topk, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        b_i = tl.load(p_index + o_n, mask=o_n < topk, other=-1).to(tl.int64)
        m_n = (b_i >= 0) & (b_i < total_k)
        p_k = k + b_i[:, None] * stride_kt + i_g * stride_kh
        b_k = tl.load(p_k + o_d[None, :], mask=m_n[:, None] & m_d[None, :], other=0.0)  # [BLOCK_N, BLOCK_D]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        if BLOCK_R > 0:
            b_kr = tl.load(p_k + o_r[None, :], mask=m_n[:, None] & m_r[None, :], other=0.0)
            b_s = tl.dot(b_qr, tl.trans(b_kr), b_s, input_precision=PRECISION)
        b_p = tl.exp(tl.where(m_n[None, :], b_s * scale, float("-inf")) - b_lse[:, None])  # [BLOCK_H, BLOCK_N]
        p_v = v + b_i[:, None] * stride_vt + i_g * stride_vh + o_v[None, :]
        b_v = tl.load(p_v, mask=m_n[:, None] & m_v[None, :], other=0.0)
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        b_ds = b_p * (b_dp - b_delta[:, None]) * scale
        b_ds = b_ds.to(b_k.dtype)
        b_dq = tl.dot(b_ds, b_k, b_dq, input_precision=PRECISION)
        b_dv = tl.dot(tl.trans(b_p.to(b_do.dtype)), b_do, input_precision=PRECISION)  # [BLOCK_N, BLOCK_V]
        o_row = b_i * num_heads_kv + i_g
        p_dv = dv + o_row[:, None] * DIM_V + o_v[None, :]
        tl.atomic_add(p_dv, b_dv, mask=m_n[:, None] & m_v[None, :], sem="relaxed")
        b_dk = tl.dot(tl.trans(b_ds), b_q, input_precision=PRECISION)
        p_dk = dk + o_row[:, None] * DIM
        tl.atomic_add(p_dk + o_d[None, :], b_dk, mask=m_n[:, None] & m_d[None, :], sem="relaxed")
        if BLOCK_R > 0:
            b_dqr = tl.dot(b_ds, b_kr, b_dqr, input_precision=PRECISION)
            b_dkr = tl.dot(tl.trans(b_ds), b_qr, input_precision=PRECISION)
            tl.atomic_add(p_dk + o_r[None, :], b_dkr, mask=m_n[:, None] & m_r[None, :], sem="relaxed")
    p_dq = dq + (i_t * num_heads_q + o_head)[:, None] * DIM
    tl.store(p_dq + o_d[None, :], b_dq.to(dq.dtype.element_ty), mask=m_h[:, None] & m_d[None, :])
    if BLOCK_R > 0:
        tl.store(p_dq + o_r[None, :], b_dqr.to(dq.dtype.element_ty), mask=m_h[:, None] & m_r[None, :])


def _blocks(group: int, dim: int, dim_v: int, is_backward: bool) -> dict[str, Any]:
    """Tiles by size; chosen so that the accumulators stay within the registers of 4 or 8 warps."""
    power = triton.next_power_of_2(dim)
    # A rest that is much smaller than half of the next power of two gets a tile of its own.
    block_d, block_r = power, 0
    if power > 16 and dim != power and dim - power // 2 <= power // 4:
        block_d = power // 2
        block_r = max(16, triton.next_power_of_2(dim - block_d))
    is_wide = max(dim, dim_v) > 256
    largest_h = 64 if not is_wide else 32 if is_backward else 64
    block_n = (16 if is_backward else 32) if is_wide else (32 if is_backward else 64)
    return dict(
        BLOCK_D=max(16, block_d),
        BLOCK_R=block_r,
        BLOCK_V=max(16, triton.next_power_of_2(dim_v)),
        BLOCK_H=min(largest_h, max(16, triton.next_power_of_2(group))),
        BLOCK_N=block_n,
        num_warps=8 if is_wide else 4,
        num_stages=2 if is_wide or is_backward else 3,
    )


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"  # no effect on 16-bit tiles


def forward(q: Tensor, k: Tensor, v: Tensor, index: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """``(out, lse)``; last dims of q, k, v contiguous, ``index (num_heads_kv, total_q, topk)`` int32 contiguous."""
    (total_q, heads, dim), (total_k, heads_kv, dim_v) = q.shape, v.shape
    out = torch.empty((total_q, heads, dim_v), dtype=q.dtype, device=q.device)
    lse = torch.empty((total_q, heads), dtype=torch.float32, device=q.device)
    if total_q == 0:
        return out, lse
    group = heads // heads_kv
    blocks = _blocks(group, dim, dim_v, is_backward=False)
    dsa_fwd_kernel[(triton.cdiv(group, blocks["BLOCK_H"]) * total_q, heads_kv)](
        *(q, k, v, index, out, lse, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        *(total_q, total_k, index.shape[2], heads, scale),
        GROUP=group,
        DIM=dim,
        DIM_V=dim_v,
        PRECISION=_precision(q.dtype),
        **blocks,
    )
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, index: Tensor, lse: Tensor, delta: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` in the dtypes of q, k, v; ``lse`` and ``delta (total_q, num_heads_q)`` float32 contiguous."""
    (total_q, heads, dim), (total_k, heads_kv, dim_v) = q.shape, v.shape
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    if total_q > 0:
        group = heads // heads_kv
        blocks = _blocks(group, dim, dim_v, is_backward=True)
        dsa_bwd_kernel[(triton.cdiv(group, blocks["BLOCK_H"]) * total_q, heads_kv)](
            *(q, k, v, index, dout, lse, delta, dq, dk, dv, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
            *(*dout.stride()[:2], total_q, total_k, index.shape[2], heads, heads_kv, scale),
            GROUP=group,
            DIM=dim,
            DIM_V=dim_v,
            PRECISION=_precision(q.dtype),
            **blocks,
        )
    return dq, dk.to(k.dtype), dv.to(v.dtype)
