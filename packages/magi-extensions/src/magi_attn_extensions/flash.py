"""The public names of FlashAttention with sink.

This release has their names and their providers, not yet the correction around each provider's kernels: a call names
the missing package, or, where it is installed, says that the function is not in this release.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from .providers import PROVIDERS

NAMES = (
    "fa2_func_with_sink",
    "fa2_kvpacked_func_with_sink",
    "fa2_qkvpacked_func_with_sink",
    "fa2_varlen_func_with_sink",
    "fa2_varlen_kvpacked_func_with_sink",
    "fa2_varlen_qkvpacked_func_with_sink",
    "fa3_func_with_sink",
    "fa3_qkvpacked_func_with_sink",
    "fa3_varlen_func_with_sink",
    "fa4_func_with_sink",
    "fa4_varlen_func_with_sink",
)


def _announced(name: str) -> Callable[..., NoReturn]:
    provider = PROVIDERS[name[:3]]

    def function(*args: Any, **kwargs: Any) -> NoReturn:
        provider.require(name)
        raise NotImplementedError(
            f"{name} is not in this release of magi-extensions; magi_core.flex_flash_attn_func(..., sink=) has sinks"
        )

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{name}: announced. Raises ProviderNotInstalledError, or NotImplementedError in this release."
    return function


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function = _announced(name)
    globals()[name] = function
    return function
