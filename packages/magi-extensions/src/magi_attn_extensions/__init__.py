"""FlashAttention 2, 3 and 4 with attention sink, and sparse attention layers.

Every public name exists always. Importing this package imports neither torch nor a provider; what is missing is named
at the first call that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .dsa import dsa_attn_func as dsa_attn_func
    from .providers import ProviderNotInstalledError as ProviderNotInstalledError
    from .providers import installed_providers as installed_providers

_HOME = {
    "ProviderNotInstalledError": "providers",
    "dsa_attn_func": "dsa",
    "fa2_func_with_sink": "flash",
    "fa2_kvpacked_func_with_sink": "flash",
    "fa2_qkvpacked_func_with_sink": "flash",
    "fa2_varlen_func_with_sink": "flash",
    "fa2_varlen_kvpacked_func_with_sink": "flash",
    "fa2_varlen_qkvpacked_func_with_sink": "flash",
    "fa3_func_with_sink": "flash",
    "fa3_qkvpacked_func_with_sink": "flash",
    "fa3_varlen_func_with_sink": "flash",
    "fa4_func_with_sink": "flash",
    "fa4_varlen_func_with_sink": "flash",
    "installed_providers": "providers",
    "lightning_indexer": "dsa",
    "indexer_scores": "dsa",
    "provider": "providers",
    "slice_sink_heads": "heads",
    "use_provider": "providers",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value  # also over a submodule of the same name
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
