"""Argument checks shared by the host-side modules: each names the argument, what is expected and what came."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

INT32_MAX = 2**31 - 1


def checked_int(value: Any, name: str, *, minimum: int | None = None, maximum: int | None = INT32_MAX) -> int:
    """``value`` as a Python int. TypeError when it is no integer (a bool is none), ValueError out of bounds."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__} {value!r}") from None
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {number}")
    return number


def checked_int32_array(values: Any, name: str, shape: tuple[int | None, ...]) -> npt.NDArray[np.int32]:
    """``values`` as a C-contiguous int32 array of ``shape`` (None: any length); copied only where needed.

    Takes numpy arrays, CPU or CUDA tensors (copied to the host, which synchronises) and nested sequences of ints.
    Raises TypeError for a dtype that is no integer, ValueError for a wrong shape or a value outside int32.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be an array of integers, got {values!r}") from error
    if array.size == 0 and array.dtype.kind not in "iu":  # np.asarray([]) is float64
        array = array.astype(np.int32)
    if array.size == 0 and len(shape) > 1 and array.ndim == 1:
        array = array.reshape([0, *(n or 0 for n in shape[1:])])
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got dtype {array.dtype}")
    if array.ndim != len(shape) or any(want is not None and want != got for want, got in zip(shape, array.shape)):
        expected = ", ".join("n" if n is None else str(n) for n in shape) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{name} must have shape ({expected}), got {array.shape}")
    if array.dtype != np.int32 and array.size:
        low, high = int(array.min()), int(array.max())
        if low < -INT32_MAX - 1 or high > INT32_MAX:
            raise ValueError(f"{name} must fit int32, got values from {low} to {high}")
    array = np.ascontiguousarray(array, dtype=np.int32)
    return array if array.flags.writeable else array.copy()  # read-only memory cannot cross DLPack
