"""Triton kernel of the lightning indexer's scores: one program per (block of queries, block of keys), heads inside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["scores"]


@triton.jit
def indexer_scores_kernel(q, k, weights, out, stride_qt, stride_qh, stride_kt, stride_wt, stride_wh, total_q, total_k,
                          num_heads, dim, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
                          PRECISION: tl.constexpr):  # fmt: skip
    """out[t, s] = sum_h weights[t, h] relu(q[t, h] . k[s])"""
    i_m, i_n = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_m, o_n, o_d = i_m * BLOCK_M + tl.arange(0, BLOCK_M), i_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    m_m, m_n, m_d = o_m < total_q, o_n < total_k, o_d < dim
    p_k = k + o_n[None, :] * stride_kt + o_d[:, None]
    b_k = tl.load(p_k, mask=m_n[None, :] & m_d[:, None], other=0.0)  # [BLOCK_D, BLOCK_N]
    b_out = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i_h in range(num_heads):
        p_q = q + o_m[:, None] * stride_qt + i_h * stride_qh + o_d[None, :]
        b_q = tl.load(p_q, mask=m_m[:, None] & m_d[None, :], other=0.0)
        b_w = tl.load(weights + o_m * stride_wt + i_h * stride_wh, mask=m_m, other=0.0).to(tl.float32)
        b_out += tl.maximum(tl.dot(b_q, b_k, input_precision=PRECISION), 0.0) * b_w[:, None]
    tl.store(out + o_m[:, None] * total_k + o_n[None, :], b_out, mask=m_m[:, None] & m_n[None, :])


def scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """``(total_q, total_k)`` float32 of ``q (total_q, heads, dim)``, ``k (total_k, dim)`` and ``weights``."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    out = torch.empty((q.shape[0], k.shape[0]), dtype=torch.float32, device=q.device)
    block_m, block_n = 64, 128
    indexer_scores_kernel[(triton.cdiv(q.shape[0], block_m), triton.cdiv(k.shape[0], block_n))](
        *(q, k, weights, out, *q.stride()[:2], k.stride(0), *weights.stride(), q.shape[0], k.shape[0], *q.shape[1:]),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=max(16, triton.next_power_of_2(q.shape[2])),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4,
    )
    return out
