"""Floating point dtypes by precision."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def _check_fp(dtype: torch.dtype, name: str) -> torch.dtype:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"{name} must be a floating point dtype, got {dtype}")
    return dtype


def fp_dtype_bits(dtype: torch.dtype) -> int:
    """Bits of a floating point dtype."""
    return torch.finfo(_check_fp(dtype, "dtype")).bits


def is_fp_dtype_at_least(tensor_or_dtype: Tensor | torch.dtype, lowest_precision: torch.dtype) -> bool:
    """Whether a tensor's (or a) floating point dtype has at least the bits of ``lowest_precision``."""
    dtype = tensor_or_dtype.dtype if isinstance(tensor_or_dtype, Tensor) else tensor_or_dtype
    return fp_dtype_bits(dtype) >= fp_dtype_bits(lowest_precision)


def to_higher_fp_dtype(tensor: Tensor, lowest_precision: torch.dtype) -> Tensor:
    """The tensor itself when it has at least the bits of ``lowest_precision``, else a copy in that dtype."""
    return tensor if is_fp_dtype_at_least(tensor, lowest_precision) else tensor.to(lowest_precision)


def max_fp_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of most bits; the first among equal ones.

    Raises:
        ValueError: none is given.
    """
    if not dtypes:
        raise ValueError("dtypes must not be empty")
    return max(dtypes, key=fp_dtype_bits)


def to_triton_dtype(dtype: torch.dtype) -> Any:
    """The ``triton.language`` dtype of a torch dtype.

    Raises:
        ImportError: Triton is not installed; names the extra that brings it.
        TypeError: Triton has no such dtype.
    """
    try:
        tl = import_module("triton.language")
    except ImportError as error:
        raise ImportError("to_triton_dtype needs Triton: pip install 'magi-attention[triton]'") from error
    names = {
        torch.float16: "float16",
        torch.bfloat16: "bfloat16",
        torch.float32: "float32",
        torch.float64: "float64",
        torch.int8: "int8",
        torch.int16: "int16",
        torch.int32: "int32",
        torch.int64: "int64",
        torch.uint8: "uint8",
        torch.bool: "int1",
    }
    if dtype not in names:
        raise TypeError(f"dtype must be one of {', '.join(map(str, names))}, got {dtype}")
    return getattr(tl, names[dtype])
