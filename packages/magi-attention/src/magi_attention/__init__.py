"""Distributed attention over slices.

A mask is a list of slices; a *key* is a plan of that mask over the ranks of a group; every other call takes the key::

    key = magi_attn_flex_key(...)            # plans: who computes what, which keys travel where
    local_q = dispatch(q, key)               # global -> this rank's tokens
    out, meta = calc_attn(local_q, local_k, local_v, key)
    out = undispatch(out, key)               # local -> global

Importing this package imports neither torch nor any optional dependency: names are resolved on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._lazy import lazy_names
from ._version import __version__

if TYPE_CHECKING:
    from .api import init_dist_attn_runtime_key as init_dist_attn_runtime_key
    from .api import init_dist_attn_runtime_mgr as init_dist_attn_runtime_mgr
    from .explanation import explain as explain

_SUBPACKAGES = ("api", "comm", "common", "config", "env", "functional", "utils")

__all__ = ["__version__", "explain", "init_dist_attn_runtime_key", "init_dist_attn_runtime_mgr"]

_get, __dir__ = lazy_names(
    __name__,
    {"init_dist_attn_runtime_key": ".api", "init_dist_attn_runtime_mgr": ".api", "explain": ".explanation"},
)


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f".{name}", __name__)
    return _get(name)
