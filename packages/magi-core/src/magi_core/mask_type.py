"""Mask types of a slice. Semantics: a slice of ``sq`` rows and ``sk`` columns shows cell ``(i, j)`` when

FULL always; CAUSAL ``j <= i + sk - sq`` (bottom-right aligned); INVCAUSAL ``j >= i`` (top-left aligned);
BICAUSAL both (empty if ``sq > sk``, the diagonal if ``sq == sk``).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, Union

import numpy as np
import numpy.typing as npt

from .errors import checked_int32_array

_BY_INT: list[AttnMaskType] = []


class AttnMaskType(Enum):
    """Type of a slice: value is its public string; the integer code 0..3 is what kernels read."""

    FULL = "full"
    CAUSAL = "causal"
    INVCAUSAL = "inv_causal"
    BICAUSAL = "bi_causal"

    @classmethod
    def from_int_type(cls, int_type: int | np.integer[Any]) -> AttnMaskType:
        """The type of code 0..3. Raises ValueError for another value."""
        if isinstance(int_type, bool) or not isinstance(int_type, (int, np.integer)) or not 0 <= int_type <= 3:
            raise ValueError(f"int_type must be 0, 1, 2 or 3, got {int_type!r}")
        return _BY_INT[int(int_type)]

    def to_int_type(self) -> int:
        """Code of the type: full 0, causal 1, inv_causal 2, bi_causal 3."""
        return _BY_INT.index(self)

    @classmethod
    def from_any(cls, value: AttnMaskType | str | int | np.integer[Any]) -> AttnMaskType:
        """The type named by an enum member, a public string or an integer code."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            try:
                return cls(value)
            except ValueError:
                names = ", ".join(repr(m.value) for m in cls)
                raise ValueError(f"mask type must be one of {names}, got {value!r}") from None
        if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
            return cls.from_int_type(value)
        raise TypeError(f"mask type must be an AttnMaskType, a str or an int, got {type(value).__name__} {value!r}")


_BY_INT.extend(AttnMaskType)

# One type for all slices, or one per slice.
GeneralAttnMaskType = Union[str, AttnMaskType, "list[str | AttnMaskType]"]


def mask_type_codes(types: Any, num_slices: int, name: str = "mask_types") -> npt.NDArray[np.int32]:
    """Codes of ``num_slices`` types: one type for all, a sequence of types (enum, str or int), an int array or tensor.

    None means full. Raises ValueError for an unknown type or a wrong count, TypeError for something else.
    """
    if types is None:
        return np.zeros(num_slices, np.int32)
    if isinstance(types, (AttnMaskType, str)) or (isinstance(types, (int, np.integer)) and not isinstance(types, bool)):
        return np.full(num_slices, AttnMaskType.from_any(types).to_int_type(), np.int32)
    if isinstance(types, np.ndarray) or hasattr(types, "detach"):
        codes = checked_int32_array(types, name, (None,))
        if codes.size and (codes.min() < 0 or codes.max() > 3):
            index = int(np.flatnonzero((codes < 0) | (codes > 3))[0])
            raise ValueError(f"{name}[{index}] must be 0, 1, 2 or 3, got {codes[index]}")
    elif isinstance(types, Iterable):
        codes = np.array([AttnMaskType.from_any(t).to_int_type() for t in types], dtype=np.int32)
    else:
        raise TypeError(f"{name} must be a mask type or a sequence of mask types, got {type(types).__name__}")
    if len(codes) != num_slices:
        raise ValueError(f"{name} must have one type per slice ({num_slices}), got {len(codes)}")
    return codes
