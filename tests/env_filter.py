"""Choose parametrised tests from the environment: ``MAGI_ATTENTION_TEST_<DIMENSION>`` for every dimension.

A dimension is the name of a parametrised argument, or a field of one that is a dataclass or a mapping. The variable
holds shell-style patterns separated by commas, matched against the value's text without regard to case; dimensions
combine with AND. See README.md beside this file.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

PREFIX = "MAGI_ATTENTION_TEST_"
NOT_DIMENSIONS = {"NIGHTLY"}
"""Variables of the prefix that choose something else than values."""


def text_of(value: Any) -> str:
    """What a pattern is matched against: the name of what has one, the parts of a tuple joined by ``_``."""
    if isinstance(value, Mapping) and "name" in value:
        return str(value["name"])
    if isinstance(value, (tuple, list)):
        return "_".join(text_of(part) for part in value)
    if isinstance(value, Enum):
        return str(value.value)
    name = getattr(value, "name", None) or getattr(value, "__name__", None)
    text = name if isinstance(name, str) else str(value)
    return text.removeprefix("torch.")


def dimensions(params: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """``(DIMENSION, text)`` of every parametrised argument and of the fields inside."""
    for name, value in params.items():
        yield name.upper(), text_of(value)
        fields: Mapping[str, Any] = {}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        elif isinstance(value, Mapping):
            fields = value
        for field, inner in fields.items():
            yield str(field).upper(), text_of(inner)


def filters(environ: Mapping[str, str] | None = None) -> dict[str, list[str]]:
    """Dimension -> patterns, of the variables that are set."""
    environ = os.environ if environ is None else environ
    chosen = {}
    for name, value in environ.items():
        dimension = name.removeprefix(PREFIX)
        if dimension != name and dimension not in NOT_DIMENSIONS and value.strip():
            chosen[dimension] = [part.strip().lower() for part in value.split(",") if part.strip()]
    return chosen


def is_chosen(params: Mapping[str, Any], chosen: Mapping[str, list[str]]) -> bool:
    """Whether the values of one test pass every filter on a dimension that it has."""
    for dimension, text in dimensions(params):
        patterns = chosen.get(dimension)
        if patterns and not any(fnmatchcase(text.lower(), pattern) for pattern in patterns):
            return False
    return True


def is_nightly(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the full products are asked for instead of the covering sets: ``MAGI_ATTENTION_TEST_NIGHTLY=1``.

    Raises:
        ValueError: neither 0 nor 1.
    """
    environ = os.environ if environ is None else environ
    value = environ.get(PREFIX + "NIGHTLY", "").strip() or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{PREFIX}NIGHTLY must be 0 or 1, got {value!r}")
    return value == "1"
