"""Kernels of forgetting attention (arXiv:2503.02130).

s[i,j] = softmax_scale q_i.k_j + c_i - c_j on keys start <= j <= i + N - M, with c the running sum of log gates on the
key axis (row i reads c at key i + N - M); then softmax and the product with v. Gradients of c: the sum of dS over a row
goes to c_i, the sum over a column, negated, to c_j. Strides are (batch, head, row); c is contiguous (B, Hq, N).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.kernel import LN2, LOG2E, dot, dot_add, key_tiles, load_rows, see, store_rows, wide
from ..flash.kernel import load_lse2


@triton.jit
def gate_logits(b_s, b_ci, b_cj, scale):
    """Base-2 logits of a tile."""
    return b_s * (scale * LOG2E) + (b_ci - b_cj) * LOG2E


@triton.jit
def forget_fwd_steps(b_acc, b_l, b_m, b_q, b_c, k, v, c, s_k, s_v, lo, hi, o_m, o_d, num_k, shift, start, scale,
                     HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
                     MASKED: tl.constexpr):  # fmt: skip
    """Key tiles [lo, hi) of one query tile."""
    o_t = tl.arange(0, BLOCK_N)
    for n in range(lo, hi, BLOCK_N):
        i_n = wide(n)
        b_k = load_rows(k + i_n * s_k, o_t, s_k, num_k - n, o_d, HEAD_DIM, BLOCK_D, MASKED)
        b_cj = tl.load(c + n + o_t, mask=n + o_t < num_k, other=0.0)
        b_s = gate_logits(dot(b_q, tl.trans(b_k)), b_c[:, None], b_cj[None, :], scale)
        if MASKED:
            m_s = see(o_m[:, None], (n + o_t)[None, :], num_k, shift, 0, 0, False, True) & (n + o_t >= start)[None, :]
            b_s = tl.where(m_s, b_s, -float("inf"))
        b_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_base = b_new
        if MASKED:
            b_base = tl.where(b_new == -float("inf"), 0.0, b_new)
        b_alpha = tl.exp2(b_m - b_base)
        b_p = tl.exp2(b_s - b_base[:, None])
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        b_v = load_rows(v + i_n * s_v, o_t, s_v, num_k - n, o_d, HEAD_DIM, BLOCK_D, MASKED)
        b_acc = dot_add(b_p.to(b_v.dtype), b_v, b_acc * b_alpha[:, None])
        b_m = b_new
    return b_acc, b_l, b_m


@triton.jit
def tile_borders(m_lo, m_hi, num_k, shift, start, BLOCK_N: tl.constexpr):
    """Key offsets (lo, full_lo, full_hi, hi): [full_lo, full_hi) are tiles that every row sees whole."""
    _, _, full_hi, hi = key_tiles(m_lo, m_hi, num_k, shift, 0, 0, False, True, BLOCK_N)
    lo = tl.minimum(start // BLOCK_N * BLOCK_N, (hi + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
    full_lo = tl.minimum((start + BLOCK_N - 1) // BLOCK_N * BLOCK_N, (hi + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
    full_hi = tl.maximum(full_hi, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def forget_fwd_kernel(q, k, v, c, starts, out, lse, st_q, st_k, st_v, st_out, num_heads, group, num_q, num_k, scale,
                      threshold,
                      HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                      HAS_START: tl.constexpr, PRUNE: tl.constexpr):  # fmt: skip
    """out and lse of one (query tile, query head, batch)."""
    m_lo = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    shift = num_k - num_q
    o_r, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    o_m = m_lo + o_r
    row = m_lo.to(tl.int64)
    c += (i_b * num_heads + i_h) * num_k
    b_q = load_rows(q + i_b * st_q[0] + i_h * st_q[1] + row * st_q[2], o_r, st_q[2], num_q - m_lo, o_d,
                    HEAD_DIM, BLOCK_D, True)  # fmt: skip
    b_c = tl.load(c + o_m + shift, mask=o_m < num_q, other=0.0)
    k += i_b * st_k[0] + (i_h // group) * st_k[1]
    v += i_b * st_v[0] + (i_h // group) * st_v[1]
    start = 0
    if HAS_START:
        start = tl.minimum(tl.maximum(tl.load(starts + i_b), 0), num_k).to(tl.int32)
    lo, full_lo, full_hi, hi = tile_borders(m_lo, tl.minimum(m_lo + BLOCK_M, num_q), num_k, shift, start + 0, BLOCK_N)
    if PRUNE:  # gates are not positive: c falls, so the tiles below the threshold come first
        c_first = tl.load(c + m_lo + shift)
        skip = lo
        for n in range(lo, full_hi, BLOCK_N):
            gap = c_first - tl.load(c + n + BLOCK_N - 1)
            skip = tl.where(gap < threshold, n + BLOCK_N, skip)
        lo = tl.maximum(lo, skip)
        full_lo = tl.maximum(full_lo, lo)
        full_hi = tl.maximum(full_hi, full_lo)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    if HAS_START:
        b_acc, b_l, b_m = forget_fwd_steps(b_acc, b_l, b_m, b_q, b_c, k, v, c, st_k[2], st_v[2], lo, full_lo, o_m, o_d,
                                           num_k, shift, start, scale, HEAD_DIM, BLOCK_D, BLOCK_N, True)  # fmt: skip
    b_acc, b_l, b_m = forget_fwd_steps(b_acc, b_l, b_m, b_q, b_c, k, v, c, st_k[2], st_v[2], full_lo, full_hi, o_m, o_d,
                                       num_k, shift, start, scale, HEAD_DIM, BLOCK_D, BLOCK_N, False)  # fmt: skip
    b_acc, b_l, b_m = forget_fwd_steps(b_acc, b_l, b_m, b_q, b_c, k, v, c, st_k[2], st_v[2], full_hi, hi, o_m, o_d,
                                       num_k, shift, start, scale, HEAD_DIM, BLOCK_D, BLOCK_N, True)  # fmt: skip
    m_any = b_l > 0
    b_lse2 = tl.where(m_any, b_m + tl.log2(tl.where(m_any, b_l, 1.0)), -float("inf"))
    b_acc = b_acc / tl.where(m_any, b_l, 1.0)[:, None]
    store_rows(out + i_b * st_out[0] + i_h * st_out[1] + row * st_out[2], o_r, st_out[2], num_q - m_lo, o_d, b_acc,
               HEAD_DIM)  # fmt: skip
    tl.store(lse + (i_b * num_heads + i_h) * num_q + row + o_r, b_lse2 * LN2, mask=o_m < num_q)


@triton.jit
def forget_dq_kernel(q, k, v, c, starts, dout, lse, delta, dq, dc_row, st_q, st_k, st_v, st_do, st_dq, num_heads, group,
                     num_q, num_k, scale,
                     HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                     HAS_START: tl.constexpr):  # fmt: skip
    """dq of one (query tile, query head, batch), and dc_row: the sums of dS over its rows."""
    m_lo = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    shift = num_k - num_q
    o_r, o_d, o_t = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    o_m = m_lo + o_r
    row = m_lo.to(tl.int64)
    left = num_q - m_lo
    c += (i_b * num_heads + i_h) * num_k
    b_q = load_rows(q + i_b * st_q[0] + i_h * st_q[1] + row * st_q[2], o_r, st_q[2], left, o_d, HEAD_DIM, BLOCK_D, True)
    b_do = load_rows(dout + i_b * st_do[0] + i_h * st_do[1] + row * st_do[2], o_r, st_do[2], left, o_d,
                     HEAD_DIM, BLOCK_D, True)  # fmt: skip
    b_c = tl.load(c + o_m + shift, mask=o_m < num_q, other=0.0)
    at = (i_b * num_heads + i_h) * num_q + row
    b_lse = load_lse2(lse + at, o_r, left)
    b_delta = tl.load(delta + at + o_r, mask=o_r < left, other=0.0)
    k += i_b * st_k[0] + (i_h // group) * st_k[1]
    v += i_b * st_v[0] + (i_h // group) * st_v[1]
    start = 0
    if HAS_START:
        start = tl.minimum(tl.maximum(tl.load(starts + i_b), 0), num_k).to(tl.int32)
    lo, _, _, hi = tile_borders(m_lo, tl.minimum(m_lo + BLOCK_M, num_q), num_k, shift, start + 0, BLOCK_N)
    b_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_dc = tl.zeros([BLOCK_M], tl.float32)
    for n in range(lo, hi, BLOCK_N):
        i_n = wide(n)
        b_k = load_rows(k + i_n * st_k[2], o_t, st_k[2], num_k - n, o_d, HEAD_DIM, BLOCK_D, True)
        b_v = load_rows(v + i_n * st_v[2], o_t, st_v[2], num_k - n, o_d, HEAD_DIM, BLOCK_D, True)
        b_cj = tl.load(c + n + o_t, mask=n + o_t < num_k, other=0.0)
        b_s = gate_logits(dot(b_q, tl.trans(b_k)), b_c[:, None], b_cj[None, :], scale)
        m_s = see(o_m[:, None], (n + o_t)[None, :], num_k, shift, 0, 0, False, True) & (n + o_t >= start)[None, :]
        b_p = tl.exp2(tl.where(m_s, b_s - b_lse[:, None], -float("inf")))
        b_ds = b_p * (dot(b_do, tl.trans(b_v)) - b_delta[:, None])
        b_dc += tl.sum(b_ds, 1)
        b_dq = dot_add(b_ds.to(b_k.dtype), b_k, b_dq)
    store_rows(dq + i_b * st_dq[0] + i_h * st_dq[1] + row * st_dq[2], o_r, st_dq[2], left, o_d, b_dq * scale, HEAD_DIM)
    tl.store(dc_row + at + o_r, b_dc, mask=o_r < left)


@triton.jit
def forget_dkdv_kernel(q, k, v, c, starts, dout, lse, delta, dk, dv, dc_col, st_q, st_k, st_v, st_do, st_dk, st_dv,
                       num_heads, group, num_q, num_k, scale,
                       HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                       HAS_START: tl.constexpr):  # fmt: skip
    """dk and dv of one (key tile, kv head, batch), and dc_col: the sums of dS over its columns, per query head."""
    n_lo = tl.program_id(0) * BLOCK_N
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    shift = num_k - num_q
    o_r, o_d, o_t = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    o_n = n_lo + o_t
    row = n_lo.to(tl.int64)
    left = num_k - n_lo
    b_k = load_rows(k + i_b * st_k[0] + i_h * st_k[1] + row * st_k[2], o_t, st_k[2], left, o_d, HEAD_DIM, BLOCK_D, True)
    b_v = load_rows(v + i_b * st_v[0] + i_h * st_v[1] + row * st_v[2], o_t, st_v[2], left, o_d, HEAD_DIM, BLOCK_D, True)
    start = 0
    if HAS_START:
        start = tl.minimum(tl.maximum(tl.load(starts + i_b), 0), num_k).to(tl.int32)
    lo = tl.minimum(tl.maximum(n_lo - shift, 0), num_q) // BLOCK_M * BLOCK_M
    b_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for g in range(group):
        i_q = i_h * group + g
        p_q = q + i_b * st_q[0] + i_q * st_q[1]
        p_do = dout + i_b * st_do[0] + i_q * st_do[1]
        at = (i_b * num_heads + i_q) * num_q
        p_c = c + (i_b * num_heads + i_q) * num_k
        b_cj = tl.load(p_c + o_n, mask=o_n < num_k, other=0.0)
        b_dc = tl.zeros([BLOCK_N], tl.float32)
        for m in range(lo, num_q, BLOCK_M):
            i_m = wide(m)
            b_q = load_rows(p_q + i_m * st_q[2], o_r, st_q[2], num_q - m, o_d, HEAD_DIM, BLOCK_D, True)
            b_do = load_rows(p_do + i_m * st_do[2], o_r, st_do[2], num_q - m, o_d, HEAD_DIM, BLOCK_D, True)
            b_lse = load_lse2(lse + at + i_m, o_r, num_q - m)
            b_delta = tl.load(delta + at + i_m + o_r, mask=o_r < num_q - m, other=0.0)
            b_c = tl.load(p_c + m + shift + o_r, mask=m + o_r < num_q, other=0.0)
            b_s = gate_logits(dot(b_k, tl.trans(b_q)), b_c[None, :], b_cj[:, None], scale)  # [BLOCK_N, BLOCK_M]
            m_s = see((m + o_r)[None, :], o_n[:, None], num_k, shift, 0, 0, False, True) & (o_n >= start)[:, None]
            b_p = tl.exp2(tl.where(m_s, b_s - b_lse[None, :], -float("inf")))
            b_dv = dot_add(b_p.to(b_do.dtype), b_do, b_dv)
            b_ds = b_p * (dot(b_v, tl.trans(b_do)) - b_delta[None, :])
            b_dc += tl.sum(b_ds, 1)
            b_dk = dot_add(b_ds.to(b_q.dtype), b_q, b_dk)
        tl.store(dc_col + (i_b * num_heads + i_q) * num_k + o_n, b_dc, mask=o_n < num_k)
    store_rows(dk + i_b * st_dk[0] + i_h * st_dk[1] + row * st_dk[2], o_t, st_dk[2], left, o_d, b_dk * scale, HEAD_DIM)
    store_rows(dv + i_b * st_dv[0] + i_h * st_dv[1] + row * st_dv[2], o_t, st_dv[2], left, o_d, b_dv, HEAD_DIM)
