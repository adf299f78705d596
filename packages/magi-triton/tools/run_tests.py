"""Run the tests and benchmarks of the operators, by operator, on one or several GPUs.

    python packages/magi-triton/tools/run_tests.py --list-ops
    python packages/magi-triton/tools/run_tests.py --stages all --gpus 0,1 --output-dir logs

The inventory is the package's registry. Each operator runs in a child process that sees one GPU; results come from
pytest's JUnit XML and the benchmark driver's JSON lines. Exit status: 0 good, 1 a failure, 2 a mistake in the call, 130
interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parents[1]
sys.path.insert(0, str(PACKAGE / "src"))

from magi_triton.registry import Operator, operator, operators  # noqa: E402

STAGES = ("alpha", "beta", "stable", "removed")


def check_inventory(entries: list[Operator]) -> list[str]:
    """Mistakes of the registry, in words."""
    wrong = [f"{one.name}: stage {one.stage!r} is none of {', '.join(STAGES)}" for one in entries
             if one.stage not in STAGES]  # fmt: skip
    wrong += [
        f"{one.name}: no file tests/{one.tests}" for one in entries if not (PACKAGE / "tests" / one.tests).is_file()
    ]
    return wrong


def choose(args: argparse.Namespace) -> list[Operator]:
    """The operators to run, in order.

    Raises:
        ValueError: an unknown operator or stage.
    """
    names = args.ops or []
    if args.op_list_file:
        lines = Path(args.op_list_file).read_text(encoding="utf-8").splitlines()
        names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    stages = args.stages.split(",")
    unknown = sorted(set(stages) - {*STAGES, "all"})
    if unknown:
        raise ValueError(f"stages must be among {', '.join(STAGES)}, all; got {', '.join(unknown)}")
    wanted = {stage for stage in STAGES if stage in stages or ("all" in stages and stage != "removed")}
    chosen = [operator(name) for name in names] or [one for one in map(operator, operators()) if one.stage in wanted]
    if args.start:
        started = [position for position, one in enumerate(chosen) if one.name == args.start]
        if not started:
            raise ValueError(f"start must be one of the chosen operators, got {args.start!r}")
        chosen = chosen[started[0] :]
    return chosen


def child(command: list[str], gpu: str, timeout_s: float, log: Path, echo: bool) -> str:
    """Run a command that sees one GPU: ``"ok"``, ``"failed"`` or ``"Timeout"``."""
    paths = [str(PACKAGE / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, text=True, timeout=timeout_s,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
        text, status = done.stdout, "ok" if done.returncode == 0 else "failed"
    except subprocess.TimeoutExpired as error:
        text = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        status = "Timeout"
    log.write_text(text, encoding="utf-8")
    if echo:
        print(text, flush=True)
    return status


def accuracy(one: Operator, gpu: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run the tests of an operator; status and counts."""
    report = folder / "accuracy_junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", str(PACKAGE / "tests" / one.tests), f"--junitxml={report}"]
    if args.quick:
        command.append("-x")
    ended = child(command, gpu, args.timeout, folder / "accuracy.log", args.dump_output)
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    if report.is_file():
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            for name in counts:
                counts[name] += int(suite.get(name, 0))
    if ended == "Timeout":
        status = "Timeout"
    elif counts["errors"] or (ended == "failed" and not counts["failures"] and counts["tests"]):
        status = "Error"
    elif counts["failures"]:
        status = "Failed"
    elif not counts["tests"]:
        status = "NotFound"
    else:
        status = "Skipped" if counts["skipped"] == counts["tests"] else "Passed"
    return {"status": status, **counts}


def performance(one: Operator, gpu: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark cases of an operator; status and result lines."""
    if not one.benchmark:
        return {"status": "NotFound", "lines": []}
    out = folder / "benchmark.jsonl"
    command = [sys.executable, "-m", "benchmarks", "run", one.benchmark, "--out", str(out)]
    ended = child(command, gpu, args.benchmark_timeout, folder / "performance.log", args.dump_output)
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.is_file() else []
    status = "Timeout" if ended == "Timeout" else "Failed" if ended == "failed" else "Passed" if lines else "Skipped"
    return {"status": status, "lines": lines}


def gpus_of(text: str) -> list[str]:
    """Names of GPUs for CUDA_VISIBLE_DEVICES, through a mask that is already set."""
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = mask.split(",") if mask else None
    if text == "all":
        if visible is None:
            import torch

            visible = [str(index) for index in range(torch.cuda.device_count())]
        return visible or [""]
    indices = [int(index) for index in text.split(",")]
    return [str(index) if visible is None else visible[index] for index in indices]


def run(chosen: list[Operator], args: argparse.Namespace) -> int:
    """Run everything; writes the summaries."""
    folder = Path(args.output_dir or time.strftime("logs_results_%Y%m%d_%H%M%S"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run_config.json").write_text(
        json.dumps({**vars(args), "chosen": [one.name for one in chosen]}, indent=1)
    )
    todo: queue.SimpleQueue[Operator] = queue.SimpleQueue()
    for one in chosen:
        todo.put(one)
    summary: dict[str, dict[str, Any]] = {}
    green, red, plain = ("\033[32m", "\033[31m", "\033[0m")
    if args.color == "never" or (args.color == "auto" and not sys.stdout.isatty()):
        green = red = plain = ""

    def work(gpu: str) -> None:
        mine: dict[str, dict[str, Any]] = {}
        while True:
            try:
                one = todo.get_nowait()
            except queue.Empty:
                break
            place = folder / one.name
            place.mkdir(exist_ok=True)
            result: dict[str, Any] = {"gpu": gpu, "stage": one.stage, "accuracy": accuracy(one, gpu, place, args)}
            (place / "accuracy_result.json").write_text(json.dumps(result["accuracy"], indent=1))
            if not args.skip_benchmarks:
                result["performance"] = performance(one, gpu, place, args)
                (place / "performance_result.json").write_text(json.dumps(result["performance"], indent=1))
            mine[one.name] = summary[one.name] = result
            words = [result[kind]["status"] for kind in ("accuracy", "performance") if kind in result]
            colour = green if words[0] in ("Passed", "Skipped") else red
            print(f"{one.name:40}{colour}{' '.join(words)}{plain}", flush=True)
        (folder / f"summary{gpu}.json").write_text(json.dumps(mine, indent=1))

    workers = [threading.Thread(target=work, args=(gpu,)) for gpu in gpus_of(args.gpus)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    good = all(result["accuracy"]["status"] in ("Passed", "Skipped") for result in summary.values())
    good &= all(result.get("performance", {}).get("status") not in ("Failed", "Timeout") for result in summary.values())
    return 0 if good else 1


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--ops", nargs="+", help="operators to run")
    which.add_argument("--op-list-file", help="file with one operator a line")
    parser.add_argument("--start", help="resume from this operator")
    parser.add_argument("--stages", default="stable", help="alpha, beta, stable, removed, all (without removed)")
    parser.add_argument("--gpus", default="0", help="indices with commas, or all")
    parser.add_argument("--output", "--output-dir", dest="output_dir", help="default logs_results_<date>_<time>")
    parser.add_argument("--dump-output", action="store_true", help="echo the output of the children")
    parser.add_argument("--skip-benchmarks", action="store_true", help="tests only")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for the tests of an operator")
    parser.add_argument("--benchmark-timeout", type=float, default=3600.0, help="seconds for its benchmarks")
    parser.add_argument("--quick", action="store_true", help="stop an operator at its first failure")
    parser.add_argument("--list-ops", action="store_true", help="print the inventory; touches no accelerator")
    parser.add_argument("--color", choices=["auto", "always", "never"], default="auto")
    args = parser.parse_args(arguments)
    wrong = check_inventory([operator(name) for name in operators()])
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 2
    if args.list_ops:
        for one in map(operator, operators()):
            benchmark = "benchmark" if one.benchmark else "-"
            print(f"{one.name:34}{one.stage:8}{one.tests:24}{benchmark:10}{one.summary}")
        return 0
    try:
        return run(choose(args), args)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
