"""The one validation layer: every operator's arguments pass through these."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

HALF_TYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
INFINITY = float("inf")  # compared with, since torch.compile does not trace math.isfinite of an argument


def check_tensors(tensors: Mapping[str, Tensor], ndim: int | None = None) -> None:
    """Tensors of ``ndim`` dims on the device of the first.

    Raises:
        TypeError: not a tensor. ValueError: other dims, another device.
    """
    first_name, first = next(iter(tensors.items()))
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if ndim is not None and x.dim() != ndim:
            raise ValueError(f"{name} must have {ndim} dims, got shape {tuple(x.shape)}")
        if x.device != first.device:
            raise ValueError(f"{name} must be on the device of {first_name} ({first.device}), got {x.device}")


def check_dtypes(tensors: Mapping[str, Tensor], allowed: tuple[torch.dtype, ...] = HALF_TYPES) -> None:
    """One dtype for all, among ``allowed``.

    Raises:
        TypeError: the first has another dtype, or two differ.
    """
    first_name, first = next(iter(tensors.items()))
    if first.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{first_name} must be {names}, got {str(first.dtype).removeprefix('torch.')}")
    for name, x in tensors.items():
        if x.dtype != first.dtype:
            raise TypeError(f"{name} must have the dtype of {first_name} ({first.dtype}), got {x.dtype}")


def check_head_dim(head_dim: int, name: str = "q") -> None:
    """ValueError unless ``1 <= head_dim <= 256``."""
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"the last dim of {name} must be in [1, {MAX_HEAD_DIM}], got {head_dim}")


def check_heads(num_heads_q: int, num_heads_kv: int) -> int:
    """Query heads per kv head; ValueError when that is not a whole number."""
    if num_heads_kv == 0 or num_heads_q % num_heads_kv:
        raise ValueError(f"heads of q must be a multiple of heads of k, got {num_heads_q} and {num_heads_kv}")
    return num_heads_q // num_heads_kv


def check_dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    """``q (B,Hq,M,D)`` with ``k, v (B,Hkv,N,D)``, half precision, one device.

    Raises:
        ValueError, TypeError: as said by the checks above; names the argument.
    """
    tensors = {"q": q, "k": k, "v": v}
    check_tensors(tensors, 4)
    check_dtypes(tensors)
    check_head_dim(q.shape[3])
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(f"k must have the batch and head dim of q {tuple(q.shape)}, got {tuple(k.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k {tuple(k.shape)}, got {tuple(v.shape)}")
    check_heads(q.shape[1], k.shape[1])


def softmax_scale(scale: float | None, head_dim: int) -> float:
    """The factor on q k^T: ``head_dim ** -0.5`` when None; ValueError when it is not finite."""
    if scale is None:
        return float(head_dim**-0.5)
    if not isinstance(scale, (int, float)):
        raise TypeError(f"sm_scale must be a number, got {type(scale).__name__}")
    if not -INFINITY < scale < INFINITY:
        raise ValueError(f"sm_scale must be finite, got {scale}")
    return float(scale)


def check_dropout(dropout_p: float) -> None:
    """ValueError unless ``0 <= dropout_p < 1``."""
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")


def check_softcap(softcap: float) -> None:
    """ValueError unless finite and not negative."""
    if not 0.0 <= softcap < INFINITY:
        raise ValueError(f"softcap must be finite and not negative (0: none), got {softcap}")


def check_window(window: tuple[int, int], causal: bool) -> tuple[int, int]:
    """``(left, right)`` with a causal mask folded in; -1 is no limit.

    Raises:
        ValueError: not two integers of at least -1.
    """
    if len(window) != 2 or any(int(size) != size or size < -1 for size in window):
        raise ValueError(f"window must be two integers (left, right) of at least -1, got {window}")
    left, right = (int(size) for size in window)
    return left, (0 if causal else right)


def check_sink(sink: Tensor | None, q: Tensor, num_heads_q: int) -> None:
    """ValueError or TypeError unless float32 ``(num_heads_q,)`` on the device of q."""
    if sink is None:
        return
    check_tensors({"q": q, "sink": sink})
    if sink.dtype != torch.float32:
        raise TypeError(f"sink must be float32, got {sink.dtype}")
    if sink.shape != (num_heads_q,):
        raise ValueError(f"sink must have shape ({num_heads_q},), got {tuple(sink.shape)}")


def check_integers(tensors: Mapping[str, Tensor]) -> None:
    """TypeError unless every tensor is int32 or int64."""
    for name, x in tensors.items():
        if x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, got {x.dtype}")


def check_no_grad(name: str, **tensors: Tensor) -> None:
    """NotImplementedError when a forward-only operator is asked for a gradient."""
    if torch.is_grad_enabled():
        for argument, x in tensors.items():
            if x.requires_grad:
                raise NotImplementedError(f"{name} has no backward, and {argument} requires a gradient: call it under "
                                          "torch.no_grad()")  # fmt: skip


def check_splits(num_splits: int, name: str = "num_splits") -> None:
    """ValueError unless ``0 <= num_splits <= 1024``."""
    if not 0 <= num_splits <= 1024:
        raise ValueError(f"{name} must be in [0, 1024] (0: choose), got {num_splits}")


def check_pages(
    query: Tensor, context_lens: Tensor, block_tables: Tensor, max_context_len: int, page_size: int
) -> None:
    """``context_lens (num_seqs,)`` and ``block_tables (num_seqs, W)``, wide enough for ``max_context_len``.

    Raises:
        ValueError, TypeError: names the argument.
    """
    integers = {"context_lens": context_lens, "block_tables": block_tables}
    check_tensors({"query": query, **integers})
    check_integers(integers)
    if context_lens.shape != query.shape[:1]:
        raise ValueError(f"context_lens must have shape ({query.shape[0]},), got {tuple(context_lens.shape)}")
    if block_tables.dim() != 2 or block_tables.shape[0] != query.shape[0]:
        raise ValueError(f"block_tables must have shape ({query.shape[0]}, n), got {tuple(block_tables.shape)}")
    if not 0 <= max_context_len <= block_tables.shape[1] * page_size:
        raise ValueError(
            f"max_context_len must be in [0, {block_tables.shape[1] * page_size}] (pages of block_tables times block"
            f" size), got {max_context_len}"
        )
