"""Result lines: what is written for every measurement, so that it can be read and repeated later."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .case import Case
from .measure import Measured

ROOT = Path(__file__).resolve().parents[1]


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


@cache
def surroundings(device: str) -> dict[str, Any]:
    """The machine and the commit: device, driver, clocks, torch, threads."""
    commit = _output("git", "rev-parse", "--short=12", "HEAD")
    if commit and _output("git", "status", "--porcelain", "--untracked-files=no"):
        commit += "+changes"
    facts: dict[str, Any] = {
        "commit": commit or "unknown",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device == "cuda":
        query = "driver_version,clocks.sm,clocks.mem,power.limit"
        asked = _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i", "0").split(", ")
        facts["device"] = torch.cuda.get_device_name()
        facts |= dict(zip(("driver", "sm_clock", "memory_clock", "power_limit"), asked))
        facts["cuda"] = torch.version.cuda
    else:
        facts["device"] = _processor()
    return facts


def lines(case: Case, measured: Measured, broken: list[str]) -> Iterator[dict[str, Any]]:
    """One JSON object for each implementation of a measured case."""
    command = shlex.join(["python", "-m", "benchmarks", "run", case.name])
    for name, timing in measured.timings.items():
        check = measured.checks[name]
        line: dict[str, Any] = {
            "case": case.name,
            "operator": case.operator,
            "implementation": name,
            **case.params,
            "median_ms": round(timing.median, 5),
            "min_ms": round(min(timing.rounds), 5),
            "max_ms": round(max(timing.rounds), 5),
            "rounds": len(timing.rounds),
            "medians_ms": [round(value, 5) for value in timing.medians],
            "error": check.error,
            "budget": check.budget,
            "against": check.against,
        }
        if case.flops is not None:
            line["tflops"] = round(case.flops / timing.median / 1e9, 4)
        if name in measured.ratios:
            ratio, each = measured.ratios[name]
            line["ours_over_this"] = round(ratio, 4)
            line["ours_over_this_repeats"] = [round(value, 4) for value in each]
        if name == "magi":
            line |= {key: round(value, 4) for key, value in measured.measures.items()}
            line["bounds"] = dict(case.bounds)
            line["outside_bounds"] = broken
        if case.device == "cpu":
            line["threads"] = case.threads
            line["omp_wait_policy"] = os.environ.get("OMP_WAIT_POLICY", "")
        yield {**line, **surroundings(case.device), "command": command}


def append(path: Path, found: Iterable[dict[str, Any]]) -> None:
    """Add lines to a JSON lines file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for line in found:
            file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; of several of one case and implementation on one device, the last.

    Raises:
        ValueError: a line is not a JSON object with a case and an implementation.
    """
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            found[line["case"], line["implementation"], line.get("device", "")] = line
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number} is not a result line: {error!r}") from error
    return list(found.values())
