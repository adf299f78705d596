"""Device functions that several kernels call."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import env

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


INTERPRETED = tl.constexpr(env.interpreted())


@triton.jit
def dot(a, b):
    """a @ b in float32. The interpreter multiplies in float32: it has no bfloat16 product, and the values are equal."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b)


@triton.jit
def dot_add(a, b, acc):
    """acc + a @ b in float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def wide(n):
    """A loop index as int64 (the interpreter's are Python's)."""
    return tl.full([], 0, tl.int64) + n


@triton.jit
def tanh(x):
    """tanh by one exponential: 1 - 2 / (1 + exp(2 x)); saturates to -1 and 1, absolute error about 1e-7."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))


@triton.jit
def log2_sum(a, b):
    """log2(2**a + 2**b) for values in [-inf, inf]; never evaluates inf - inf."""
    largest = tl.maximum(a, b)
    is_inf = (largest == float("inf")) | (largest == -float("inf"))
    base = tl.where(is_inf, 0.0, largest)
    total = tl.exp2(tl.where(is_inf, 0.0, a) - base) + tl.exp2(tl.where(is_inf, 0.0, b) - base)
    return tl.where(is_inf, largest, base + tl.log2(total))


@triton.jit
def see(o_m, o_n, seqlen_k, shift, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Whether row m sees key n: n < seqlen_k and m + shift - left <= n <= m + shift + right. Broadcasts."""
    m_s = o_n < seqlen_k
    if HAS_RIGHT:
        m_s = m_s & (o_n <= o_m + shift + right)
    if HAS_LEFT:
        m_s = m_s & (o_n >= o_m + shift - left)
    return m_s


@triton.jit
def key_tiles(m_lo, m_hi, seqlen_k, shift, left, right,
              HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Key offsets (lo, full_lo, full_hi, hi), all but hi multiples of BLOCK_N, for rows [m_lo, m_hi).

    Tiles in [full_lo, full_hi) are seen whole by every row; those of [lo, full_lo) and [full_hi, hi) in part.
    """
    lo = 0
    hi = seqlen_k
    full_lo = 0
    full_hi = seqlen_k // BLOCK_N * BLOCK_N
    if HAS_RIGHT:
        hi = tl.minimum(hi, tl.maximum(m_hi + shift + right, 0))
        full_hi = tl.minimum(full_hi, tl.maximum(m_lo + shift + right + 1, 0) // BLOCK_N * BLOCK_N)
    if HAS_LEFT:
        lo = tl.minimum(tl.maximum(m_lo + shift - left, 0), seqlen_k) // BLOCK_N * BLOCK_N
        full_lo = (tl.maximum(m_hi - 1 + shift - left, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        full_lo = tl.minimum(full_lo, (hi + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
        full_hi = tl.maximum(full_hi, full_lo)
        full_lo = tl.maximum(full_lo, lo)
        full_hi = tl.maximum(full_hi, lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def query_tiles(n_lo, n_hi, seqlen_q, seqlen_k, shift, left, right,
                HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """Query offsets (lo, full_lo, full_hi, hi), as :func:`key_tiles`, for keys [n_lo, n_hi)."""
    lo = 0
    hi = seqlen_q
    full_lo = 0
    full_hi = seqlen_q // BLOCK_M * BLOCK_M
    if HAS_RIGHT:  # n <= m + shift + right
        lo = tl.minimum(tl.maximum(n_lo - shift - right, 0), seqlen_q) // BLOCK_M * BLOCK_M
        full_lo = (tl.maximum(n_hi - 1 - shift - right, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    if HAS_LEFT:  # m <= n - shift + left
        hi = tl.minimum(hi, tl.maximum(n_hi - shift + left, 0))
        full_hi = tl.minimum(full_hi, tl.maximum(n_lo - shift + left + 1, 0) // BLOCK_M * BLOCK_M)
    if n_hi > seqlen_k:  # keys past the end: no tile is whole
        full_hi = 0
    full_lo = tl.minimum(full_lo, (hi + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    full_lo = tl.maximum(full_lo, lo)
    full_hi = tl.maximum(full_hi, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def load_rows(p, rows, stride, num_rows, o_d, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """A [rows, BLOCK_D] tile; zeros past ``num_rows`` (where MASKED) and past HEAD_DIM."""
    p_x = p + rows[:, None] * stride + o_d[None, :]
    if MASKED:
        if HEAD_DIM == BLOCK_D:
            b_x = tl.load(p_x, mask=rows[:, None] < num_rows, other=0.0)
        else:
            b_x = tl.load(p_x, mask=(rows[:, None] < num_rows) & (o_d[None, :] < HEAD_DIM), other=0.0)
    else:
        if HEAD_DIM == BLOCK_D:
            b_x = tl.load(p_x)
        else:
            b_x = tl.load(p_x, mask=o_d[None, :] < HEAD_DIM, other=0.0)
    return b_x


@triton.jit
def store_rows(p, rows, stride, num_rows, o_d, b_x, HEAD_DIM: tl.constexpr):
    """Store a [rows, BLOCK_D] tile."""
    m_x = (rows[:, None] < num_rows) & (o_d[None, :] < HEAD_DIM)
    tl.store(p + rows.to(tl.int64)[:, None] * stride + o_d[None, :], b_x.to(p.dtype.element_ty), mask=m_x)
