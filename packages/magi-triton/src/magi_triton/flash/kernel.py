"""Kernels of softmax attention.

out[m] = sum_n exp(s[m,n] - lse[m]) v[n],  s = softcap(softmax_scale * q k^T) on visible pairs.

Online softmax in base 2 (Milakov & Gimelshein, arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691). The running
maximum is of unscaled products: one fused multiply-add scales and subtracts. Key tiles that a query tile sees whole
skip the mask. The backward sums dk and dv of a group of query heads in registers: no atomics, no rounding before the
sum. Strides are (batch, head, row) in elements; the last tensor dim is contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.kernel import (
    LN2,
    LOG2E,
    dot,
    dot_add,
    key_tiles,
    load_rows,
    log2_sum,
    query_tiles,
    see,
    store_rows,
    tanh,
    wide,
)


@triton.jit
def logits(b_s, scale, softcap, SOFTCAP: tl.constexpr, SCALE_FIRST: tl.constexpr):
    """Logits whose base-2 form is ``logits * factor(...)``."""
    if SOFTCAP:
        return tanh(b_s * (scale / softcap)) * softcap
    elif SCALE_FIRST:  # a scale that is not positive: maxima of raw products are not maxima of logits
        return b_s * scale
    else:
        return b_s


@triton.jit
def factor(scale, SOFTCAP: tl.constexpr, SCALE_FIRST: tl.constexpr):
    """Factor from :func:`logits` to base 2."""
    if SOFTCAP or SCALE_FIRST:
        return 1.0 * LOG2E
    else:
        return scale * LOG2E


@triton.jit
def keep(seed, offset, i_bh, o_m, o_n, size_m, size_n, dropout_p):
    """Dropout's keep mask: element (b, h, m, n) has index offset + ((b H + h) M + m) N + n. Broadcasts."""
    o_e = offset + (i_bh * size_m + o_m.to(tl.int64)) * size_n + o_n
    return tl.rand(seed, o_e, n_rounds=6) > dropout_p


@triton.jit
def sequence(i_b, seqlen_q, seqlen_k, cu_q, cu_k, VARLEN: tl.constexpr):
    """(index of batch, first row, first key, rows, keys) of one sequence; packed sequences share batch 0."""
    if VARLEN:
        q0 = tl.load(cu_q + i_b).to(tl.int64)
        k0 = tl.load(cu_k + i_b).to(tl.int64)
        num_q = (tl.load(cu_q + i_b + 1) - q0).to(tl.int32)
        num_k = (tl.load(cu_k + i_b + 1) - k0).to(tl.int32)
        return i_b * 0, q0, k0, num_q, num_k
    else:
        return i_b, i_b * 0, i_b * 0, seqlen_q, seqlen_k


@triton.jit
def fwd_steps(b_acc, b_l, b_m, b_q, k, v, stride_k, stride_v, lo, hi, o_m, o_d, seqlen_k, shift, left, right,
              scale, softcap, seed, offset, i_bh, size_m, size_n, dropout_p,
              HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
              HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, SCALE_FIRST: tl.constexpr,
              DROPOUT: tl.constexpr):  # fmt: skip
    """Key tiles [lo, hi) of one query tile."""
    o_t = tl.arange(0, BLOCK_N)
    to_log2 = factor(scale, SOFTCAP, SCALE_FIRST)
    for n in range(lo, hi, BLOCK_N):
        i_n = wide(n)
        b_k = load_rows(k + i_n * stride_k, o_t, stride_k, seqlen_k - n, o_d, HEAD_DIM, BLOCK_D, MASKED)
        b_s = logits(dot(b_q, tl.trans(b_k)), scale, softcap, SOFTCAP, SCALE_FIRST)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            m_s = see(o_m[:, None], (n + o_t)[None, :], seqlen_k, shift, left, right, HAS_LEFT, HAS_RIGHT)
            b_s = tl.where(m_s, b_s, -float("inf"))
        b_new = tl.maximum(b_m, tl.max(b_s, 1))
        if MASKED:
            b_base = tl.where(b_new == -float("inf"), 0.0, b_new) * to_log2
        else:
            b_base = b_new * to_log2
        b_alpha = tl.exp2(b_m * to_log2 - b_base)
        b_p = tl.exp2(b_s * to_log2 - b_base[:, None])
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        if DROPOUT:
            m_p = keep(seed, offset, i_bh, o_m[:, None], (n + o_t)[None, :], size_m, size_n, dropout_p)
            b_p = tl.where(m_p, b_p, 0.0)
        b_v = load_rows(v + i_n * stride_v, o_t, stride_v, seqlen_k - n, o_d, HEAD_DIM, BLOCK_D, MASKED)
        b_acc = b_acc * b_alpha[:, None]
        b_acc = dot_add(b_p.to(b_v.dtype), b_v, b_acc)
        b_m = b_new
    return b_acc, b_l, b_m


@triton.jit(do_not_specialize=["left", "right", "seed", "offset"])
def attn_fwd_kernel(q, k, v, sink, out, out32, lse, cu_q, cu_k, st_q, st_k, st_v, st_out, st_out32,
                    num_heads_q, group, rows_lse, seqlen_q, seqlen_k, scale, softcap, left, right,
                    dropout_p, seed, offset,
                    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                    VARLEN: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
                    SCALE_FIRST: tl.constexpr, DROPOUT: tl.constexpr, HAS_SINK: tl.constexpr,
                    HAS_OUT32: tl.constexpr):  # fmt: skip
    """out and lse of one (query tile, query head, sequence). Later rows, which see more under a causal mask, first."""
    i_m = tl.num_programs(0) - 1 - tl.program_id(0)
    i_h, i_z = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_b, q0, k0, num_q, num_k = sequence(i_z, seqlen_q, seqlen_k, cu_q, cu_k, VARLEN)
    m_lo = i_m * BLOCK_M
    if m_lo >= num_q:
        return
    shift = num_k - num_q
    o_r, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    o_m = m_lo + o_r
    q_row = q0 + m_lo
    b_q = load_rows(q + i_b * st_q[0] + i_h * st_q[1] + q_row * st_q[2], o_r, st_q[2], num_q - m_lo, o_d,
                    HEAD_DIM, BLOCK_D, True)  # fmt: skip
    k += i_b * st_k[0] + (i_h // group) * st_k[1] + k0 * st_k[2]
    v += i_b * st_v[0] + (i_h // group) * st_v[1] + k0 * st_v[2]
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    i_bh = i_z * num_heads_q + i_h
    lo, full_lo, full_hi, hi = key_tiles(m_lo, tl.minimum(m_lo + BLOCK_M, num_q), num_k, shift, left, right,
                                         HAS_LEFT, HAS_RIGHT, BLOCK_N)  # fmt: skip
    if HAS_LEFT:
        b_acc, b_l, b_m = fwd_steps(b_acc, b_l, b_m, b_q, k, v, st_k[2], st_v[2], lo, full_lo, o_m, o_d, num_k, shift,
                                    left, right, scale, softcap, seed, offset, i_bh, seqlen_q, seqlen_k, dropout_p,
                                    HEAD_DIM, BLOCK_D, BLOCK_N, True, HAS_LEFT, HAS_RIGHT, SOFTCAP, SCALE_FIRST,
                                    DROPOUT)  # fmt: skip
    b_acc, b_l, b_m = fwd_steps(b_acc, b_l, b_m, b_q, k, v, st_k[2], st_v[2], full_lo, full_hi, o_m, o_d, num_k, shift,
                                left, right, scale, softcap, seed, offset, i_bh, seqlen_q, seqlen_k, dropout_p,
                                HEAD_DIM, BLOCK_D, BLOCK_N, False, HAS_LEFT, HAS_RIGHT, SOFTCAP, SCALE_FIRST,
                                DROPOUT)  # fmt: skip
    b_acc, b_l, b_m = fwd_steps(b_acc, b_l, b_m, b_q, k, v, st_k[2], st_v[2], full_hi, hi, o_m, o_d, num_k, shift,
                                left, right, scale, softcap, seed, offset, i_bh, seqlen_q, seqlen_k, dropout_p,
                                HEAD_DIM, BLOCK_D, BLOCK_N, True, HAS_LEFT, HAS_RIGHT, SOFTCAP, SCALE_FIRST,
                                DROPOUT)  # fmt: skip
    m_any = b_l > 0
    b_lse2 = tl.where(m_any, b_m * factor(scale, SOFTCAP, SCALE_FIRST) + tl.log2(tl.where(m_any, b_l, 1.0)), b_m)
    b_norm = 1.0 / tl.where(m_any, b_l, 1.0)
    if HAS_SINK:
        b_sink = tl.load(sink + i_h).to(tl.float32) * LOG2E
        b_total = log2_sum(b_lse2, b_sink)
        b_norm = tl.where(m_any, b_norm * tl.exp2(tl.where(m_any, b_lse2, 0.0) - tl.where(m_any, b_total, 0.0)), 0.0)
        b_lse2 = b_total
    if DROPOUT:
        b_norm = b_norm / (1.0 - dropout_p)
    b_acc = b_acc * b_norm[:, None]
    store_rows(out + i_b * st_out[0] + i_h * st_out[1] + q_row * st_out[2], o_r, st_out[2], num_q - m_lo, o_d, b_acc,
               HEAD_DIM)  # fmt: skip
    if HAS_OUT32:
        store_rows(out32 + i_b * st_out32[0] + i_h * st_out32[1] + q_row * st_out32[2], o_r, st_out32[2], num_q - m_lo,
                   o_d, b_acc, HEAD_DIM)  # fmt: skip
    tl.store(lse + (i_b * num_heads_q + i_h) * rows_lse + q_row + o_r, b_lse2 * LN2, mask=o_m < num_q)


@triton.jit
def attn_delta_kernel(out, dout, dlse, delta, st_out, st_dout, st_dlse, num_heads, num_rows,
                      HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
                      HAS_DLSE: tl.constexpr):  # fmt: skip
    """delta[m] = sum_d out[m,d] dout[m,d] - dlse[m]; rows of a batch and head, whatever sequence they are of."""
    m_lo = tl.program_id(0).to(tl.int64) * BLOCK_M
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_r, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    left = num_rows - m_lo
    b_o = load_rows(out + i_b * st_out[0] + i_h * st_out[1] + m_lo * st_out[2], o_r, st_out[2], left, o_d,
                    HEAD_DIM, BLOCK_D, True).to(tl.float32)  # fmt: skip
    b_do = load_rows(dout + i_b * st_dout[0] + i_h * st_dout[1] + m_lo * st_dout[2], o_r, st_dout[2], left, o_d,
                     HEAD_DIM, BLOCK_D, True).to(tl.float32)  # fmt: skip
    b_delta = tl.sum(b_o * b_do, 1)
    if HAS_DLSE:
        p_dlse = dlse + i_b * st_dlse[0] + i_h * st_dlse[1] + (m_lo + o_r) * st_dlse[2]
        b_delta -= tl.load(p_dlse, mask=o_r < left, other=0.0)
    tl.store(delta + (i_b * num_heads + i_h) * num_rows + m_lo + o_r, b_delta, mask=o_r < left)


@triton.jit
def load_lse2(lse, o_r, left):
    """lse in base 2; +inf for rows that see nothing or lie past the end, so that exp2(s - lse) is 0 there."""
    b_lse = tl.load(lse + o_r, mask=o_r < left, other=-float("inf")) * LOG2E
    return tl.where(b_lse == -float("inf"), float("inf"), b_lse)


@triton.jit
def dkdv_steps(b_dk, b_dv, b_k, b_v, q, dout, lse, delta, stride_q, stride_do, lo, hi, o_n, o_d, num_q, num_k, shift,
               left, right, scale, softcap, seed, offset, i_bh, size_m, size_n, dropout_p,
               HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr,
               HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, SCALE_FIRST: tl.constexpr,
               DROPOUT: tl.constexpr):  # fmt: skip
    """Query tiles [lo, hi) of one key tile and one query head. Tiles are transposed: [BLOCK_N, BLOCK_M]."""
    o_r = tl.arange(0, BLOCK_M)
    to_log2 = factor(scale, SOFTCAP, SCALE_FIRST)
    for m in range(lo, hi, BLOCK_M):
        i_m = wide(m)
        b_q = load_rows(q + i_m * stride_q, o_r, stride_q, num_q - m, o_d, HEAD_DIM, BLOCK_D, MASKED)
        b_lse = load_lse2(lse + i_m, o_r, num_q - m)
        b_s = logits(dot(b_k, tl.trans(b_q)), scale, softcap, SOFTCAP, SCALE_FIRST)  # [BLOCK_N, BLOCK_M]
        b_x = b_s * to_log2 - b_lse[None, :]
        if MASKED:
            m_s = see((m + o_r)[None, :], o_n[:, None], num_k, shift, left, right, HAS_LEFT, HAS_RIGHT)
            b_x = tl.where(m_s, b_x, -float("inf"))
        b_p = tl.exp2(b_x)
        b_do = load_rows(dout + i_m * stride_do, o_r, stride_do, num_q - m, o_d, HEAD_DIM, BLOCK_D, MASKED)
        b_delta = tl.load(delta + i_m + o_r, mask=o_r < num_q - m, other=0.0)
        b_dp = dot(b_v, tl.trans(b_do))  # [BLOCK_N, BLOCK_M]
        if DROPOUT:
            m_p = keep(seed, offset, i_bh, (m + o_r)[None, :], o_n[:, None], size_m, size_n, dropout_p)
            b_kept = tl.where(m_p, b_p / (1.0 - dropout_p), 0.0)
            b_dp = tl.where(m_p, b_dp / (1.0 - dropout_p), 0.0)
            b_dv = dot_add(b_kept.to(b_do.dtype), b_do, b_dv)
        else:
            b_dv = dot_add(b_p.to(b_do.dtype), b_do, b_dv)
        b_ds = b_p * (b_dp - b_delta[None, :])
        if SOFTCAP:
            b_ds = b_ds * (1.0 - (b_s / softcap) * (b_s / softcap))
        b_dk = dot_add(b_ds.to(b_q.dtype), b_q, b_dk)
    return b_dk, b_dv


@triton.jit(do_not_specialize=["left", "right", "seed", "offset"])
def attn_bwd_dkdv_kernel(q, k, v, dout, lse, delta, dk, dv, cu_q, cu_k, st_q, st_k, st_v, st_do, st_dk, st_dv,
                         num_heads_q, group, rows_lse, seqlen_q, seqlen_k, scale, softcap, left, right,
                         dropout_p, seed, offset,
                         HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                         VARLEN: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
                         SCALE_FIRST: tl.constexpr, DROPOUT: tl.constexpr):  # fmt: skip
    """dk and dv of one (key tile, kv head, sequence): a loop over the query heads of the group, then query tiles."""
    i_h, i_z = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_b, q0, k0, num_q, num_k = sequence(i_z, seqlen_q, seqlen_k, cu_q, cu_k, VARLEN)
    n_lo = tl.program_id(0) * BLOCK_N
    if n_lo >= num_k:
        return
    shift = num_k - num_q
    o_t, o_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    o_n = n_lo + o_t
    k_row = k0 + n_lo
    b_k = load_rows(k + i_b * st_k[0] + i_h * st_k[1] + k_row * st_k[2], o_t, st_k[2], num_k - n_lo, o_d,
                    HEAD_DIM, BLOCK_D, True)  # fmt: skip
    b_v = load_rows(v + i_b * st_v[0] + i_h * st_v[1] + k_row * st_v[2], o_t, st_v[2], num_k - n_lo, o_d,
                    HEAD_DIM, BLOCK_D, True)  # fmt: skip
    b_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    lo, full_lo, full_hi, hi = query_tiles(n_lo, n_lo + BLOCK_N, num_q, num_k, shift, left, right,
                                           HAS_LEFT, HAS_RIGHT, BLOCK_M)  # fmt: skip
    for g in range(group):
        i_q = i_h * group + g
        i_bh = i_z * num_heads_q + i_q
        p_q = q + i_b * st_q[0] + i_q * st_q[1] + q0 * st_q[2]
        p_do = dout + i_b * st_do[0] + i_q * st_do[1] + q0 * st_do[2]
        row = (i_b * num_heads_q + i_q) * rows_lse + q0
        if HAS_RIGHT:
            b_dk, b_dv = dkdv_steps(b_dk, b_dv, b_k, b_v, p_q, p_do, lse + row, delta + row, st_q[2], st_do[2],
                                    lo, tl.minimum(full_lo, hi), o_n, o_d, num_q, num_k, shift, left, right, scale,
                                    softcap, seed, offset, i_bh, seqlen_q, seqlen_k, dropout_p, HEAD_DIM, BLOCK_D,
                                    BLOCK_M, True, HAS_LEFT, HAS_RIGHT, SOFTCAP, SCALE_FIRST, DROPOUT)  # fmt: skip
        b_dk, b_dv = dkdv_steps(b_dk, b_dv, b_k, b_v, p_q, p_do, lse + row, delta + row, st_q[2], st_do[2],
                                full_lo, full_hi, o_n, o_d, num_q, num_k, shift, left, right, scale,
                                softcap, seed, offset, i_bh, seqlen_q, seqlen_k, dropout_p, HEAD_DIM, BLOCK_D,
                                BLOCK_M, False, HAS_LEFT, HAS_RIGHT, SOFTCAP, SCALE_FIRST, DROPOUT)  # fmt: skip
        b_dk, b_dv = dkdv_steps(b_dk, b_dv, b_k, b_v, p_q, p_do, lse + row, delta + row, st_q[2], st_do[2],
                                full_hi, hi, o_n, o_d, num_q, num_k, shift, left, right, scale,
                                softcap, seed, offset, i_bh, seqlen_q, seqlen_k, dropout_p, HEAD_DIM, BLOCK_D,
                                BLOCK_M, True, HAS_LEFT, HAS_RIGHT, SOFTCAP, SCALE_FIRST, DROPOUT)  # fmt: skip
    store_rows(dk + i_b * st_dk[0] + i_h * st_dk[1] + k_row * st_dk[2], o_t, st_dk[2], num_k - n_lo, o_d, b_dk * scale,
               HEAD_DIM)  # fmt: skip
    store_rows(dv + i_b * st_dv[0] + i_h * st_dv[1] + k_row * st_dv[2], o_t, st_dv[2], num_k - n_lo, o_d, b_dv,
               HEAD_DIM)  # fmt: skip


@triton.jit
def dq_steps(b_dq, b_q, b_do, b_lse, b_delta, k, v, stride_k, stride_v, lo, hi, o_m, o_d, num_k, shift, left, right,
             scale, softcap, seed, offset, i_bh, size_m, size_n, dropout_p,
             HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
             HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, SCALE_FIRST: tl.constexpr,
             DROPOUT: tl.constexpr):  # fmt: skip
    """Key tiles [lo, hi) of one query tile."""
    o_t = tl.arange(0, BLOCK_N)
    to_log2 = factor(scale, SOFTCAP, SCALE_FIRST)
    for n in range(lo, hi, BLOCK_N):
        i_n = wide(n)
        b_k = load_rows(k + i_n * stride_k, o_t, stride_k, num_k - n, o_d, HEAD_DIM, BLOCK_D, MASKED)
        b_v = load_rows(v + i_n * stride_v, o_t, stride_v, num_k - n, o_d, HEAD_DIM, BLOCK_D, MASKED)
        b_s = logits(dot(b_q, tl.trans(b_k)), scale, softcap, SOFTCAP, SCALE_FIRST)  # [BLOCK_M, BLOCK_N]
        b_x = b_s * to_log2 - b_lse[:, None]
        if MASKED:
            m_s = see(o_m[:, None], (n + o_t)[None, :], num_k, shift, left, right, HAS_LEFT, HAS_RIGHT)
            b_x = tl.where(m_s, b_x, -float("inf"))
        b_p = tl.exp2(b_x)
        b_dp = dot(b_do, tl.trans(b_v))
        if DROPOUT:
            m_p = keep(seed, offset, i_bh, o_m[:, None], (n + o_t)[None, :], size_m, size_n, dropout_p)
            b_dp = tl.where(m_p, b_dp / (1.0 - dropout_p), 0.0)
        b_ds = b_p * (b_dp - b_delta[:, None])
        if SOFTCAP:
            b_ds = b_ds * (1.0 - (b_s / softcap) * (b_s / softcap))
        b_dq = dot_add(b_ds.to(b_k.dtype), b_k, b_dq)
    return b_dq


@triton.jit(do_not_specialize=["left", "right", "seed", "offset"])
def attn_bwd_dq_kernel(q, k, v, dout, lse, delta, dq, cu_q, cu_k, st_q, st_k, st_v, st_do, st_dq,
                       num_heads_q, group, rows_lse, seqlen_q, seqlen_k, scale, softcap, left, right,
                       dropout_p, seed, offset,
                       HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                       VARLEN: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
                       SCALE_FIRST: tl.constexpr, DROPOUT: tl.constexpr):  # fmt: skip
    """dq of one (query tile, query head, sequence)."""
    i_m = tl.num_programs(0) - 1 - tl.program_id(0)
    i_h, i_z = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_b, q0, k0, num_q, num_k = sequence(i_z, seqlen_q, seqlen_k, cu_q, cu_k, VARLEN)
    m_lo = i_m * BLOCK_M
    if m_lo >= num_q:
        return
    shift = num_k - num_q
    o_r, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    o_m = m_lo + o_r
    q_row = q0 + m_lo
    b_q = load_rows(q + i_b * st_q[0] + i_h * st_q[1] + q_row * st_q[2], o_r, st_q[2], num_q - m_lo, o_d,
                    HEAD_DIM, BLOCK_D, True)  # fmt: skip
    b_do = load_rows(dout + i_b * st_do[0] + i_h * st_do[1] + q_row * st_do[2], o_r, st_do[2], num_q - m_lo, o_d,
                     HEAD_DIM, BLOCK_D, True)  # fmt: skip
    k += i_b * st_k[0] + (i_h // group) * st_k[1] + k0 * st_k[2]
    v += i_b * st_v[0] + (i_h // group) * st_v[1] + k0 * st_v[2]
    row = (i_b * num_heads_q + i_h) * rows_lse + q_row
    b_lse = load_lse2(lse + row, o_r, num_q - m_lo)
    b_delta = tl.load(delta + row + o_r, mask=o_m < num_q, other=0.0)
    b_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    i_bh = i_z * num_heads_q + i_h
    lo, full_lo, full_hi, hi = key_tiles(m_lo, tl.minimum(m_lo + BLOCK_M, num_q), num_k, shift, left, right,
                                         HAS_LEFT, HAS_RIGHT, BLOCK_N)  # fmt: skip
    if HAS_LEFT:
        b_dq = dq_steps(b_dq, b_q, b_do, b_lse, b_delta, k, v, st_k[2], st_v[2], lo, full_lo, o_m, o_d, num_k, shift,
                        left, right, scale, softcap, seed, offset, i_bh, seqlen_q, seqlen_k, dropout_p,
                        HEAD_DIM, BLOCK_D, BLOCK_N, True, HAS_LEFT, HAS_RIGHT, SOFTCAP, SCALE_FIRST,
                        DROPOUT)  # fmt: skip
    b_dq = dq_steps(b_dq, b_q, b_do, b_lse, b_delta, k, v, st_k[2], st_v[2], full_lo, full_hi, o_m, o_d, num_k, shift,
                    left, right, scale, softcap, seed, offset, i_bh, seqlen_q, seqlen_k, dropout_p,
                    HEAD_DIM, BLOCK_D, BLOCK_N, False, HAS_LEFT, HAS_RIGHT, SOFTCAP, SCALE_FIRST,
                    DROPOUT)  # fmt: skip
    b_dq = dq_steps(b_dq, b_q, b_do, b_lse, b_delta, k, v, st_k[2], st_v[2], full_hi, hi, o_m, o_d, num_k, shift,
                    left, right, scale, softcap, seed, offset, i_bh, seqlen_q, seqlen_k, dropout_p,
                    HEAD_DIM, BLOCK_D, BLOCK_N, True, HAS_LEFT, HAS_RIGHT, SOFTCAP, SCALE_FIRST, DROPOUT)  # fmt: skip
    store_rows(dq + i_b * st_dq[0] + i_h * st_dq[1] + q_row * st_dq[2], o_r, st_dq[2], num_q - m_lo, o_d, b_dq * scale,
               HEAD_DIM)  # fmt: skip


@triton.jit(do_not_specialize=["left", "right"])
def attn_total_kernel(q, k, lse, total, st_q, st_k, num_heads_q, group, seqlen_q, seqlen_k, scale, softcap, left, right,
                      HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                      HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
                      SCALE_FIRST: tl.constexpr):  # fmt: skip
    """total[n] = sum_m exp(s[m,n] - lse[m]) of one (key tile, query head, batch)."""
    n_lo = tl.program_id(0) * BLOCK_N
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    shift = seqlen_k - seqlen_q
    o_t, o_r, o_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    o_n = n_lo + o_t
    b_k = load_rows(k + i_b * st_k[0] + (i_h // group) * st_k[1] + n_lo.to(tl.int64) * st_k[2], o_t, st_k[2],
                    seqlen_k - n_lo, o_d, HEAD_DIM, BLOCK_D, True)  # fmt: skip
    q += i_b * st_q[0] + i_h * st_q[1]
    lse += (i_b * num_heads_q + i_h) * seqlen_q
    b_total = tl.zeros([BLOCK_N], tl.float32)
    to_log2 = factor(scale, SOFTCAP, SCALE_FIRST)
    lo, _, _, hi = query_tiles(n_lo, n_lo + BLOCK_N, seqlen_q, seqlen_k, shift, left, right,
                                           HAS_LEFT, HAS_RIGHT, BLOCK_M)  # fmt: skip
    for m in range(lo, hi, BLOCK_M):
        i_m = wide(m)
        b_q = load_rows(q + i_m * st_q[2], o_r, st_q[2], seqlen_q - m, o_d, HEAD_DIM, BLOCK_D, True)
        b_lse = load_lse2(lse + i_m, o_r, seqlen_q - m)
        b_s = logits(dot(b_k, tl.trans(b_q)), scale, softcap, SOFTCAP, SCALE_FIRST)
        m_s = see((m + o_r)[None, :], o_n[:, None], seqlen_k, shift, left, right, HAS_LEFT, HAS_RIGHT)
        b_total += tl.sum(tl.exp2(tl.where(m_s, b_s * to_log2 - b_lse[None, :], -float("inf"))), 1)
    tl.store(total + (i_b * num_heads_q + i_h) * seqlen_k + o_n, b_total, mask=o_n < seqlen_k)
