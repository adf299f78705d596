"""``dsa_attn_func``: check, choose the backend, call."""

from __future__ import annotations

import torch
from torch import Tensor

from .dense import attend_dense, attend_flex
from .folded import attend_folded

__all__ = ["BACKENDS", "dsa_attn_func"]

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
BACKENDS = ("triton", "reference", "sdpa", "flex", "ffa_index_attn", "ffa_sparse_load")


def dsa_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_map: Tensor,
    softmax_scale: float | None = None,
    backend: str | None = None,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend to the keys listed in ``index_map``, and to no others.

    A key listed twice for a query counts twice, on every backend (contract item 3). Nothing causal is added: the map is
    the mask. Differentiable in q, k, v, through ``out`` and through ``lse``.

    Args:
        q: ``(total_q, num_heads_q, head_dim)``, floating point.
        k, v: ``(total_k, num_heads_kv, head_dim)``; ``num_heads_kv`` divides ``num_heads_q``; v may have its own
            head_dim.
        index_map: integers ``(num_heads_kv, total_q, topk)``: keys of a query, by kv head; a negative entry, anywhere,
            lists nothing.
        softmax_scale: factor on ``q @ k^T``; ``head_dim ** -0.5`` when None.
        backend: results are the same; None is ``"triton"`` for CUDA tensors and ``"reference"`` for others.

            - ``"triton"``: this package's kernels; CUDA, float16 and bfloat16.
            - ``"reference"``: blockwise torch, any device and dtype, memory of one block.
            - ``"sdpa"``: plain torch, dense: memory ``num_heads_q * total_q * total_k``.
            - ``"flex"``: FlexAttention over a dense table of counts ``(num_heads_kv, total_q, total_k)``; compiled on
              CUDA. Its backward needs CUDA.
            - ``"ffa_index_attn"``, ``"ffa_sparse_load"``: ``magi_core.flex_flash_attn_func`` with listed keys.
        deterministic: a bitwise repeatable backward: every backend but ``"triton"`` and ``"flex"``.

    Returns:
        ``out (total_q, num_heads_q, head_dim_v)`` in the dtype of q; ``lse (total_q, num_heads_q)`` float32 (float64
        for float64 inputs), natural log. A query that lists nothing gives ``out = 0``, ``lse = -inf``, zero gradients.

    Raises:
        ValueError: a shape does not fit, an index is past the keys (checked on the CPU; on CUDA such an entry lists
            nothing on ``"triton"`` and is a device-side assertion on others), or the backend is unknown.
        TypeError: dtypes do not fit.
        NotImplementedError: the backend does not take this device, dtype or option; names one that does.

    ``"triton"`` does not synchronise and can be captured in a CUDA graph. Source: DeepSeek-V3.2-Exp, sparse attention;
    semantics of the public function (reference, section 7.2).
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be None or one of {', '.join(BACKENDS)}, got {backend!r}")
    _check(q, k, v, index_map)
    chosen = backend or ("triton" if q.is_cuda else "reference")
    scale = q.shape[2] ** -0.5 if softmax_scale is None else float(softmax_scale)
    if deterministic and chosen in ("triton", "flex"):
        raise NotImplementedError(
            f'backend {chosen!r} has no deterministic backward; backend="reference" has, on any device'
        )
    if chosen == "sdpa":
        return attend_dense(q, k, v, index_map, scale)
    if chosen == "flex":
        return attend_flex(q, k, v, index_map, scale)
    if chosen == "triton":
        from . import ops

        _check_triton(q, v)
        return ops.attend(q, k, v, index_map, scale)
    return attend_folded(q, k, v, index_map, scale, "reference" if chosen == "reference" else None, deterministic)


def _check_triton(q: Tensor, v: Tensor) -> None:
    if not (q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)) and not _is_interpreted(q):
        raise NotImplementedError(
            f'backend "triton" takes float16 and bfloat16 on cuda, got {q.dtype} on {q.device}; '
            'backend="reference" runs on any device'
        )
    if max(q.shape[2], v.shape[2]) > 1024:
        raise NotImplementedError(
            f'backend "triton" takes head dims up to 1024, got {q.shape[2]} and {v.shape[2]}; use backend="reference"'
        )


def _is_interpreted(q: Tensor) -> bool:
    """Whether Triton's interpreter serves CPU tensors in this process (TRITON_INTERPRET=1 when Triton was imported)."""
    if q.device.type != "cpu" or q.dtype == torch.float64:
        return False
    from . import kernel

    return type(kernel.dsa_fwd_kernel).__name__ == "InterpretedFunction"


def _check(q: Tensor, k: Tensor, v: Tensor, index_map: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v), ("index_map", index_map)):
        if tensor.dim() != 3:
            raise ValueError(f"{name} must have 3 dims, got shape {tuple(tensor.shape)}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on the device of q ({q.device}), got {tensor.device}")
    if not q.is_floating_point() or k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(f"q, k and v must have one floating point dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if index_map.dtype not in _INTEGERS:
        raise TypeError(f"index_map must hold integers, got {index_map.dtype}")
    if k.shape[:2] != v.shape[:2] or k.shape[2] != q.shape[2]:
        raise ValueError(f"k and v must fit q {tuple(q.shape)}, got k {tuple(k.shape)} and v {tuple(v.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"num_heads_kv must divide num_heads_q ({q.shape[1]}), got {k.shape[1]}")
    if index_map.shape[:2] != (k.shape[1], q.shape[0]):
        expected = f"({k.shape[1]}, {q.shape[0]}, topk)"
        raise ValueError(f"index_map must have shape {expected}, got {tuple(index_map.shape)}")
    # On CUDA this would synchronise, and break the capture of a graph.
    if not index_map.is_cuda and index_map.numel() and not torch.compiler.is_compiling():
        largest = int(index_map.max())
        if largest >= k.shape[0]:
            raise ValueError(f"index_map must list keys below {k.shape[0]}, got {largest}")
