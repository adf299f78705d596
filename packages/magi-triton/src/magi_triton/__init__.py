"""Attention operators in Triton.

Importing this package imports neither torch nor Triton and looks at no device; names arrive at first use.
``operators()`` lists what this release has; ``supports(name, **shape)`` says whether a call would work, and why not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from . import forgetting_attention as forgetting_attention
    from . import runtime as runtime
    from . import sage_attention as sage_attention
    from . import testing as testing
    from .diffkv.api import diffkv_attention as diffkv_attention
    from .flash.api import flash_attention as flash_attention
    from .flash.api import flash_attention_varlen as flash_attention_varlen
    from .paged.api import paged_attention as paged_attention
    from .piecewise.api import piecewise_attention as piecewise_attention
    from .registry import Support as Support
    from .registry import operators as operators
    from .registry import supports as supports
    from .runtime.device import BackendInfo as BackendInfo
    from .split_kv.api import flash_attention_split_kv as flash_attention_split_kv

# name -> (module, attribute; None for the module itself)
_HOME = {
    "BackendInfo": ("runtime.device", "BackendInfo"),
    "flash_attention": ("flash.api", "flash_attention"),
    "flash_attention_varlen": ("flash.api", "flash_attention_varlen"),
    "flash_attention_split_kv": ("split_kv.api", "flash_attention_split_kv"),
    "paged_attention": ("paged.api", "paged_attention"),
    "diffkv_attention": ("diffkv.api", "diffkv_attention"),
    "piecewise_attention": ("piecewise.api", "piecewise_attention"),
    "sage_attention": ("sage_attention", None),
    "forgetting_attention": ("forgetting_attention", None),
    "Support": ("registry", "Support"),
    "operators": ("registry", "operators"),
    "supports": ("registry", "supports"),
    "runtime": ("runtime", None),
    "testing": ("testing", None),
}
# Facts of the machine, looked up when first asked for.
_FACTS = {"device": "device", "vendor": "vendor_name", "vendor_name": "vendor_name"}

__all__ = ["__version__", "backend_info", *_HOME, *_FACTS]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        module, attribute = _HOME[name]
        value = importlib.import_module(f".{module}", __name__)
        if attribute is not None:
            value = getattr(value, attribute)
    elif name == "backend_info" or name in _FACTS:
        value = importlib.import_module(".runtime.device", __name__).backend_info()
        if name in _FACTS:
            value = getattr(value, _FACTS[name])
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
