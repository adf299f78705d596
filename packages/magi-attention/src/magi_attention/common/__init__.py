"""Ranges, rectangles, masks and enumerations. The classes are those of ``magi_core``: one type, two names."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names
from . import enum

if TYPE_CHECKING:
    from magi_core.mask import Mask as Mask
    from magi_core.mask_type import AttnMaskType as AttnMaskType
    from magi_core.ranges import AttnRange as AttnRange
    from magi_core.ranges import AttnRanges as AttnRanges
    from magi_core.ranges import RangeError as RangeError
    from magi_core.ranges import check_valid_cu_seqlens as check_valid_cu_seqlens
    from magi_core.ranges import is_valid_cu_seqlens as is_valid_cu_seqlens
    from magi_core.rectangles import AttnMask as AttnMask
    from magi_core.rectangles import AttnRectangle as AttnRectangle
    from magi_core.rectangles import AttnRectangles as AttnRectangles

USE_CPP_BACKEND = True
"""Sets of ranges and bands are computed by the host library, always; the public switch between two implementations
(``MAGI_ATTENTION_CPP_BACKEND``) has nothing to switch here."""

_LAZY = {
    "AttnMask": "magi_core.rectangles",
    "AttnMaskType": "magi_core.mask_type",
    "AttnRange": "magi_core.ranges",
    "AttnRanges": "magi_core.ranges",
    "AttnRectangle": "magi_core.rectangles",
    "AttnRectangles": "magi_core.rectangles",
    "Mask": "magi_core.mask",
    "RangeError": "magi_core.ranges",
    "check_valid_cu_seqlens": "magi_core.ranges",
    "is_valid_cu_seqlens": "magi_core.ranges",
}

__all__ = [
    "USE_CPP_BACKEND",
    "AttnMask",
    "AttnMaskType",
    "AttnRange",
    "AttnRanges",
    "AttnRectangle",
    "AttnRectangles",
    "Mask",
    "RangeError",
    "check_valid_cu_seqlens",
    "enum",
    "is_valid_cu_seqlens",
]

__getattr__, __dir__ = lazy_names(__name__, _LAZY)
