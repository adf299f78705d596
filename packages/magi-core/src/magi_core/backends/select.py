"""Which backend runs: asked for by name, or by the device of the tensors. There is no silent fall-back."""

from __future__ import annotations

import torch

from .arch import ArchLibrary, library_for_device

__all__ = ["BACKENDS", "REFERENCE", "select_backend"]

REFERENCE = "reference"
# "ffa" is the compiled kernel of the GPU's arch; the public names "sdpa" and "sdpa_ol" are served by "reference".
BACKENDS = (REFERENCE, "ffa", "sdpa", "sdpa_ol", "fa4")


def select_backend(backend: str | None, device: torch.device, dtype: torch.dtype) -> ArchLibrary | None:
    """The library of compiled kernels to call, or None for the blockwise torch backend.

    Args:
        backend: a name of :data:`BACKENDS`; None or ``""`` picks the arch wheel for CUDA tensors and ``reference`` for
            CPU tensors.

    Raises:
        ValueError: an unknown name. NotImplementedError: the backend does not take this device or dtype.
        ArchNotInstalledError: the arch wheel of a CUDA device is missing; names the extra to install.
    """
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend must be None or a str, got {type(backend).__name__} {backend!r}")
    name = backend or ("ffa" if device.type == "cuda" else REFERENCE if device.type == "cpu" else "")
    if not name:
        raise NotImplementedError(
            f'backend=None serves cpu and cuda tensors, got {device}; backend="reference" runs on any device'
        )
    if name not in BACKENDS:
        raise ValueError(f"backend must be None or one of {', '.join(BACKENDS)}, got {backend!r}")
    if name == "fa4":
        raise NotImplementedError('backend="fa4" is not in this release; use backend=None or backend="reference"')
    if name != "ffa":
        return None
    if device.type != "cuda":
        raise NotImplementedError(f'backend="ffa" runs on cuda tensors, got {device}; use backend="reference"')
    if dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError(
            f"the compiled kernels take float16 and bfloat16, got {dtype} on {device}; "
            'pass backend="reference" for the blockwise torch backend'
        )
    return library_for_device(device)
