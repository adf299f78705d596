"""Flex flash attention kernels for Hopper (sm_90a): one tvm-ffi library, loaded on first use.

``magi_core`` finds this module by its entry point (group ``magi_core.arch``); what each name means is said in
``magi_core.backends.arch``. Importing it loads nothing native.
"""

from __future__ import annotations

import functools
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm_ffi import Module

__all__ = ["COMPUTE_CAPABILITIES", "PLAN_FORMAT", "__version__", "library_path", "load"]

__version__ = version("magi-core-sm90")
COMPUTE_CAPABILITIES = ((9, 0),)
PLAN_FORMAT = 1  # magi::plan::kVersion; load() checks it against the library


def library_path() -> str:
    """Path of the shared library in the installed wheel."""
    return str(files(__name__) / "libmagi_core_sm90.so")


@functools.cache
def load() -> Module:
    """Load the library, once.

    Raises:
        ImportError: the library does not load, or it is of another version or plan format than this module.
    """
    import tvm_ffi

    # Not among the kinds that tvm-ffi maps to Python's classes by itself.
    tvm_ffi.register_error("NotImplementedError", NotImplementedError)
    try:
        module = tvm_ffi.load_module(library_path())
    except Exception as error:  # the loader's own class differs between tvm-ffi releases
        raise ImportError(f"{library_path()} does not load: {error}") from error
    built = str(module["magi_version"]()), int(module["magi_plan_format"]())
    if built != (__version__, PLAN_FORMAT):
        raise ImportError(
            f"{library_path()} is version {built[0]} with plan format {built[1]}, but magi-core-sm90 is "
            f"{__version__} with plan format {PLAN_FORMAT}: reinstall magi-core-sm90=={__version__}"
        )
    return module
