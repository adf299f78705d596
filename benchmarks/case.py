"""What a benchmark is. A file under ``benchmarks/cases/`` registers its cases when it is imported:

    from ..case import Case, Check, Setup, register

    def causal(seqlen: int) -> Case:
        def setup() -> Setup:                     # called only when the case runs, so data is made here
            q, k, v = ...
            return Setup(
                implementations={"magi": lambda: ours(q, k, v), "sdpa": lambda: rival(q, k, v)},
                verify=lambda name, result: Check(error=..., budget=..., against="fp64"),
            )
        return Case(name=f"cpu_attn/causal/s{seqlen}", operator="attn_fwd", setup=setup, flops=4.0 * area * heads * dim,
                    params={"mask": "causal", "seqlen": seqlen}, bounds={"ratio:sdpa": 1.5})

    register(causal(4096))

Importing a case file must need no GPU and no rival: a rival that is not installed is left out of ``implementations``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

OURS = "magi"


@dataclass(frozen=True)
class Check:
    """The correctness gate of one implementation: the case is refused when ``error > budget``."""

    error: float
    budget: float
    against: str  # "fp64", or the name of the rival that served as reference

    @property
    def passed(self) -> bool:
        """True when the error is a number within the budget."""
        return self.error <= self.budget  # False for NaN


@dataclass(frozen=True)
class Setup:
    """Data made, ready to be timed.

    Args:
        implementations: name -> one repetition. ``"magi"`` is ours; all others are rivals. They alternate in one
            process. What a repetition returns is given to ``verify`` once.
        verify: ``(name, result of one repetition) -> Check``; runs before anything is timed.
        measures: further figures, each taken once after the timing, e.g. ``{"peak_extra_mib": peak}``.
        before: run untimed before every repetition (clear gradients, flush a cache).
    """

    implementations: Mapping[str, Callable[[], Any]]
    verify: Callable[[str, Any], Check]
    measures: Mapping[str, Callable[[], float]] = field(default_factory=dict)
    before: Callable[[], None] | None = None


@dataclass(frozen=True)
class Case:
    """One row of the registry.

    Args:
        name: path-like and unique, e.g. ``"cpu_attn/causal/s4096"``; ``run`` selects by shell pattern on it.
        operator: ``"attn_fwd"``, ``"attn_bwd"``, ``"attn_fwd_bwd"``, ``"plan"``, …; ``run`` selects by it too.
        setup: makes the data.
        params: what is needed to read the result line: mask, seqlen, heads, head_dim, dtype.
        flops: floating point operations of one repetition, from the mask's true area; None where that says nothing.
        device: ``"cuda"`` cases are skipped, aloud, on a machine without one.
        bounds: what the project promises: ``"ratio:<rival>"`` (median of ours / median of the rival) or the name of a
            measure -> largest allowed value. A run outside its bounds exits with status 1.
        threads: torch threads on the CPU.
    """

    name: str
    operator: str
    setup: Callable[[], Setup]
    params: Mapping[str, Any] = field(default_factory=dict)
    flops: float | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    bounds: Mapping[str, float] = field(default_factory=dict)
    threads: int = 2


REGISTRY: dict[str, Case] = {}


def register(case: Case) -> Case:
    """Add a case; ValueError when its name is taken."""
    if case.name in REGISTRY:
        raise ValueError(f"benchmark case {case.name!r} is registered twice")
    REGISTRY[case.name] = case
    return case
