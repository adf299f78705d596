"""The FlashAttention packages that functions with sink are built on: which are here, and how to get the others."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


class ProviderNotInstalledError(ImportError):
    """A FlashAttention package is missing; the message names what to install."""


@dataclass(frozen=True)
class Provider:
    """A package of kernels.

    Attributes:
        name: ``"fa2"``, ``"fa3"`` or ``"fa4"``.
        module: what it imports as.
        install: the command that brings it.
    """

    name: str
    module: str
    install: str

    def installed(self) -> bool:
        """Whether it can be found; nothing is imported but its parent packages."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # the parent package of a dotted module is missing
            return False

    def require(self, function: str) -> None:
        """Raise :class:`ProviderNotInstalledError`, naming ``function``, when the package is missing."""
        if not self.installed():
            raise ProviderNotInstalledError(f"{function} needs the package {self.module!r}: {self.install}")


PROVIDERS = {
    "fa2": Provider("fa2", "flash_attn", "pip install 'magi-extensions[fa2]'"),
    "fa3": Provider(
        "fa3", "flash_attn_3", "build `hopper/` of the flash-attention repository (it has no wheel on PyPI)"
    ),
    "fa4": Provider("fa4", "flash_attn.cute", "pip install 'magi-extensions[fa4]'"),
}


def installed_providers() -> dict[str, bool]:
    """Name of each provider -> whether it is installed."""
    return {name: provider.installed() for name, provider in PROVIDERS.items()}
