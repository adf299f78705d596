"""Loader of the arch wheels (``magi-core-sm90`` and its siblings) and the interface that they implement.

**What an arch wheel is.** A ``py3-none-<platform>`` wheel without torch: one shared library bound with tvm-ffi, and a
Python module named by an entry point of group ``magi_core.arch``::

    [project.entry-points."magi_core.arch"]
    sm90 = "magi_core_sm90"

The module (its import loads nothing native) has these attributes:

``__version__: str``
    Must equal ``magi_core.__version__``; anything else is refused when the wheel is loaded.
``COMPUTE_CAPABILITIES: tuple[tuple[int, int], ...]``
    Devices whose machine code (or PTX) the library carries, as ``(major, minor)``; exact matches only.
``PLAN_FORMAT: int``
    ``magi::plan::kVersion`` that the library was compiled with. Must equal :data:`PLAN_FORMAT` here.
``library_path() -> str``
    Where the shared library lies.
``load() -> tvm_ffi.Module``
    Loads it (once) and gives the module; ``ImportError`` where the loader cannot.

**What the library exports.** Functions of the tvm-ffi module, called with torch tensors of one device, on torch's
current stream, with this device current; each validates and throws ``ValueError``/``TypeError``/
``NotImplementedError``. A wheel may lack functions: a caller who needs one gets ``NotImplementedError`` naming it.
Shapes as in :mod:`magi_core.schemas`; ``plan`` is an int32 device tensor holding a FlexPlan buffer. ``None`` is
allowed where said. ``sink_layout`` is 0 for ``sh``, 1 for ``ssh``.

``attn_fwd(out, out_acc | None, lse, max_logits | None, q, k, v, plan, sink | None, sink_layout, softmax_scale, softcap,
sm_margin)``
    One stage forward. Tiles flagged first read no state and apply the sink; tiles flagged last write ``out``; the
    others write ``out_acc`` (float32). ``max_logits`` (float32, filled with -inf or an earlier stage's) is raised.
``attn_bwd_prepare(delta, dout, out, lse, dlse | None)``
    ``delta = sum_d(dout * out) - dlse``, float32 ``(total_q, num_heads_q)``; 0 where lse is infinite.
``dq_workspace_words(total_q, num_heads_q, head_dim) -> int``
    float32 elements of the opaque dq accumulator.
``attn_bwd(dq_workspace, dk, dv, dout, q, k, v, lse, delta, plan, softmax_scale, softcap, deterministic, sm_margin)``
    One stage backward: adds to the dq accumulator, stores every element of ``dk`` and ``dv``.
``dq_convert(dq, dq_workspace)``
    The accumulator in the dtype and layout of ``dq``.
``plan_device(plan, q_ranges, k_ranges, mask_types | None, total_q, total_k, block_m, block_n, bwd_block_m,
bwd_block_n)``
    Plans ranges that are device tensors into ``plan`` (``plan_capacity_words`` int32) without a synchronisation.
``plan_capacity_words(num_slices, total_q, total_k, block_m, block_n, bwd_block_m, bwd_block_n) -> int``

Source: ours (design sections 2 and 3).
"""

from __future__ import annotations

import functools
import importlib.metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "ENTRY_POINT_GROUP",
    "PLAN_FORMAT",
    "ArchLibrary",
    "ArchNotInstalledError",
    "arch_for_capability",
    "installed_archs",
    "library_for_device",
    "load_arch",
]

ENTRY_POINT_GROUP = "magi_core.arch"
PLAN_FORMAT = 1  # magi::plan::kVersion

# Which wheel serves which compute capability. sm80's library carries SASS for 8.x and PTX for everything later.
_ARCH_OF_MAJOR = {8: "sm80", 9: "sm90", 10: "sm100", 12: "sm100"}


class ArchNotInstalledError(ImportError):
    """The wheel with the kernels for a GPU is missing or does not fit; the message names the extra to install."""


class ArchLibrary:
    """A loaded arch wheel: its module, its native functions, and what it serves."""

    def __init__(self, name: str, module: ModuleType) -> None:
        self.name = name
        self.module = module
        self.version: str = module.__version__
        self.capabilities: tuple[tuple[int, int], ...] = tuple(module.COMPUTE_CAPABILITIES)
        self.native: Any = module.load()

    def has(self, function: str) -> bool:
        """Whether the library exports ``function``."""
        try:
            self.native[function]
        except (AttributeError, KeyError):
            return False
        return True

    def function(self, function: str) -> Any:
        """The exported function.

        Raises:
            NotImplementedError: this release of the wheel has no such kernel.
        """
        try:
            return self.native[function]
        except (AttributeError, KeyError):
            raise NotImplementedError(
                f"magi-core-{self.name} {self.version} has no {function!r} kernel; "
                f'pass backend="reference" for the blockwise torch backend'
            ) from None

    def __repr__(self) -> str:
        return f"ArchLibrary({self.name!r}, version={self.version!r}, capabilities={self.capabilities})"


def arch_for_capability(major: int, minor: int) -> str:
    """Name of the arch wheel (and extra) that serves a compute capability.

    Raises:
        NotImplementedError: no wheel does.
    """
    try:
        return _ARCH_OF_MAJOR[major]
    except KeyError:
        raise NotImplementedError(
            f"no magi-core arch wheel serves compute capability {major}.{minor}; compute capabilities 8.x, 9.x, 10.x "
            f'and 12.x have one. backend="reference" runs on any device'
        ) from None


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}


def installed_archs() -> tuple[str, ...]:
    """Names of the arch wheels that are installed, sorted; nothing is imported or loaded."""
    return tuple(sorted(_entry_points()))


def _core_version() -> str:
    import magi_core

    return str(magi_core.__version__)


@functools.cache
def load_arch(name: str) -> ArchLibrary:
    """Load an arch wheel by name (``"sm90"``) and check that it belongs to this ``magi_core``.

    Raises:
        ArchNotInstalledError: not installed, of another version, of another plan format, or its library does not
            load; the message says which, and what to install.
    """
    point = _entry_points().get(name)
    hint = f"pip install 'magi-core[{name}]'"
    if point is None:
        raise ArchNotInstalledError(
            f"the {name} kernels are not installed: {hint} (installed: {', '.join(installed_archs()) or 'none'})"
        )
    try:
        module = point.load()
    except ImportError as error:
        raise ArchNotInstalledError(f"the {name} wheel does not import ({error}): {hint}") from error
    ours = _core_version()
    if module.__version__ != ours:
        raise ArchNotInstalledError(
            f"magi-core-{name} {module.__version__} does not fit magi-core {ours}: "
            f"pip install 'magi-core[{name}]=={ours}'"
        )
    if module.PLAN_FORMAT != PLAN_FORMAT:
        raise ArchNotInstalledError(
            f"magi-core-{name} reads plan format {module.PLAN_FORMAT}, magi-core {ours} writes {PLAN_FORMAT}: {hint}"
        )
    try:
        return ArchLibrary(name, module)
    except (ImportError, OSError, RuntimeError) as error:
        raise ArchNotInstalledError(f"the library of magi-core-{name} does not load ({error}): {hint}") from error


def library_for_device(device: torch.device) -> ArchLibrary:
    """The arch wheel for a CUDA device.

    Raises:
        ArchNotInstalledError: the wheel is missing; names the extra to install.
        NotImplementedError: no wheel serves the device, or the installed one lacks its compute capability.
    """
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    library = load_arch(arch_for_capability(major, minor))
    if (major, minor) not in library.capabilities:
        raise NotImplementedError(
            f"magi-core-{library.name} serves compute capabilities "
            f"{', '.join(f'{a}.{b}' for a, b in library.capabilities)}, got {major}.{minor}"
        )
    return library
