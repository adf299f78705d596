"""``paged_attention``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import checks

FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    attn_scale: float,
    max_context_len: int,
    num_splits: int = 0,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """One query token per sequence against pages of keys.

    Args:
        query: ``(num_seqs, Hq, D)``, float16 or bfloat16, ``D <= 256``.
        key_cache, value_cache: ``(num_blocks, Hkv, block_size, D)`` in the dtype of query, or float8 (e4m3fn, e5m2)
            with scales. Each may have strides of its own; any block size and any group ``Hq / Hkv``.
        context_lens: integer ``(num_seqs,)``; 0 gives ``out = 0``. Not above ``max_context_len`` (not checked).
        block_tables: integer ``(num_seqs, n)``: token ``j`` lies in page ``block_tables[s, j // block_size]``.
        attn_scale: factor on ``q k^T``, any finite number.
        max_context_len: longest context, for the choice of splits.
        num_splits: 0 chooses; else that many splits at most. Partial results are float32.
        k_scale, v_scale: float32 with one element or ``(Hkv,)``: value = stored * scale. Both, for a float8 cache only.

    Returns:
        ``(num_seqs, Hq, D)`` in the dtype of query.

    Raises:
        ValueError, TypeError: an argument does not fit; named. RuntimeError: no kernel can run here.
        NotImplementedError: a tensor requires a gradient; this operator has none.

    Does not synchronise; safe under CUDA graph capture.
    """
    tensors = {"query": query, "key_cache": key_cache, "value_cache": value_cache}
    checks.check_tensors(tensors)
    checks.check_tensors({"query": query}, 3)
    checks.check_tensors({"key_cache": key_cache, "value_cache": value_cache}, 4)
    checks.check_dtypes({"query": query})
    is_fp8 = key_cache.dtype in FP8_TYPES
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    checks.check_dtypes(caches if is_fp8 else tensors, FP8_TYPES if is_fp8 else checks.HALF_TYPES)
    checks.check_head_dim(query.shape[2], "query")
    if key_cache.shape[3] != query.shape[2]:
        raise ValueError(f"key_cache must have the head dim of query ({query.shape[2]}), got {key_cache.shape[3]}")
    if value_cache.shape != key_cache.shape:
        raise ValueError(f"value_cache must have the shape of key_cache, got {tuple(value_cache.shape)}")
    checks.check_heads(query.shape[1], key_cache.shape[1])
    checks.check_pages(query, context_lens, block_tables, max_context_len, key_cache.shape[2])
    checks.check_no_grad("paged_attention", query=query, key_cache=key_cache, value_cache=value_cache)
    checks.check_splits(num_splits)
    scale = checks.softmax_scale(attn_scale, query.shape[2])
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    for name, x in scales.items():
        if (x is not None) != is_fp8:
            raise ValueError(f"{name} must be given for a float8 cache and for no other, got {key_cache.dtype}")
        if x is not None and x.numel() not in (1, key_cache.shape[1]):
            raise ValueError(f"{name} must have 1 or {key_cache.shape[1]} elements, got {x.numel()}")
    from ..decode import ops  # noqa: F401  (registers the operator)

    out, _ = torch.ops.magi_triton.decode(
        query.unsqueeze(2), key_cache, value_cache, context_lens, block_tables.contiguous(), k_scale, v_scale,
        max_context_len, num_splits, scale, -1, -1,
    )  # fmt: skip
    return out.squeeze(2)  # type: ignore[no-any-return]
