"""References in plain PyTorch, and helpers of tests."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..dropout.api import recompute_mask as recompute_mask
    from ..dropout.reference import philox_keep_mask as philox_keep_mask

_HOME = {"philox_keep_mask": "..dropout.reference", "recompute_mask": "..dropout.api"}
__all__ = ["philox_keep_mask", "recompute_mask"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value
