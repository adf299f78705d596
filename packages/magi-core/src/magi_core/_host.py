"""The host library, libmagi_core_host: bands, plans and the distributed planner in C++, bound with tvm-ffi.

It is loaded at first use, never at import. Functions take C-contiguous CPU arrays (numpy) and return tvm-ffi tensors,
which ``array`` turns into numpy arrays without a copy.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_NAMES = {"darwin": "libmagi_core_host.dylib", "win32": "magi_core_host.dll"}
LIBRARY_PATH = Path(__file__).resolve().parent / _NAMES.get(sys.platform, "libmagi_core_host.so")


@functools.lru_cache(maxsize=1)
def lib() -> Any:
    """The loaded library; its exports are attributes. Raises ImportError naming the wheel when it is missing."""
    if not LIBRARY_PATH.is_file():
        raise ImportError(
            f"the host library of magi-core is missing ({LIBRARY_PATH}): install the magi-core wheel, or build the "
            "source tree with `pip install packages/magi-core`"
        )
    try:
        import tvm_ffi
    except ImportError as error:
        raise ImportError("magi-core needs apache-tvm-ffi to load its host library: pip install magi-core") from error
    try:
        return tvm_ffi.load_module(str(LIBRARY_PATH))
    except Exception as error:
        raise ImportError(f"the host library of magi-core could not be loaded from {LIBRARY_PATH}: {error}") from error


def array(tensor: Any) -> npt.NDArray[Any]:
    """A numpy view of a CPU tensor that the library returned; it keeps the tensor alive."""
    view: npt.NDArray[Any] = np.from_dlpack(tensor)
    return view
