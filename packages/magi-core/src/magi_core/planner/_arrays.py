"""Arguments as the arrays that cross into the host library: C-contiguous, writeable (a DLPack requirement), typed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..bands import Bands
from ..errors import checked_int32_array

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


def band_array(mask_or_bands: Any, name: str = "bands") -> Int32Array:
    """``(n, 6)`` int32 of a Bands, of a Mask (anything with ``.bands``), or of rows ``q0, q1, k0, k1, lo, hi``."""
    bands = getattr(mask_or_bands, "bands", mask_or_bands)
    data = bands.data if isinstance(bands, Bands) else bands
    return checked_int32_array(data, name, (None, 6))


def int64_array(values: Any, name: str) -> Int64Array:
    """``(n,)`` int64. TypeError when the values are no integers, ValueError when they are not flat or do not fit."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be a flat array of integers, got {values!r}") from error
    if array.size == 0 and array.dtype.kind not in "iu":
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers that fit int64, got dtype {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have shape (n,), got {array.shape}")
    if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{name} must fit int64, got {int(array.max())}")
    array = np.ascontiguousarray(array, np.int64)
    return array if array.flags.writeable else array.copy()


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, read-only from now on."""
    array.setflags(write=False)
    return array
