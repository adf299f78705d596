"""Kernel of the keep mask."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keep_mask_kernel(keep, seed, offset, num_elements, dropout_p, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    """keep[i] = uniform(philox(seed, offset + i)) > dropout_p; one program per BLOCK elements of the flat mask."""
    o_e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # int64: B*H*M*N passes 2**31
    m_e = o_e < num_elements
    b_u = tl.rand(seed, offset + o_e, n_rounds=ROUNDS)  # [BLOCK]
    tl.store(keep + o_e, (b_u > dropout_p).to(tl.int8), mask=m_e)
