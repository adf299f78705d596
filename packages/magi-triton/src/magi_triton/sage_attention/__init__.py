"""SageAttention: int8 products of queries and keys. ``per_block_int8`` quantises, ``forward`` attends."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import forward as forward
    from .api import per_block_int8 as per_block_int8

__all__ = ["forward", "per_block_int8"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(".api", __name__), name)
    globals()[name] = value
    return value
