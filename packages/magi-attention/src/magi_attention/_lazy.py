"""Names of a package resolved on first use, so that importing it costs nothing and needs nothing."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, table: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``package``.

    Args:
        package: ``__name__`` of the package.
        table: public name to the module that defines it, absolute or relative to ``package``.
    """

    def get(name: str) -> Any:
        if name not in table:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(table[name], package), name)
        setattr(sys.modules[package], name, value)  # found once
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *table})

    return get, names
