"""Kernels of piecewise attention (NLPE).

s[m,n] = softmax_scale * (q2 k2^T where m + N - M - n >= threshold, else q1 k1^T); then as softmax attention. The
threshold is data. Tiles that lie wholly on one side evaluate one product; only those that the threshold crosses
evaluate both. Strides are (batch, head, row) in elements. The backward sums the group of query heads in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.kernel import LN2, LOG2E, dot, dot_add, load_rows, see, store_rows, wide
from ..flash.kernel import factor, load_lse2

NEAR = tl.constexpr(1)
FAR = tl.constexpr(2)
BOTH = tl.constexpr(3)


@triton.jit
def tile_borders(m_lo, m_hi, num_k, shift, threshold, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr):
    """Key offsets (far, near, full, hi): tiles [0, far) are far for all rows [m_lo, m_hi), [far, near) are crossed,
    [near, full) are near and seen whole, [full, hi) are near and seen in part."""
    hi = num_k
    full = num_k // BLOCK_N * BLOCK_N
    if CAUSAL:
        hi = tl.minimum(hi, tl.maximum(m_hi + shift, 0))
        full = tl.minimum(full, tl.maximum(m_lo + shift + 1, 0) // BLOCK_N * BLOCK_N)
    # far for every row: n <= m_lo + shift - threshold; near for every row: n > m_hi - 1 + shift - threshold
    far = tl.minimum(tl.maximum(m_lo + shift - threshold + 1, 0) // BLOCK_N * BLOCK_N, full)
    near = (tl.maximum(m_hi + shift - threshold, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    near = tl.maximum(tl.minimum(near, (hi + BLOCK_N - 1) // BLOCK_N * BLOCK_N), far)
    full = tl.maximum(full, near)
    return far, near, full, hi


@triton.jit
def scores(b_q1, b_q2, b_k1, b_k2, o_m, o_n, shift, threshold, SIDE: tl.constexpr):
    """Raw products of one tile, [queries, keys], from the pair of its side."""
    if SIDE == NEAR:
        return dot(b_q1, tl.trans(b_k1))
    elif SIDE == FAR:
        return dot(b_q2, tl.trans(b_k2))
    else:
        m_far = o_m[:, None] + shift - o_n[None, :] >= threshold
        return tl.where(m_far, dot(b_q2, tl.trans(b_k2)), dot(b_q1, tl.trans(b_k1)))


@triton.jit
def fwd_steps(b_acc, b_l, b_m, b_q1, b_q2, k1, k2, v, s_k1, s_k2, s_v, lo, hi, o_m, o_d, num_k, shift, threshold, scale,
              HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SIDE: tl.constexpr,
              MASKED: tl.constexpr, CAUSAL: tl.constexpr, SCALE_FIRST: tl.constexpr):  # fmt: skip
    """Key tiles [lo, hi) of one query tile."""
    o_t = tl.arange(0, BLOCK_N)
    to_log2 = factor(scale, False, SCALE_FIRST)
    for n in range(lo, hi, BLOCK_N):
        i_n = wide(n)
        b_k1 = b_q1
        b_k2 = b_q2
        if SIDE != FAR:
            b_k1 = load_rows(k1 + i_n * s_k1, o_t, s_k1, num_k - n, o_d, HEAD_DIM, BLOCK_D, MASKED)
        if SIDE != NEAR:
            b_k2 = load_rows(k2 + i_n * s_k2, o_t, s_k2, num_k - n, o_d, HEAD_DIM, BLOCK_D, MASKED)
        b_s = scores(b_q1, b_q2, b_k1, b_k2, o_m, n + o_t, shift, threshold, SIDE)
        if SCALE_FIRST:
            b_s = b_s * scale
        if MASKED:
            m_s = see(o_m[:, None], (n + o_t)[None, :], num_k, shift, 0, 0, False, CAUSAL)
            b_s = tl.where(m_s, b_s, -float("inf"))
        b_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_base = b_new * to_log2
        if MASKED:
            b_base = tl.where(b_new == -float("inf"), 0.0, b_new) * to_log2
        b_alpha = tl.exp2(b_m * to_log2 - b_base)
        b_p = tl.exp2(b_s * to_log2 - b_base[:, None])
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        b_v = load_rows(v + i_n * s_v, o_t, s_v, num_k - n, o_d, HEAD_DIM, BLOCK_D, MASKED)
        b_acc = dot_add(b_p.to(b_v.dtype), b_v, b_acc * b_alpha[:, None])
        b_m = b_new
    return b_acc, b_l, b_m


@triton.jit(do_not_specialize=["threshold"])
def piecewise_fwd_kernel(q1, k1, q2, k2, v, out, lse, st_q1, st_k1, st_q2, st_k2, st_v, st_out, num_heads, group,
                         num_q, num_k, threshold, scale,
                         HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                         CAUSAL: tl.constexpr, SCALE_FIRST: tl.constexpr):  # fmt: skip
    """out and lse of one (query tile, query head, batch)."""
    m_lo = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    shift = num_k - num_q
    o_r, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    o_m = m_lo + o_r
    row = m_lo.to(tl.int64)
    b_q1 = load_rows(q1 + i_b * st_q1[0] + i_h * st_q1[1] + row * st_q1[2], o_r, st_q1[2], num_q - m_lo, o_d,
                     HEAD_DIM, BLOCK_D, True)  # fmt: skip
    b_q2 = load_rows(q2 + i_b * st_q2[0] + i_h * st_q2[1] + row * st_q2[2], o_r, st_q2[2], num_q - m_lo, o_d,
                     HEAD_DIM, BLOCK_D, True)  # fmt: skip
    i_kv = i_h // group
    k1 += i_b * st_k1[0] + i_kv * st_k1[1]
    k2 += i_b * st_k2[0] + i_kv * st_k2[1]
    v += i_b * st_v[0] + i_kv * st_v[1]
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    far, near, full, hi = tile_borders(m_lo, tl.minimum(m_lo + BLOCK_M, num_q), num_k, shift, threshold, CAUSAL,
                                       BLOCK_N)  # fmt: skip
    b_acc, b_l, b_m = fwd_steps(b_acc, b_l, b_m, b_q1, b_q2, k1, k2, v, st_k1[2], st_k2[2], st_v[2], 0, far, o_m, o_d,
                                num_k, shift, threshold, scale, HEAD_DIM, BLOCK_D, BLOCK_N, FAR, False, CAUSAL,
                                SCALE_FIRST)  # fmt: skip
    b_acc, b_l, b_m = fwd_steps(b_acc, b_l, b_m, b_q1, b_q2, k1, k2, v, st_k1[2], st_k2[2], st_v[2], far, near, o_m,
                                o_d, num_k, shift, threshold, scale, HEAD_DIM, BLOCK_D, BLOCK_N, BOTH, True, CAUSAL,
                                SCALE_FIRST)  # fmt: skip
    b_acc, b_l, b_m = fwd_steps(b_acc, b_l, b_m, b_q1, b_q2, k1, k2, v, st_k1[2], st_k2[2], st_v[2], near, full, o_m,
                                o_d, num_k, shift, threshold, scale, HEAD_DIM, BLOCK_D, BLOCK_N, NEAR, False, CAUSAL,
                                SCALE_FIRST)  # fmt: skip
    b_acc, b_l, b_m = fwd_steps(b_acc, b_l, b_m, b_q1, b_q2, k1, k2, v, st_k1[2], st_k2[2], st_v[2], full, hi, o_m,
                                o_d, num_k, shift, threshold, scale, HEAD_DIM, BLOCK_D, BLOCK_N, NEAR, True, CAUSAL,
                                SCALE_FIRST)  # fmt: skip
    m_any = b_l > 0
    b_lse2 = tl.where(m_any, b_m * factor(scale, False, SCALE_FIRST) + tl.log2(tl.where(m_any, b_l, 1.0)), b_m)
    b_acc = b_acc / tl.where(m_any, b_l, 1.0)[:, None]
    store_rows(out + i_b * st_out[0] + i_h * st_out[1] + row * st_out[2], o_r, st_out[2], num_q - m_lo, o_d, b_acc,
               HEAD_DIM)  # fmt: skip
    tl.store(lse + (i_b * num_heads + i_h) * num_q + row + o_r, b_lse2 * LN2, mask=o_m < num_q)


@triton.jit
def dq_steps(b_dq1, b_dq2, b_q1, b_q2, b_do, b_lse, b_delta, k1, k2, v, s_k1, s_k2, s_v, lo, hi, o_m, o_d, num_k, shift,
             threshold, scale,
             HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SIDE: tl.constexpr,
             MASKED: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """Key tiles [lo, hi) of one query tile."""
    o_t = tl.arange(0, BLOCK_N)
    for n in range(lo, hi, BLOCK_N):
        i_n = wide(n)
        b_k1 = b_q1
        b_k2 = b_q2
        if SIDE != FAR:
            b_k1 = load_rows(k1 + i_n * s_k1, o_t, s_k1, num_k - n, o_d, HEAD_DIM, BLOCK_D, MASKED)
        if SIDE != NEAR:
            b_k2 = load_rows(k2 + i_n * s_k2, o_t, s_k2, num_k - n, o_d, HEAD_DIM, BLOCK_D, MASKED)
        b_v = load_rows(v + i_n * s_v, o_t, s_v, num_k - n, o_d, HEAD_DIM, BLOCK_D, MASKED)
        b_s = scores(b_q1, b_q2, b_k1, b_k2, o_m, n + o_t, shift, threshold, SIDE)
        b_x = b_s * (scale * LOG2E) - b_lse[:, None]
        if MASKED:
            m_s = see(o_m[:, None], (n + o_t)[None, :], num_k, shift, 0, 0, False, CAUSAL)
            b_x = tl.where(m_s, b_x, -float("inf"))
        b_p = tl.exp2(b_x)
        b_ds = b_p * (dot(b_do, tl.trans(b_v)) - b_delta[:, None])
        if SIDE == NEAR:
            b_dq1 = dot_add(b_ds.to(b_q1.dtype), b_k1, b_dq1)
        elif SIDE == FAR:
            b_dq2 = dot_add(b_ds.to(b_q1.dtype), b_k2, b_dq2)
        else:
            m_far = o_m[:, None] + shift - (n + o_t)[None, :] >= threshold
            b_dq1 = dot_add(tl.where(m_far, 0.0, b_ds).to(b_q1.dtype), b_k1, b_dq1)
            b_dq2 = dot_add(tl.where(m_far, b_ds, 0.0).to(b_q1.dtype), b_k2, b_dq2)
    return b_dq1, b_dq2


@triton.jit(do_not_specialize=["threshold"])
def piecewise_dq_kernel(q1, k1, q2, k2, v, dout, lse, delta, dq1, dq2, st_q1, st_k1, st_q2, st_k2, st_v, st_do, st_dq1,
                        st_dq2, num_heads, group, num_q, num_k, threshold, scale,
                        HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                        CAUSAL: tl.constexpr):  # fmt: skip
    """dq1 and dq2 of one (query tile, query head, batch)."""
    m_lo = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    shift = num_k - num_q
    o_r, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    o_m = m_lo + o_r
    row = m_lo.to(tl.int64)
    left = num_q - m_lo
    b_q1 = load_rows(q1 + i_b * st_q1[0] + i_h * st_q1[1] + row * st_q1[2], o_r, st_q1[2], left, o_d,
                     HEAD_DIM, BLOCK_D, True)  # fmt: skip
    b_q2 = load_rows(q2 + i_b * st_q2[0] + i_h * st_q2[1] + row * st_q2[2], o_r, st_q2[2], left, o_d,
                     HEAD_DIM, BLOCK_D, True)  # fmt: skip
    b_do = load_rows(dout + i_b * st_do[0] + i_h * st_do[1] + row * st_do[2], o_r, st_do[2], left, o_d,
                     HEAD_DIM, BLOCK_D, True)  # fmt: skip
    i_kv = i_h // group
    k1 += i_b * st_k1[0] + i_kv * st_k1[1]
    k2 += i_b * st_k2[0] + i_kv * st_k2[1]
    v += i_b * st_v[0] + i_kv * st_v[1]
    at = (i_b * num_heads + i_h) * num_q + row
    b_lse = load_lse2(lse + at, o_r, left)
    b_delta = tl.load(delta + at + o_r, mask=o_r < left, other=0.0)
    b_dq1 = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_dq2 = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    far, near, full, hi = tile_borders(m_lo, tl.minimum(m_lo + BLOCK_M, num_q), num_k, shift, threshold, CAUSAL,
                                       BLOCK_N)  # fmt: skip
    b_dq1, b_dq2 = dq_steps(b_dq1, b_dq2, b_q1, b_q2, b_do, b_lse, b_delta, k1, k2, v, st_k1[2], st_k2[2], st_v[2],
                            0, far, o_m, o_d, num_k, shift, threshold, scale, HEAD_DIM, BLOCK_D, BLOCK_N, FAR, False,
                            CAUSAL)  # fmt: skip
    b_dq1, b_dq2 = dq_steps(b_dq1, b_dq2, b_q1, b_q2, b_do, b_lse, b_delta, k1, k2, v, st_k1[2], st_k2[2], st_v[2],
                            far, near, o_m, o_d, num_k, shift, threshold, scale, HEAD_DIM, BLOCK_D, BLOCK_N, BOTH, True,
                            CAUSAL)  # fmt: skip
    b_dq1, b_dq2 = dq_steps(b_dq1, b_dq2, b_q1, b_q2, b_do, b_lse, b_delta, k1, k2, v, st_k1[2], st_k2[2], st_v[2],
                            near, full, o_m, o_d, num_k, shift, threshold, scale, HEAD_DIM, BLOCK_D, BLOCK_N, NEAR,
                            False, CAUSAL)  # fmt: skip
    b_dq1, b_dq2 = dq_steps(b_dq1, b_dq2, b_q1, b_q2, b_do, b_lse, b_delta, k1, k2, v, st_k1[2], st_k2[2], st_v[2],
                            full, hi, o_m, o_d, num_k, shift, threshold, scale, HEAD_DIM, BLOCK_D, BLOCK_N, NEAR, True,
                            CAUSAL)  # fmt: skip
    store_rows(dq1 + i_b * st_dq1[0] + i_h * st_dq1[1] + row * st_dq1[2], o_r, st_dq1[2], left, o_d, b_dq1 * scale,
               HEAD_DIM)  # fmt: skip
    store_rows(dq2 + i_b * st_dq2[0] + i_h * st_dq2[1] + row * st_dq2[2], o_r, st_dq2[2], left, o_d, b_dq2 * scale,
               HEAD_DIM)  # fmt: skip


@triton.jit
def dkdv_steps(b_dk1, b_dk2, b_dv, b_k1, b_k2, b_v, q1, q2, dout, lse, delta, s_q1, s_q2, s_do, lo, hi, o_n, o_d, num_q,
               num_k, shift, threshold, scale,
               HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, SIDE: tl.constexpr,
               CAUSAL: tl.constexpr):  # fmt: skip
    """Query tiles [lo, hi) of one key tile and one query head; tiles are transposed: [BLOCK_N, BLOCK_M]."""
    o_r = tl.arange(0, BLOCK_M)
    for m in range(lo, hi, BLOCK_M):
        i_m = wide(m)
        left = num_q - m
        b_q1 = b_k1
        b_q2 = b_k2
        if SIDE != FAR:
            b_q1 = load_rows(q1 + i_m * s_q1, o_r, s_q1, left, o_d, HEAD_DIM, BLOCK_D, True)
        if SIDE != NEAR:
            b_q2 = load_rows(q2 + i_m * s_q2, o_r, s_q2, left, o_d, HEAD_DIM, BLOCK_D, True)
        m_far = (m + o_r)[None, :] + shift - o_n[:, None] >= threshold
        if SIDE == NEAR:
            b_s = dot(b_k1, tl.trans(b_q1))
        elif SIDE == FAR:
            b_s = dot(b_k2, tl.trans(b_q2))
        else:
            b_s = tl.where(m_far, dot(b_k2, tl.trans(b_q2)), dot(b_k1, tl.trans(b_q1)))
        b_lse = load_lse2(lse + i_m, o_r, left)
        m_s = see((m + o_r)[None, :], o_n[:, None], num_k, shift, 0, 0, False, CAUSAL)
        b_p = tl.exp2(tl.where(m_s, b_s * (scale * LOG2E) - b_lse[None, :], -float("inf")))
        b_do = load_rows(dout + i_m * s_do, o_r, s_do, left, o_d, HEAD_DIM, BLOCK_D, True)
        b_delta = tl.load(delta + i_m + o_r, mask=o_r < left, other=0.0)
        b_dv = dot_add(b_p.to(b_do.dtype), b_do, b_dv)
        b_ds = b_p * (dot(b_v, tl.trans(b_do)) - b_delta[None, :])
        if SIDE == NEAR:
            b_dk1 = dot_add(b_ds.to(b_do.dtype), b_q1, b_dk1)
        elif SIDE == FAR:
            b_dk2 = dot_add(b_ds.to(b_do.dtype), b_q2, b_dk2)
        else:
            b_dk1 = dot_add(tl.where(m_far, 0.0, b_ds).to(b_do.dtype), b_q1, b_dk1)
            b_dk2 = dot_add(tl.where(m_far, b_ds, 0.0).to(b_do.dtype), b_q2, b_dk2)
    return b_dk1, b_dk2, b_dv


@triton.jit(do_not_specialize=["threshold"])
def piecewise_dkdv_kernel(q1, k1, q2, k2, v, dout, lse, delta, dk1, dk2, dv, st_q1, st_k1, st_q2, st_k2, st_v, st_do,
                          st_dk1, st_dk2, st_dv, num_heads, group, num_q, num_k, threshold, scale,
                          HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                          CAUSAL: tl.constexpr):  # fmt: skip
    """dk1, dk2 and dv of one (key tile, kv head, batch)."""
    n_lo = tl.program_id(0) * BLOCK_N
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    shift = num_k - num_q
    o_t, o_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    o_n = n_lo + o_t
    row = n_lo.to(tl.int64)
    left = num_k - n_lo
    b_k1 = load_rows(k1 + i_b * st_k1[0] + i_h * st_k1[1] + row * st_k1[2], o_t, st_k1[2], left, o_d,
                     HEAD_DIM, BLOCK_D, True)  # fmt: skip
    b_k2 = load_rows(k2 + i_b * st_k2[0] + i_h * st_k2[1] + row * st_k2[2], o_t, st_k2[2], left, o_d,
                     HEAD_DIM, BLOCK_D, True)  # fmt: skip
    b_v = load_rows(v + i_b * st_v[0] + i_h * st_v[1] + row * st_v[2], o_t, st_v[2], left, o_d,
                    HEAD_DIM, BLOCK_D, True)  # fmt: skip
    b_dk1 = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_dk2 = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    end = (num_q + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    lo = 0
    if CAUSAL:  # first row that sees a key of the tile
        lo = tl.minimum(tl.maximum(n_lo - shift, 0) // BLOCK_M * BLOCK_M, end)
    # rows below near are near to every key of the tile, rows from far on are far from every key
    near = tl.maximum(n_lo - shift + threshold, 0) // BLOCK_M * BLOCK_M
    near = tl.maximum(tl.minimum(near, end), lo)
    far = (tl.maximum(n_lo + BLOCK_N - 1 - shift + threshold, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    far = tl.maximum(tl.minimum(far, end), near)
    for g in range(group):
        i_q = i_h * group + g
        p_q1 = q1 + i_b * st_q1[0] + i_q * st_q1[1]
        p_q2 = q2 + i_b * st_q2[0] + i_q * st_q2[1]
        p_do = dout + i_b * st_do[0] + i_q * st_do[1]
        at = (i_b * num_heads + i_q) * num_q
        b_dk1, b_dk2, b_dv = dkdv_steps(b_dk1, b_dk2, b_dv, b_k1, b_k2, b_v, p_q1, p_q2, p_do, lse + at, delta + at,
                                        st_q1[2], st_q2[2], st_do[2], lo, near, o_n, o_d, num_q, num_k, shift,
                                        threshold, scale, HEAD_DIM, BLOCK_D, BLOCK_M, NEAR, CAUSAL)  # fmt: skip
        b_dk1, b_dk2, b_dv = dkdv_steps(b_dk1, b_dk2, b_dv, b_k1, b_k2, b_v, p_q1, p_q2, p_do, lse + at, delta + at,
                                        st_q1[2], st_q2[2], st_do[2], near, far, o_n, o_d, num_q, num_k, shift,
                                        threshold, scale, HEAD_DIM, BLOCK_D, BLOCK_M, BOTH, CAUSAL)  # fmt: skip
        b_dk1, b_dk2, b_dv = dkdv_steps(b_dk1, b_dk2, b_dv, b_k1, b_k2, b_v, p_q1, p_q2, p_do, lse + at, delta + at,
                                        st_q1[2], st_q2[2], st_do[2], far, end, o_n, o_d, num_q, num_k, shift,
                                        threshold, scale, HEAD_DIM, BLOCK_D, BLOCK_M, FAR, CAUSAL)  # fmt: skip
    store_rows(dk1 + i_b * st_dk1[0] + i_h * st_dk1[1] + row * st_dk1[2], o_t, st_dk1[2], left, o_d, b_dk1 * scale,
               HEAD_DIM)  # fmt: skip
    store_rows(dk2 + i_b * st_dk2[0] + i_h * st_dk2[1] + row * st_dk2[2], o_t, st_dk2[2], left, o_d, b_dk2 * scale,
               HEAD_DIM)  # fmt: skip
    store_rows(dv + i_b * st_dv[0] + i_h * st_dv[1] + row * st_dv[2], o_t, st_dv[2], left, o_d, b_dv, HEAD_DIM)
