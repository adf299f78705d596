"""Attention over slices: masks, plans and flex flash attention on any device.

Importing this package imports neither torch nor any optional dependency; names arrive at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .bands import Bands as Bands
    from .flex_attn import AttnForwardMeta as AttnForwardMeta
    from .flex_attn import flex_flash_attn_func as flex_flash_attn_func
    from .mask import Mask as Mask
    from .mask_type import AttnMaskType as AttnMaskType
    from .mask_type import GeneralAttnMaskType as GeneralAttnMaskType
    from .plan import FlexPlan as FlexPlan
    from .ranges import AttnRange as AttnRange
    from .ranges import AttnRanges as AttnRanges
    from .ranges import RangeError as RangeError
    from .rectangles import AttnMask as AttnMask
    from .rectangles import AttnRectangle as AttnRectangle
    from .rectangles import AttnRectangles as AttnRectangles

# Where each public name lives; the module is imported when the name is first asked for.
_HOME = {
    "AttnForwardMeta": "flex_attn",
    "AttnMask": "rectangles",
    "AttnMaskType": "mask_type",
    "AttnRange": "ranges",
    "AttnRanges": "ranges",
    "AttnRectangle": "rectangles",
    "AttnRectangles": "rectangles",
    "Bands": "bands",
    "FlexPlan": "plan",
    "GeneralAttnMaskType": "mask_type",
    "Mask": "mask",
    "RangeError": "ranges",
    "flex_flash_attn_func": "flex_attn",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
