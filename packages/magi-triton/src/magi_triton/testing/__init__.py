"""References in plain PyTorch, and helpers of tests."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..dropout.api import recompute_mask as recompute_mask
    from ..dropout.reference import philox_keep_mask as philox_keep_mask
    from ..flash.reference import attention as attention
    from ..flash.reference import flash_attention as flash_attention
    from ..paged.reference import paged_attention as paged_attention
    from ..piecewise.reference import piecewise_attention as piecewise_attention
    from ..split_kv.reference import flash_attention_split_kv as flash_attention_split_kv
    from .budget import assert_within_budget as assert_within_budget

_HOME = {
    "assert_within_budget": ".budget",
    "attention": "..flash.reference",
    "flash_attention": "..flash.reference",
    "philox_keep_mask": "..dropout.reference",
    "flash_attention_split_kv": "..split_kv.reference",
    "paged_attention": "..paged.reference",
    "piecewise_attention": "..piecewise.reference",
    "recompute_mask": "..dropout.api",
}
__all__ = [
    "piecewise_attention",
    "paged_attention",
    "flash_attention_split_kv",
    "assert_within_budget",
    "attention",
    "flash_attention",
    "philox_keep_mask",
    "recompute_mask",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value
