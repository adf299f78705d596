"""Attention of few rows over a long, perhaps paged, cache, split over programs, and the merge of the splits.

A tile's rows are (query head of the group, query row), so that a kv head is read once for its whole group. Each split
writes a normalised partial output in float32 and its lse; a split with no visible key writes 0 and -inf, and merges
with weight exactly 0 (Flash-Decoding; merge: arXiv:1805.02867). Strides are (batch or page, head, row) in elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.kernel import LN2, LOG2E, dot, dot_add


@triton.jit(do_not_specialize=["left", "right", "max_k", "num_splits"])
def decode_kernel(q, k, v, k_scale, v_scale, out, lse, lengths, table, st_q, st_k, st_v, st_out, st_lse, st_table,
                  group, rows, max_k, num_splits, scale, left, right,
                  HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
                  BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, RAGGED: tl.constexpr,
                  HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SCALES: tl.constexpr):  # fmt: skip
    """One (split, row tile) of one (kv head, sequence). PAGE_SIZE 0: the cache is not paged. st_out, st_lse lead with
    the stride of splits; HAS_SCALES: one factor per kv head on k and on v."""
    i_s = tl.program_id(0) % num_splits
    i_r = tl.program_id(0) // num_splits
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    num_k = max_k
    if RAGGED:
        num_k = tl.load(lengths + i_b).to(tl.int32)
    o_d, o_v, o_t = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_N)
    o_r = i_r * BLOCK_R + tl.arange(0, BLOCK_R)
    m_r = o_r < group * rows
    o_h, o_m = (i_h * group + o_r // rows).to(tl.int64), (o_r % rows).to(tl.int64)
    p_q = q + i_b * st_q[0] + o_h * st_q[1] + o_m * st_q[2]
    b_q = tl.load(p_q[:, None] + o_d[None, :], mask=m_r[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0)
    o_last = (o_m + (num_k - rows)).to(tl.int32)  # the key at the row's own position
    lo = 0
    hi = num_k
    if HAS_RIGHT:
        hi = tl.minimum(hi, tl.maximum(num_k + right, 0))
    if HAS_LEFT:
        lo = tl.maximum(num_k - rows - left, 0) // BLOCK_N * BLOCK_N
    steps = tl.maximum(hi - lo + BLOCK_N - 1, 0) // BLOCK_N
    span = (steps + num_splits - 1) // num_splits * BLOCK_N
    first = lo + i_s * span
    last = tl.minimum(hi, first + span)
    to_log2 = scale * LOG2E
    if HAS_SCALES:
        to_log2 = to_log2 * tl.load(k_scale + i_h)
    b_acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    b_l = tl.zeros([BLOCK_R], tl.float32)
    b_m = tl.full([BLOCK_R], -float("inf"), tl.float32)
    k += i_h * st_k[1]
    v += i_h * st_v[1]
    for n in range(first, last, BLOCK_N):
        o_n = n + o_t
        m_n = o_n < last
        if PAGE_SIZE > 0:
            b_page = tl.load(table + i_b * st_table + o_n // PAGE_SIZE, mask=m_n, other=0).to(tl.int64)
            o_slot = (o_n % PAGE_SIZE).to(tl.int64)
        else:
            b_page = i_b + tl.zeros([BLOCK_N], tl.int64)
            o_slot = o_n.to(tl.int64)
        p_k = k + b_page * st_k[0] + o_slot * st_k[2]
        b_k = tl.load(p_k[:, None] + o_d[None, :], mask=m_n[:, None] & (o_d < HEAD_DIM)[None, :], other=0.0)
        b_s = dot(b_q, tl.trans(b_k.to(b_q.dtype))) * to_log2  # [BLOCK_R, BLOCK_N], base 2
        m_s = m_n[None, :]
        if HAS_RIGHT:
            m_s = m_s & (o_n[None, :] <= o_last[:, None] + right)
        if HAS_LEFT:
            m_s = m_s & (o_n[None, :] >= o_last[:, None] - left)
        b_s = tl.where(m_s, b_s, -float("inf"))
        b_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_base = tl.where(b_new == -float("inf"), 0.0, b_new)
        b_alpha = tl.exp2(b_m - b_base)
        b_p = tl.exp2(b_s - b_base[:, None])
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
        p_v = v + b_page * st_v[0] + o_slot * st_v[2]
        b_v = tl.load(p_v[:, None] + o_v[None, :], mask=m_n[:, None] & (o_v < HEAD_DIM_V)[None, :], other=0.0)
        b_acc = dot_add(b_p.to(b_q.dtype), b_v.to(b_q.dtype), b_acc * b_alpha[:, None])
        b_m = b_new
    m_any = b_l > 0
    b_lse = tl.where(m_any, (b_m + tl.log2(tl.where(m_any, b_l, 1.0))) * LN2, -float("inf"))
    b_acc = b_acc / tl.where(m_any, b_l, 1.0)[:, None]
    if HAS_SCALES:
        b_acc = b_acc * tl.load(v_scale + i_h)
    p_out = out + i_s.to(tl.int64) * st_out[0] + i_b * st_out[1] + o_h * st_out[2] + o_m * st_out[3]
    m_out = m_r[:, None] & (o_v < HEAD_DIM_V)[None, :]
    tl.store(p_out[:, None] + o_v[None, :], b_acc.to(out.dtype.element_ty), mask=m_out)
    tl.store(lse + i_s.to(tl.int64) * st_lse[0] + i_b * st_lse[1] + o_h * st_lse[2] + o_m * st_lse[3], b_lse, mask=m_r)


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(parts, part_lse, out, lse, st_parts, st_part_lse, st_out, st_lse, num_splits,
                 HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
                 CHUNK: tl.constexpr):  # fmt: skip
    """out and lse of one (row, head, sequence) from its splits: weights exp(lse_s - lse). BLOCK_S >= num_splits."""
    i_m, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_b = tl.program_id(2).to(tl.int64)
    o_s, o_d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    p_lse = part_lse + i_b * st_part_lse[1] + i_h * st_part_lse[2] + i_m * st_part_lse[3]
    b_lse = tl.load(p_lse + o_s * st_part_lse[0], mask=o_s < num_splits, other=-float("inf"))
    b_most = tl.max(b_lse, 0)
    is_empty = b_most == -float("inf")
    b_base = tl.where(is_empty, 0.0, b_most)
    b_total = tl.sum(tl.exp2((b_lse - b_base) * LOG2E), 0)
    b_all = tl.where(is_empty, -float("inf"), b_base + tl.log2(tl.where(is_empty, 1.0, b_total)) * LN2)
    b_safe = tl.where(is_empty, 0.0, b_all)
    parts += i_b * st_parts[1] + i_h * st_parts[2] + i_m * st_parts[3]
    b_acc = tl.zeros([BLOCK_D], tl.float32)
    for s in range(0, num_splits, CHUNK):
        o_c = s + tl.arange(0, CHUNK)
        b_l = tl.load(p_lse + o_c * st_part_lse[0], mask=o_c < num_splits, other=-float("inf"))
        b_w = tl.exp2((b_l - b_safe) * LOG2E)
        m_x = (o_c < num_splits)[:, None] & (o_d < HEAD_DIM)[None, :]
        b_x = tl.load(parts + o_c.to(tl.int64)[:, None] * st_parts[0] + o_d[None, :], mask=m_x, other=0.0)
        b_acc += tl.sum(b_x * b_w[:, None], 0)
    p_out = out + i_b * st_out[0] + i_h * st_out[1] + i_m * st_out[2] + o_d
    tl.store(p_out, b_acc.to(out.dtype.element_ty), mask=o_d < HEAD_DIM)
    tl.store(lse + i_b * st_lse[0] + i_h * st_lse[1] + i_m * st_lse[2], b_all)
