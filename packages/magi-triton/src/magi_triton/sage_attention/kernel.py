"""Kernels of SageAttention (arXiv:2410.02367): int8 q and k with a scale per block, half-precision P and v.

z[m,n] = (q8[m] . k8[n]) * q_scale[block of m] * k_scale[block of n], base-2 logits; P = 2**(z - rowmax); out = P v.
Query tiles of the kernel lie within blocks of the scales (BLOCK_M divides BLKQ), key tiles likewise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.kernel import dot_add, key_tiles, load_rows, see, store_rows, wide


@triton.jit
def quantise_kernel(x, mean, x8, scales, st_x, st_mean, st_x8, st_scales, num_rows, factor,
                    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
                    HAS_MEAN: tl.constexpr):  # fmt: skip
    """One block of one head: scale = absmax / 127, x8 = x / scale rounded half away from zero. A block of zeros gets
    scale 0 and values 0. Strides are (batch, head, row)."""
    i_n = tl.program_id(0)
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    n_lo = i_n * BLOCK
    row = n_lo.to(tl.int64)
    o_t, o_d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    left = num_rows - n_lo
    b_x = load_rows(x + i_b * st_x[0] + i_h * st_x[1] + row * st_x[2], o_t, st_x[2], left, o_d,
                    HEAD_DIM, BLOCK_D, True).to(tl.float32)  # fmt: skip
    if HAS_MEAN:
        b_mean = tl.load(mean + i_b * st_mean[0] + i_h * st_mean[1] + o_d, mask=o_d < HEAD_DIM, other=0.0)
        b_x = tl.where((o_t < left)[:, None], b_x - b_mean.to(tl.float32)[None, :], 0.0)
    b_x = b_x * factor
    scale = tl.max(tl.max(tl.abs(b_x), 1), 0) / 127.0
    b_x = b_x / tl.where(scale > 0, scale, 1.0)
    b_x = tl.minimum(tl.maximum(b_x + tl.where(b_x >= 0, 0.5, -0.5), -127.0), 127.0)
    store_rows(x8 + i_b * st_x8[0] + i_h * st_x8[1] + row * st_x8[2], o_t, st_x8[2], left, o_d, b_x.to(tl.int8),
               HEAD_DIM)  # fmt: skip
    tl.store(scales + i_b * st_scales[0] + i_h * st_scales[1] + i_n * st_scales[2], scale)


@triton.jit
def sage_steps(b_acc, b_l, b_m, b_q, q_scale, k, k_scales, v, mask, stride_k, stride_ks, stride_v, stride_mask, lo, hi,
               o_m, o_r, o_d, num_q, num_k, shift,
               HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLKK: tl.constexpr,
               MASKED: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """Key tiles [lo, hi) of one query tile. MASK: 0 none, 1 bool (True keeps), 2 added to base-2 logits."""
    o_t = tl.arange(0, BLOCK_N)
    for n in range(lo, hi, BLOCK_N):
        i_n = wide(n)
        b_k = load_rows(k + i_n * stride_k, o_t, stride_k, num_k - n, o_d, HEAD_DIM, BLOCK_D, MASKED)
        k_scale = tl.load(k_scales + n // BLKK * stride_ks)
        b_s = dot_int8(b_q, tl.trans(b_k)).to(tl.float32) * (q_scale * k_scale)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            m_s = see(o_m[:, None], (n + o_t)[None, :], num_k, shift, 0, 0, False, CAUSAL)
            if MASK > 0:
                p_mask = mask + o_r[:, None] * stride_mask[2] + (n + o_t)[None, :].to(tl.int64) * stride_mask[3]
                b_mask = tl.load(p_mask, mask=m_s & (o_m < num_q)[:, None], other=0)
                if MASK == 1:
                    m_s = m_s & (b_mask != 0)
                else:
                    b_s = b_s + b_mask.to(tl.float32)
            b_s = tl.where(m_s, b_s, -float("inf"))
        b_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_base = b_new
        if MASKED:
            b_base = tl.where(b_new == -float("inf"), 0.0, b_new)
        b_alpha = tl.exp2(b_m - b_base)
        b_p = tl.exp2(b_s - b_base[:, None])
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        b_v = load_rows(v + i_n * stride_v, o_t, stride_v, num_k - n, o_d, HEAD_DIM, BLOCK_D, MASKED)
        b_acc = dot_add(b_p.to(b_v.dtype), b_v, b_acc * b_alpha[:, None])
        b_m = b_new
    return b_acc, b_l, b_m


@triton.jit
def dot_int8(a, b):
    """a @ b of int8 in int32."""
    return tl.dot(a, b, out_dtype=tl.int32)


@triton.jit
def sage_fwd_kernel(q, k, v, q_scales, k_scales, mask, out, lse, st_q, st_k, st_v, st_qs, st_ks, st_mask, st_out,
                    num_heads_q, group, num_q, num_k,
                    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                    BLKQ: tl.constexpr, BLKK: tl.constexpr, CAUSAL: tl.constexpr,
                    MASK: tl.constexpr):  # fmt: skip
    """out and base-2 lse of one (query tile, query head, batch)."""
    i_m = tl.num_programs(0) - 1 - tl.program_id(0)
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    m_lo = i_m * BLOCK_M
    shift = num_k - num_q
    o_t, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    o_m = m_lo + o_t
    q_row = m_lo.to(tl.int64)
    b_q = load_rows(q + i_b * st_q[0] + i_h * st_q[1] + q_row * st_q[2], o_t, st_q[2], num_q - m_lo, o_d,
                    HEAD_DIM, BLOCK_D, True)  # fmt: skip
    q_scale = tl.load(q_scales + i_b * st_qs[0] + i_h * st_qs[1] + m_lo // BLKQ * st_qs[2])
    i_kv = i_h // group
    k += i_b * st_k[0] + i_kv * st_k[1]
    v += i_b * st_v[0] + i_kv * st_v[1]
    k_scales += i_b * st_ks[0] + i_kv * st_ks[1]
    if MASK > 0:
        mask += i_b * st_mask[0] + i_h * st_mask[1]
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_l = tl.zeros([BLOCK_M], tl.float32)
    b_m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    o_r = o_m.to(tl.int64)
    lo, _, full, hi = key_tiles(m_lo, tl.minimum(m_lo + BLOCK_M, num_q), num_k, shift, 0, 0, False, CAUSAL, BLOCK_N)
    if MASK > 0:
        full = lo
    b_acc, b_l, b_m = sage_steps(b_acc, b_l, b_m, b_q, q_scale, k, k_scales, v, mask, st_k[2], st_ks[2], st_v[2],
                                 st_mask, 0, full, o_m, o_r, o_d, num_q, num_k, shift, HEAD_DIM, BLOCK_D, BLOCK_N,
                                 BLKK, False, CAUSAL, MASK)  # fmt: skip
    b_acc, b_l, b_m = sage_steps(b_acc, b_l, b_m, b_q, q_scale, k, k_scales, v, mask, st_k[2], st_ks[2], st_v[2],
                                 st_mask, full, hi, o_m, o_r, o_d, num_q, num_k, shift, HEAD_DIM, BLOCK_D, BLOCK_N,
                                 BLKK, True, CAUSAL, MASK)  # fmt: skip
    m_any = b_l > 0
    b_lse = tl.where(m_any, b_m + tl.log2(tl.where(m_any, b_l, 1.0)), -float("inf"))
    b_acc = b_acc / tl.where(m_any, b_l, 1.0)[:, None]
    store_rows(out + i_b * st_out[0] + i_h * st_out[1] + q_row * st_out[2], o_t, st_out[2], num_q - m_lo, o_d, b_acc,
               HEAD_DIM)  # fmt: skip
    tl.store(lse + (i_b * num_heads_q + i_h) * num_q + q_row + o_t, b_lse, mask=o_m < num_q)
