"""``diffkv_attention``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import checks


def diffkv_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    attn_scale: float | None = None,
    window_size: int = -1,
    path: str = "2d",
    num_segments: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """One query token per sequence against pages whose keys and values differ in head dim.

    Args:
        query: ``(B, Hq, Dqk)``, float16 or bfloat16.
        key_cache: ``(pages, block, Hkv, Dqk)``. value_cache: ``(pages, block, Hkv, Dv)``; one dtype, dims to 256.
        context_lens: integer ``(B,)``; 0 gives ``out = 0``. block_tables: integer ``(B, n)``.
        attn_scale: factor on ``q k^T``; ``Dqk ** -0.5`` when None.
        window_size: -1, or how many of the most recent tokens are seen.
        path: ``"2d"`` one pass, ``"3d"`` the keys split over ``num_segments`` (chosen when None).
        backend: None, ``"auto"`` or ``"triton"``.

    Returns:
        ``(B, Hq, Dv)`` in the dtype of query.

    Raises:
        ValueError, TypeError: an argument does not fit; named. RuntimeError: no kernel can run here.
        NotImplementedError: a tensor requires a gradient; this operator has none.

    Does not synchronise; safe under CUDA graph capture.
    """
    tensors = {"query": query, "key_cache": key_cache, "value_cache": value_cache}
    checks.check_tensors(tensors)
    checks.check_tensors({"query": query}, 3)
    checks.check_tensors({"key_cache": key_cache, "value_cache": value_cache}, 4)
    checks.check_dtypes(tensors)
    checks.check_head_dim(query.shape[2], "query")
    checks.check_head_dim(value_cache.shape[3], "value_cache")
    if key_cache.shape[3] != query.shape[2]:
        raise ValueError(f"key_cache must have the head dim of query ({query.shape[2]}), got {key_cache.shape[3]}")
    if value_cache.shape[:3] != key_cache.shape[:3]:
        raise ValueError(
            f"value_cache must have pages, block and heads of key_cache {tuple(key_cache.shape[:3])},"
            f" got {tuple(value_cache.shape[:3])}"
        )
    checks.check_heads(query.shape[1], key_cache.shape[2])
    capacity = block_tables.shape[-1] * key_cache.shape[1]
    checks.check_pages(query, context_lens, block_tables, capacity, key_cache.shape[1])
    checks.check_no_grad("diffkv_attention", query=query, key_cache=key_cache, value_cache=value_cache)
    scale = checks.softmax_scale(attn_scale, query.shape[2])
    if window_size != -1 and window_size < 1:
        raise ValueError(f"window_size must be -1 or positive, got {window_size}")
    if path not in ("2d", "3d"):
        raise ValueError(f"path must be '2d' or '3d', got {path!r}")
    if backend not in (None, "auto", "triton"):
        raise ValueError(f"backend must be None, 'auto' or 'triton', got {backend!r}")
    if num_segments is not None:
        checks.check_splits(num_segments, "num_segments")
    from ..decode import ops  # noqa: F401  (registers the operator)

    out, _ = torch.ops.magi_triton.decode(
        query.unsqueeze(2), key_cache.transpose(1, 2), value_cache.transpose(1, 2), context_lens,
        block_tables.contiguous(), None, None, capacity, 1 if path == "2d" else num_segments or 0, scale,
        window_size - 1 if window_size > 0 else -1, -1,
    )  # fmt: skip
    return out.squeeze(2)  # type: ignore[no-any-return]
