"""The operators of this package: the one list from which tests, benchmarks and the inventory are made."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .runtime.device import BackendInfo, backend_info

Predicate = Callable[[BackendInfo, dict[str, Any]], str | None]


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
        summary: one line for the inventory.
        tests: test file under ``tests/``.
        gradient: has a backward.
        benchmark: shell pattern of its benchmark cases; empty when there is none.
        stage: ``"alpha"``, ``"beta"`` or ``"stable"``.
        priority: of several operators that serve one name, the highest that accepts is chosen.
    """

    name: str
    module: str
    attribute: str
    accepts: Predicate
    shape_names: frozenset[str]
    summary: str
    tests: str
    gradient: bool = False
    benchmark: str = ""
    stage: str = "alpha"
    priority: int = 0

    def load(self) -> Callable[..., Any]:
        """The callable itself."""
        loaded: Callable[..., Any] = getattr(importlib.import_module(self.module, __package__), self.attribute)
        return loaded


def _dropout(machine: BackendInfo, shape: dict[str, Any]) -> str | None:
    p = shape.get("dropout_p", 0.0)
    return None if 0.0 <= p < 1.0 else f"dropout_p must be in [0, 1), got {p}"


def _half(shape: dict[str, Any]) -> str | None:
    dtype = str(shape.get("dtype", "float16")).removeprefix("torch.")
    return None if dtype in ("float16", "bfloat16") else f"dtype must be float16 or bfloat16, got {dtype}"


def _heads(shape: dict[str, Any]) -> str | None:
    heads_q, heads_kv = shape.get("Hq", 1), shape.get("Hkv", 1)
    if "Hq" in shape and "Hkv" in shape and (heads_kv < 1 or heads_q % heads_kv):
        return f"Hq must be a multiple of Hkv, got {heads_q} and {heads_kv}"
    return None


def _head_dims(shape: dict[str, Any], largest: int = 256) -> str | None:
    for name in ("D", "Dv"):
        if name in shape and not 1 <= shape[name] <= largest:
            return f"{name} must be in [1, {largest}], got {shape[name]}"
    return None


def _attention(machine: BackendInfo, shape: dict[str, Any]) -> str | None:
    return _half(shape) or _heads(shape) or _head_dims(shape) or _dropout(machine, shape)


_DENSE = frozenset({"B", "Hq", "Hkv", "M", "N", "D", "dtype", "causal"})
_ALL = (
    Operator(
        "recompute_mask", ".dropout.api", "recompute_mask", _dropout, frozenset({"B", "H", "M", "N", "dropout_p"}),
        "the dropout mask of attention from seed and offset", "test_dropout_mask.py",
    ),
    Operator(
        "flash_attention", ".flash.api", "flash_attention", _attention,
        _DENSE | {"dropout_p"},
        "softmax attention with GQA, dropout, softcap, window and sink", "test_flash.py", True, "triton/flash/*",
        "stable",
    ),
    Operator(
        "flash_attention_varlen", ".flash.api", "flash_attention_varlen", _attention,
        _DENSE | {"dropout_p"},
        "the same within packed sequences", "test_flash.py", True,
    ),
    Operator(
        "flash_attention_split_kv", ".split_kv.api", "flash_attention_split_kv", _attention, _DENSE,
        "softmax attention of few queries, keys split over programs", "test_decode.py", False, "triton/decode/*",
    ),
    Operator(
        "paged_attention", ".paged.api", "paged_attention", _attention,
        frozenset({"Hq", "Hkv", "D", "dtype", "block_size"}),
        "decode over a paged cache, float8 caches too", "test_decode.py", False, "triton/decode/*",
    ),
    Operator(
        "diffkv_attention", ".diffkv.api", "diffkv_attention", _attention,
        frozenset({"Hq", "Hkv", "D", "Dv", "dtype"}),
        "decode over a paged cache with keys and values of different head dims", "test_decode.py",
    ),
    Operator(
        "piecewise_attention", ".piecewise.api", "piecewise_attention", _attention, _DENSE,
        "softmax attention with near and far pairs of queries and keys", "test_piecewise.py", True,
        "triton/piecewise/*", "stable",
    ),
    Operator(
        "sage_attention.per_block_int8", ".sage_attention.api", "per_block_int8", _attention,
        frozenset({"Hq", "Hkv", "D", "dtype"}), "int8 queries and keys with a scale per block", "test_sage.py",
    ),
    Operator(
        "sage_attention.forward", ".sage_attention.api", "forward", _attention,
        frozenset({"Hq", "Hkv", "D", "dtype"}), "attention from int8 queries and keys", "test_sage.py",
    ),
    Operator(
        "forgetting_attention", ".forgetting_attention.api", "forgetting_attention", _attention, _DENSE,
        "causal attention whose logits decay by gates", "test_forgetting.py", True,
    ),
)  # fmt: skip
_OPERATORS = {operator.name: operator for operator in sorted(_ALL, key=lambda operator: operator.priority)}


def operators() -> tuple[str, ...]:
    """Names of the operators in this release, sorted."""
    return tuple(sorted(_OPERATORS))


def operator(name: str) -> Operator:
    """The entry of an operator.

    Raises:
        ValueError: no such operator.
    """
    if name not in _OPERATORS:
        raise ValueError(f"operator must be one of {', '.join(operators())}, got {name!r}")
    return _OPERATORS[name]


def supports(name: str, **shape: Any) -> Support:
    """Whether operator ``name`` works on this machine, for a shape.

    Args:
        name: one of :func:`operators`.
        shape: sizes and options of the call, by the operator's own argument names.

    Raises:
        ValueError: no such operator, or a keyword that it does not have.
    """
    found = operator(name)
    unknown = sorted(set(shape) - found.shape_names)
    if unknown:
        raise ValueError(f"{name} has {', '.join(sorted(found.shape_names))}, got {', '.join(unknown)}")
    machine = backend_info()
    reason = machine.why_not() or found.accepts(machine, shape)
    return Support(reason is None, reason or "")
