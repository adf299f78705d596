"""What is made of result lines: a comparison, a picture, a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .case import OURS

Line = dict[str, Any]


def comparison(base: Iterable[Line], new: Iterable[Line], tolerance: float) -> tuple[str, list[str]]:
    """Ratios new / base of the medians, line by line.

    Where both files have a rival of a case, the ratio of the rivals is divided out of ours: two runs are of two
    machines or two days.

    Returns:
        the text, and the cases of ours that are slower by more than ``tolerance``.
    """
    before = {(line["case"], line["implementation"]): line for line in base}
    after = {(line["case"], line["implementation"]): line for line in new}
    common = [key for key in after if key in before]
    drift: dict[str, list[float]] = {}
    for case, name in common:
        if name != OURS:
            ratio = after[case, name]["median_ms"] / before[case, name]["median_ms"]
            drift.setdefault(case, []).append(ratio)
    rows, slower = [f"{'case':44}{'implementation':20}{'base ms':>12}{'new ms':>12}{'ratio':>8}"], []
    for case, name in common:
        old, now = before[case, name]["median_ms"], after[case, name]["median_ms"]
        ratio, note = now / old, ""
        if name == OURS:
            if case in drift:
                ratio /= sum(drift[case]) / len(drift[case])
                note = "  (rivals' drift divided out)"
            if ratio > 1 + tolerance:
                slower.append(case)
                note += "  SLOWER"
        rows.append(f"{case:44}{name:20}{old:12.3f}{now:12.3f}{ratio:8.3f}{note}")
    rows.append(
        f"{len(common)} lines in both; {len(before) - len(common)} only in base, {len(after) - len(common)} only in new"
    )
    return "\n".join(rows), slower


def figure(found: Iterable[Line], path: Path) -> None:
    """Bars by case and implementation: TFLOP/s where all lines have it, else milliseconds.

    Raises:
        ImportError: matplotlib is missing. ValueError: there are no lines.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install matplotlib") from error
    rows = list(found)
    if not rows:
        raise ValueError("no result lines to draw")
    unit = "tflops" if all("tflops" in row for row in rows) else "median_ms"
    names = sorted({row["implementation"] for row in rows}, key=lambda name: (name != OURS, name))
    by_case: dict[str, dict[str, float]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["implementation"]] = row[unit]
    drawing = Figure(figsize=(8, 1.2 + 0.22 * len(by_case) * (len(names) + 1)), layout="constrained")
    axes = drawing.add_subplot()
    height = 0.8 / len(names)
    for position, name in enumerate(names):
        at = [(y + height * position, values[name]) for y, values in enumerate(by_case.values()) if name in values]
        axes.barh([y for y, _ in at], [value for _, value in at], height=0.9 * height, label=name)
    axes.set_yticks([y + 0.4 - height / 2 for y in range(len(by_case))], list(by_case))
    axes.invert_yaxis()
    axes.set_xlabel({"tflops": "TFLOP/s", "median_ms": "ms (median)"}[unit])
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=120)


def results_page(files: Mapping[str, Iterable[Line]]) -> str:
    """``RESULTS.md``: a table for each file and device. Made by ``python -m benchmarks table``; not written by hand."""
    parts = [
        "# Results\n",
        "Made by `python -m benchmarks table` from the lines under `results/`; not written by hand. Medians; the error",
        "is the largest over all tensors that the gate compares. A ratio is ours / the rival, both timed in turn in",
        "one process; beside it the two repeats. `python -m benchmarks run <case>` repeats a line.",
    ]
    for name, found in files.items():
        devices: dict[str, list[Line]] = {}
        for line in found:
            devices.setdefault(str(line.get("device", "unknown device")), []).append(line)
        for device, rows in devices.items():
            commits = ", ".join(sorted({str(row["commit"]) for row in rows}))
            torches = ", ".join(sorted({str(row["torch"]) for row in rows}))
            parts += ["", f"## {name}: {device}", "", f"torch {torches}; commit {commits}", ""]
            parts += ["| case | implementation | ms | TFLOP/s | error | ours / rival | other |", "| --- " * 7 + "|"]
            for row in rows:
                ratio = ""
                if "ours_over_this" in row:
                    repeats = ", ".join(f"{value:.3f}" for value in row["ours_over_this_repeats"])
                    ratio = f"{row['ours_over_this']:.3f} ({repeats})"
                speed = f"{row['tflops']:.4g}" if "tflops" in row else ""
                cells = [row["case"], row["implementation"], f"{row['median_ms']:.4g}", speed]
                cells += [f"{row['error']:.1e} ({row['against']})", ratio, _other(row)]
                parts.append("| " + " | ".join(cells) + " |")
    return "\n".join(parts) + "\n"


def _other(row: Line) -> str:
    said = [f"{name} {row[name]:g}" for name in row.get("bounds", {}) if name in row]
    said += [f"**{text}**" for text in row.get("outside_bounds", [])]
    return "; ".join(said)
