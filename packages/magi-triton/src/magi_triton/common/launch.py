"""What stands between an operator and its kernel: can it run here, strides, the device."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from ..runtime.device import backend_info


def require_kernels(name: str, x: Tensor) -> None:
    """RuntimeError, with the remedy, when kernel ``name`` cannot run on the device of ``x``."""
    info = backend_info()
    reason = info.why_not()
    if reason is None and x.device.type == "cpu" and not info.interpreted:
        reason = "its tensors are on the CPU; move them to a GPU, or set TRITON_INTERPRET=1 (slow)"
    if reason is not None:
        raise RuntimeError(f"{name} cannot run here: {reason}")


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Makes the device of ``x`` current: Triton launches there."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def rows_ready(x: Tensor) -> Tensor:
    """``x`` with a contiguous last dim and a row stride that lets a tile's offsets stay below 2**31."""
    if (x.stride(-1) != 1 and x.shape[-1] > 1) or any(abs(stride) >= 2**22 for stride in x.stride()[-2:-1]):
        return x.contiguous()
    return x


def empty_like_rows(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Fresh memory with the shape of ``x`` and, where these are dense, its strides; the last dim is contiguous."""
    out = torch.empty_like(x, dtype=dtype)
    return out if out.stride(-1) == 1 or out.shape[-1] <= 1 else torch.empty(x.shape, dtype=out.dtype, device=x.device)


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def block_dim(head_dim: int) -> int:
    """Columns of a tile: the power of two, at least 16, that holds a head."""
    return max(16, 1 << (head_dim - 1).bit_length())
