"""Timing one case: the correctness gate first, then implementations in turn, in one process, twice."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .case import OURS, Case, Check, Setup

WARM_UP = 2
REPEATS = 2  # their spread is the noise of a ratio
MIN_ROUNDS, MAX_ROUNDS = 5, 50


class GateError(AssertionError):
    """The correctness gate of a case is red: nothing was timed."""


@dataclass
class Timing:
    """Milliseconds of one implementation: all rounds, and the median of each repeat."""

    rounds: list[float] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median over all rounds of all repeats."""
        return statistics.median(self.rounds)


@dataclass(frozen=True)
class Measured:
    """What a case gave: checks and timings by implementation, ratios by rival (with their two repeats), measures."""

    checks: dict[str, Check]
    timings: dict[str, Timing]
    ratios: dict[str, tuple[float, list[float]]]
    measures: dict[str, float]


def gate(case: Case, setup: Setup) -> dict[str, Check]:
    """Run every implementation once and hold it to its budget.

    Raises:
        GateError: an implementation is over its budget; the message gives both numbers.
    """
    checks = {}
    for name, implementation in setup.implementations.items():
        if setup.before is not None:
            setup.before()
        check = setup.verify(name, implementation())
        if not check.passed:
            raise GateError(
                f"{case.name}: {name} is off by {check.error:.3e} from {check.against}, allowed {check.budget:.3e}"
            )
        checks[name] = check
    return checks


def _timer(device: str) -> Callable[[Callable[[], Any]], float]:
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def on_device(call: Callable[[], Any]) -> float:
            torch.cuda.synchronize()
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            return float(start.elapsed_time(end))

        return on_device

    def on_host(call: Callable[[], Any]) -> float:
        begun = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begun)

    return on_host


def measure(case: Case, setup: Setup, seconds: float, progress: Callable[[str], None] = lambda text: None) -> Measured:
    """Gate, warm up, time.

    Args:
        seconds: about how long the timing may take; 5 to 50 rounds of all implementations are taken in each repeat.
        progress: told what is being done.

    Raises:
        GateError: see :func:`gate`.
    """
    progress("checking")
    checks = gate(case, setup)
    clock = _timer(case.device)
    timings = {name: Timing() for name in setup.implementations}

    def one_round() -> dict[str, float]:
        took = {}
        for name, implementation in setup.implementations.items():
            if setup.before is not None:
                setup.before()
            took[name] = clock(implementation)
        return took

    progress("warming up")
    for _ in range(WARM_UP):
        estimate = sum(one_round().values()) / 1e3
    rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, int(seconds / REPEATS / max(estimate, 1e-6))))
    for repeat in range(REPEATS):
        progress(f"timing {repeat + 1}/{REPEATS} ({rounds} rounds)")
        taken = [one_round() for _ in range(rounds)]
        for name, timing in timings.items():
            times = [took[name] for took in taken]
            timing.rounds += times
            timing.medians.append(statistics.median(times))
    ratios = {}
    if OURS in timings:
        ours = timings[OURS]
        for name, timing in timings.items():
            if name != OURS:
                each = [a / b for a, b in zip(ours.medians, timing.medians)]
                ratios[name] = (ours.median / timing.median, each)
    measures = {}
    for name, take in setup.measures.items():
        progress(name)
        measures[name] = float(take())
    return Measured(checks, timings, ratios, measures)


def outside_bounds(case: Case, measured: Measured) -> list[str]:
    """The promises of a case that do not hold, in words. A bound on something that was not measured is one of them."""
    broken = []
    for name, limit in case.bounds.items():
        kind, _, rival = name.partition(":")
        if kind == "ratio" and rival:
            value = measured.ratios.get(rival, (math.nan, []))[0]
        else:
            value = measured.measures.get(name, math.nan)
        if not value <= limit:
            broken.append(f"{name} is {value:.3g}, promised at most {limit:g}")
    return broken
