"""Whose kernels run: which FlashAttention packages are here, which one serves a call, and how to get the others."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = [
    "CHOICES",
    "PROVIDERS",
    "Provider",
    "ProviderNotInstalledError",
    "choose",
    "forced",
    "installed_providers",
    "provider",
    "use_provider",
]


class ProviderNotInstalledError(ImportError):
    """A FlashAttention package is missing; the message names what to install."""


@dataclass(frozen=True)
class Provider:
    """A package of kernels.

    Attributes:
        name: ``"fa2"``, ``"fa3"`` or ``"fa4"``.
        module: what it imports as.
        install: the command that brings it.
        choice: what :func:`provider` calls it.
    """

    name: str
    module: str
    install: str
    choice: str = ""

    def installed(self) -> bool:
        """Whether it can be found; nothing is imported but its parent packages."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # the parent package of a dotted module is missing
            return False

    def require(self, function: str) -> None:
        """Raise :class:`ProviderNotInstalledError`, naming ``function``, when the package is missing."""
        if not self.installed():
            raise ProviderNotInstalledError(
                f"{function} needs the package {self.module!r}: {self.install}; "
                f'for slow plain torch: magi_attn_extensions.use_provider("{self.name}", "reference")'
            )


PROVIDERS = {
    "fa2": Provider("fa2", "flash_attn", "pip install 'magi-extensions[fa2]'", "flash_attn"),
    "fa3": Provider(
        "fa3",
        "flash_attn_interface",
        "build `hopper/` of the flash-attention repository (it has no wheel on PyPI)",
        "flash_attn_3",
    ),
    "fa4": Provider("fa4", "flash_attn.cute", "pip install 'magi-extensions[fa4]'", "flash_attn_4"),
}

# What a family of functions may be served by; the first that fits the device is taken when none is forced.
CHOICES = {
    "fa2": ("flash_attn", "torch", "reference"),
    "fa3": ("flash_attn_3", "reference"),
    "fa4": ("flash_attn_4", "reference"),
}

# Plain data, so that a compiled graph guards on it.
_forced: dict[str, str | None] = dict.fromkeys(CHOICES)


def installed_providers() -> dict[str, bool]:
    """Name of each provider -> whether it is installed."""
    return {name: provider.installed() for name, provider in PROVIDERS.items()}


def forced(family: str) -> str | None:
    """What :func:`use_provider` forces, or None."""
    return _forced[family]


def choose(family: str, is_cuda: bool, function: str, choice: str | None) -> str:
    """The provider of one call; ``choice`` is the forced one.

    Raises:
        ProviderNotInstalledError: the forced one, or the only one for this device, is missing; names ``function``.
    """
    package = PROVIDERS[family]
    if choice is not None:
        if choice == package.choice:
            package.require(function)
        return choice
    if family == "fa2":
        if not is_cuda:
            return "reference"
        # flash_attn may be a bare namespace of FlashAttention-4: its FA2 interface is what counts.
        return package.choice if _has_fa2_package() else "torch"
    package.require(function)
    return package.choice


def _has_fa2_package() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.flash_attn_interface") is not None
    except ModuleNotFoundError:
        return False


def provider(family: str = "fa2", device: Any = None) -> str:
    """Whose kernels a function of ``family`` runs on tensors of ``device``.

    ``fa2``: ``"flash_attn"`` (the package), else ``"torch"`` (the FlashAttention-2 inside torch), and ``"reference"``
    (plain torch) for CPU tensors. ``fa3``: ``"flash_attn_3"``. ``fa4``: ``"flash_attn_4"``. Or the one that
    :func:`use_provider` forces.

    Args:
        device: a device or its name; None is the GPU where there is one, else the CPU.

    Raises:
        ValueError: an unknown family. ProviderNotInstalledError: none is installed; names what to install.
    """
    import torch

    if family not in CHOICES:
        raise ValueError(f"family must be one of {', '.join(CHOICES)}, got {family!r}")
    is_cuda = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    return choose(family, is_cuda, f"{family} functions", forced(family))


@contextlib.contextmanager
def use_provider(family: str, choice: str | None) -> Iterator[None]:
    """Force the provider of ``family`` inside a ``with`` block, for the process; None takes the force away.

    A backward runs on the provider of its forward.

    Raises:
        ValueError: an unknown family or choice.
    """
    if family not in CHOICES:
        raise ValueError(f"family must be one of {', '.join(CHOICES)}, got {family!r}")
    if choice is not None and choice not in CHOICES[family]:
        raise ValueError(f"choice must be None or one of {', '.join(CHOICES[family])} for {family}, got {choice!r}")
    before = _forced[family]
    _forced[family] = choice
    try:
        yield
    finally:
        _forced[family] = before
