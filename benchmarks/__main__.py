"""``python -m benchmarks``: list, run, compare, plot and table.

Examples:
    python -m benchmarks list
    python -m benchmarks run 'cpu_attn/*' --out benchmarks/results/cpu.jsonl
    python -m benchmarks compare benchmarks/results/cpu.jsonl out/benchmarks.jsonl
    python -m benchmarks plot out/benchmarks.jsonl out/benchmarks.png
    python -m benchmarks table > benchmarks/RESULTS.md
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import pkgutil
import sys
import time
from pathlib import Path

import torch

from . import cases
from .case import REGISTRY, Case
from .measure import GateError, measure, outside_bounds
from .record import ROOT, append, lines, read
from .report import comparison, figure, results_page

RESULTS = ROOT / "benchmarks" / "results"


def load_cases() -> None:
    """Import every file under ``cases/``; each registers what it has."""
    for module in pkgutil.iter_modules(cases.__path__):
        importlib.import_module(f"{cases.__name__}.{module.name}")


def choose(patterns: list[str], device: str | None) -> list[Case]:
    """Cases whose name or operator matches one of the shell patterns (all when there is none).

    Raises:
        ValueError: a pattern matches nothing.
    """
    for pattern in patterns:
        if not any(fnmatch.fnmatch(word, pattern) for case in REGISTRY.values() for word in (case.name, case.operator)):
            raise ValueError(f"no case or operator matches {pattern!r}; `python -m benchmarks list` shows them")
    return [
        case
        for case in REGISTRY.values()
        if (device is None or case.device == device)
        and (not patterns or any(fnmatch.fnmatch(w, p) for p in patterns for w in (case.name, case.operator)))
    ]


def run(args: argparse.Namespace) -> int:
    """Measure; 1 when a gate is red or a promise is broken."""
    chosen, bad = choose(args.cases, args.device), []
    for number, case in enumerate(chosen, 1):
        head = f"[{number}/{len(chosen)}] {case.name}"
        if case.device == "cuda" and not torch.cuda.is_available():
            print(f"{head}: skipped, it needs a GPU", flush=True)
            continue
        if case.device == "cpu":
            torch.set_num_threads(case.threads)
        begun = time.monotonic()
        print(f"{head} …", flush=True)
        try:
            setup = case.setup()
            measured = measure(case, setup, args.seconds, lambda text: print(f"    {text}", flush=True))
        except GateError as error:
            bad.append(str(error))
            print(f"    REFUSED: {error}", flush=True)
            continue
        broken = outside_bounds(case, measured)
        bad += [f"{case.name}: {text}" for text in broken]
        append(args.out, lines(case, measured, broken))
        for name, timing in measured.timings.items():
            ratio = f"  ours takes {measured.ratios[name][0]:.3f} of it" if name in measured.ratios else ""
            speed = f"  {case.flops / timing.median / 1e9:9.3f} TFLOP/s" if case.flops is not None else ""
            print(f"    {name:20}{timing.median:12.3f} ms{speed}{ratio}")
        for name, value in measured.measures.items():
            print(f"    {name:20}{value:12.3f}")
        for text in broken:
            print(f"    OUTSIDE BOUNDS: {text}")
        print(f"    {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{len(chosen)} cases, lines in {args.out}")
    for text in bad:
        print(f"FAILED {text}")
    return 1 if bad else 0


def show_list(args: argparse.Namespace) -> int:
    """Print the registry."""
    for case in choose(args.cases, None):
        promises = ", ".join(f"{name} <= {limit:g}" for name, limit in case.bounds.items())
        print(f"{case.name:44}{case.operator:16}{case.device:6}{promises}")
    return 0


def compare(args: argparse.Namespace) -> int:
    """Print ratios of two files; 1 when something of ours is slower than the tolerance allows."""
    text, slower = comparison(read(args.base), read(args.new), args.tolerance)
    print(text)
    return 1 if slower else 0


def plot(args: argparse.Namespace) -> int:
    """Draw a file."""
    figure(read(args.lines), args.picture)
    print(args.picture)
    return 0


def table(args: argparse.Namespace) -> int:
    """Print the page of results."""
    files = args.lines or sorted(RESULTS.glob("*.jsonl"))
    print(results_page({path.name: read(path) for path in files}), end="")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit status is 2 for a mistake."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__, formatter_class=formatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("list", help="show the cases and what is promised")
    one.add_argument("cases", nargs="*", help="shell patterns on names or operators")
    one.set_defaults(call=show_list)
    one = commands.add_parser("run", help="check, time, write result lines")
    one.add_argument("cases", nargs="*", help="shell patterns on names or operators; all when left out")
    one.add_argument("--device", choices=["cpu", "cuda"], help="only cases of this device")
    one.add_argument("--out", type=Path, default=ROOT / "out" / "benchmarks.jsonl", help="where lines are added")
    one.add_argument("--seconds", type=float, default=10.0, help="about how long to time each case")
    one.set_defaults(call=run)
    one = commands.add_parser("compare", help="ratios of two files of result lines")
    one.add_argument("base", type=Path)
    one.add_argument("new", type=Path)
    one.add_argument("--tolerance", type=float, default=0.1, help="slower by more than this share fails (default 0.1)")
    one.set_defaults(call=compare)
    one = commands.add_parser("plot", help="draw a file of result lines (needs matplotlib)")
    one.add_argument("lines", type=Path)
    one.add_argument("picture", type=Path)
    one.set_defaults(call=plot)
    one = commands.add_parser("table", help="print RESULTS.md from files of result lines")
    one.add_argument("lines", type=Path, nargs="*", help=f"default: {RESULTS.relative_to(ROOT)}/*.jsonl")
    one.set_defaults(call=table)
    args = parser.parse_args(arguments)
    load_cases()
    try:
        return int(args.call(args))
    except (ValueError, FileNotFoundError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
