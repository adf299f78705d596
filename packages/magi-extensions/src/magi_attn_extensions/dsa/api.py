"""``dsa_attn_func``."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
_ANNOUNCED = ("flex", "ffa_sparse_load", "ffa_index_attn")


def dsa_attn_func(
    q: Tensor, k: Tensor, v: Tensor, index_map: Tensor, softmax_scale: float | None = None, backend: str = "sdpa"
) -> tuple[Tensor, Tensor]:
    """Attend to the keys listed in ``index_map``, and to no others.

    A key listed twice for a query counts once. Nothing causal is added: the map is the mask. Differentiable in q, k, v,
    through ``out`` and through ``lse``.

    Args:
        q: ``(total_q, num_heads_q, head_dim)``, floating point, on any device.
        k, v: ``(total_k, num_heads_kv, head_dim)``; ``num_heads_kv`` divides ``num_heads_q``.
        index_map: integers ``(num_heads_kv, total_q, topk)``: keys of a query, by kv head; -1 lists nothing.
        softmax_scale: factor on ``q @ k^T``; ``head_dim ** -0.5`` when None.
        backend: ``"sdpa"``: plain torch on a dense mask, memory ``num_heads_q * total_q * total_k``. (The public
            function's default is ``"flex"``; it becomes ours when that backend is here.)

    Returns:
        ``out`` like ``q``; ``lse`` ``(total_q, num_heads_q)`` float32 (float64 for float64 inputs), natural log. A
        query that lists nothing gives ``out = 0``, ``lse = -inf`` and zero gradients.

    Raises:
        ValueError: a shape does not fit, an index is past the keys, or the backend is unknown.
        TypeError: dtypes do not fit.
        NotImplementedError: a backend that this release does not have.

    Source: DeepSeek-V3.2-Exp, sparse attention; semantics of the public function (reference, section 7.2).
    """
    if backend in _ANNOUNCED:
        raise NotImplementedError(f'backend {backend!r} is not in this release of magi-extensions; pass backend="sdpa"')
    if backend != "sdpa":
        raise ValueError(f"backend must be one of sdpa, {', '.join(_ANNOUNCED)}, got {backend!r}")
    _check(q, k, v, index_map)
    total_q, num_heads_q, head_dim = q.shape
    total_k, num_heads_kv, _ = k.shape
    group = num_heads_q // num_heads_kv
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    # One column more than there are keys takes the entries that list nothing.
    listed = torch.zeros((num_heads_kv, total_q, total_k + 1), dtype=torch.bool, device=q.device)
    slots = torch.where(index_map < 0, total_k, index_map.long())
    listed = listed.scatter_(2, slots, True)[:, :, :total_k]
    grouped = q.to(accumulate).view(total_q, num_heads_kv, group, head_dim)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    scores = scale * torch.einsum("ihgd,jhd->hgij", grouped, k.to(accumulate))
    scores = scores.masked_fill(~listed[:, None], float("-inf"))
    empty = ~listed.any(-1)[:, None]  # (num_heads_kv, 1, total_q)
    # Rows that list nothing: any finite scores, then probabilities 0, so that no gradient meets inf - inf.
    scores = scores.masked_fill(empty[..., None], 0.0)
    lse = torch.logsumexp(scores, -1)
    probabilities = torch.exp(scores - lse[..., None]).masked_fill(empty[..., None], 0.0)
    out = torch.einsum("hgij,jhd->ihgd", probabilities, v.to(accumulate)).reshape(total_q, num_heads_q, v.shape[2])
    lse = lse.masked_fill(empty, float("-inf")).permute(2, 0, 1).reshape(total_q, num_heads_q)
    return out.to(q.dtype), lse


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
    if index_map.numel() and not torch.compiler.is_compiling():
        largest = int(index_map.max())
        if largest >= k.shape[0]:
            raise ValueError(f"index_map must list keys below {k.shape[0]}, got {largest}")
