"""The operators of this package: name, where each lives, and whether a call would work here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .runtime.device import BackendInfo, backend_info


@dataclass(frozen=True)
class Support:
    """Answer of :func:`supports`; true when the call would work, else ``reason`` says why not."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Operator:
    """One operator.

    Attributes:
        name: public name.
        module, attribute: where the callable lives, relative to this package; imported at first use.
        accepts: ``(machine, shape) -> reason or None``; the shape is what the caller passed to :func:`supports`.
        shape_names: keywords that ``accepts`` understands.
    """

    name: str
    module: str
    attribute: str
    accepts: Callable[[BackendInfo, dict[str, Any]], str | None]
    shape_names: frozenset[str]

    def load(self) -> Callable[..., Any]:
        """The callable itself."""
        loaded: Callable[..., Any] = getattr(importlib.import_module(self.module, __package__), self.attribute)
        return loaded


def _accepts_recompute_mask(machine: BackendInfo, shape: dict[str, Any]) -> str | None:
    p = shape.get("dropout_p", 0.0)
    return None if 0.0 <= p < 1.0 else f"dropout_p must be in [0, 1), got {p}"


_OPERATORS = {
    "recompute_mask": Operator(
        "recompute_mask",
        ".dropout.api",
        "recompute_mask",
        _accepts_recompute_mask,
        frozenset({"B", "H", "M", "N", "dropout_p"}),
    )
}


def operators() -> tuple[str, ...]:
    """Names of the operators in this release, sorted."""
    return tuple(sorted(_OPERATORS))


def supports(name: str, **shape: Any) -> Support:
    """Whether operator ``name`` works on this machine, for a shape.

    Args:
        name: one of :func:`operators`.
        shape: sizes and options of the call, by the operator's own argument names.

    Raises:
        ValueError: no such operator, or a keyword that it does not have.
    """
    if name not in _OPERATORS:
        raise ValueError(f"operator must be one of {', '.join(operators())}, got {name!r}")
    operator = _OPERATORS[name]
    unknown = sorted(set(shape) - operator.shape_names)
    if unknown:
        raise ValueError(f"{name} has {', '.join(sorted(operator.shape_names))}, got {', '.join(unknown)}")
    machine = backend_info()
    reason = machine.why_not() or operator.accepts(machine, shape)
    return Support(reason is None, reason or "")
