"""Checks of tensors and options at the public functions: each names the argument, the expectation and what came."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .errors import checked_int
from .sink import check_sink

__all__ = [
    "check_bool",
    "check_hints",
    "check_qkv",
    "check_ranges_inside",
    "check_score_options",
    "check_sink",
    "checked_float",
]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_bool(value: Any, name: str) -> bool:
    """``value`` if it is a bool. Raises TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__} {value!r}")
    return value


def checked_float(value: Any, name: str) -> float:
    """``value`` as a finite float. Raises TypeError for other kinds, ValueError for NaN and infinities."""
    if isinstance(value, (bool, Tensor)) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise TypeError(f"{name} must be a float, got {type(value).__name__} {value!r}")
    if not -math.inf < value < math.inf:  # not isfinite: torch.compile may trace this with a symbolic float
        raise ValueError(f"{name} must be finite, got {value}")
    return float(value)


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Shapes, dtypes and devices of ``q (total_q, num_heads_q, head_dim)``, ``k (total_k, num_heads_kv, head_dim)``,
    ``v (total_k, num_heads_kv, head_dim_v)``.

    Raises:
        TypeError: no tensor, or a dtype that is not floating or not that of q. ValueError: shape or device.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dim() != 3:
            raise ValueError(f"{name} must have 3 dims (tokens, heads, head_dim), got shape {tuple(x.shape)}")
    if q.dtype not in DTYPES:
        raise TypeError(f"q must be float16, bfloat16, float32 or float64, got {q.dtype}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q ({q.dtype}), got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q ({q.device}), got {x.device}")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k must have the head_dim of q ({q.shape[2]}), got {k.shape[2]}")
    if v.shape[0] != k.shape[0]:
        raise ValueError(f"v must have as many tokens as k ({k.shape[0]}), got {v.shape[0]}")
    if v.shape[1] != k.shape[1]:
        raise ValueError(f"v must have as many heads as k ({k.shape[1]}), got {v.shape[1]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"num_heads_q must be a multiple of num_heads_kv, got {q.shape[1]} heads of q and {k.shape[1]} of k"
        )
    if q.shape[1] == 0 or q.shape[2] == 0 or v.shape[2] == 0:
        raise ValueError(f"q, k and v need heads and a head_dim, got shapes {tuple(q.shape)} and {tuple(v.shape)}")


def check_score_options(softmax_scale: Any, softcap: Any, head_dim: int) -> tuple[float, float]:
    """``(softmax_scale, softcap)`` as floats, ``softmax_scale`` defaulting to ``head_dim ** -0.5``.

    Raises:
        TypeError: no number. ValueError: not finite, or a negative softcap.
    """
    scale = float(head_dim) ** -0.5 if softmax_scale is None else checked_float(softmax_scale, "softmax_scale")
    cap = checked_float(softcap, "softcap")
    if cap < 0:
        raise ValueError(f"softcap must be 0 (off) or positive, got {cap}")
    return scale, cap


def check_ranges_inside(ranges: npt.NDArray[np.int32], total: int, name: str, tensor: str) -> None:
    """Refuse ``(n, 2)`` ranges that reach past their tensor. Raises ValueError."""
    if ranges.size == 0:
        return
    outside = (ranges[:, 1] > total) | (ranges[:, 0] < 0)
    if outside.any():
        i = int(np.flatnonzero(outside)[0])
        start, end = ranges[i].tolist()
        raise ValueError(f"{name}[{i}] must lie inside the {total} tokens of {tensor}, got [{start}, {end})")


def check_hints(
    *,
    ref_block_size: Any,
    max_seqlen_q: Any,
    **flags: Any,
) -> None:
    """Type-check the keywords that only tune a kernel; they do not change results.

    Raises:
        TypeError, ValueError: naming the keyword.
    """
    for name, value in flags.items():
        check_bool(value, name)
    if max_seqlen_q is not None:
        checked_int(max_seqlen_q, "max_seqlen_q", minimum=0)
    if ref_block_size is not None:
        if not isinstance(ref_block_size, (tuple, list)) or len(ref_block_size) != 2:
            raise TypeError(f"ref_block_size must be None or a pair of ints, got {ref_block_size!r}")
        for i, value in enumerate(ref_block_size):
            checked_int(value, f"ref_block_size[{i}]", minimum=1)
