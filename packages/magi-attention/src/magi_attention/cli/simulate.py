"""``python -m magi_attention simulate``: predicted times of our plans and of other systems' shapes on 2 to 4096 ranks.

Needs neither a device nor a process group. The same model's errors on published figures come first.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

MASKS = ("full", "causal", "varlen_full", "varlen_causal", "window")


class _Progress:
    """A bar on stderr when that is a terminal; nothing otherwise."""

    def __init__(self, total: int) -> None:
        self._done, self._total, self._start = 0, max(1, total), time.monotonic()

    def __call__(self, text: str) -> None:
        self._done += 1
        if sys.stderr.isatty():
            filled = 30 * self._done // self._total
            bar = "#" * filled + "." * (30 - filled)
            seconds = time.monotonic() - self._start
            end = "\n" if self._done >= self._total else ""
            print(f"\r[{bar}] {self._done}/{self._total} {seconds:5.1f} s {text:32}", end=end, file=sys.stderr)


def _numbers(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers with commas between, got {text!r}") from None
    if any(not 2 <= value <= 4096 for value in values):
        raise argparse.ArgumentTypeError(f"must be within 2 and 4096, got {text!r}")
    return values


def _words(known: tuple[str, ...]) -> Any:
    def parse(text: str) -> list[str]:
        for word in text.split(","):
            if word not in known:
                raise argparse.ArgumentTypeError(f"must be among {', '.join(known)}, got {word!r}")
        return text.split(",")

    return parse


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {text}")
    return value


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)) for row in rows)


def published_errors(packs: int = 6) -> dict[str, Any]:
    """The model against published figures, as numbers.

    Returns:
        ``median`` and ``worst`` absolute relative error, and ``rows``: method, mask, pass, and per world size the
        published and the predicted TFLOP/s.
    """
    import numpy as np

    from ..simulation import errors
    from ..simulation.published import MASKS as MASK_NAMES
    from ..simulation.published import WORLDS

    found = errors(packs=packs, progress=_Progress(len(WORLDS) * len(MASK_NAMES)))
    relative = np.array([abs(e.relative) for e in found])
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for e in found:
        direction = "backward" if e.figure.is_backward else "forward"
        name = (e.figure.method, e.figure.mask, direction)
        row = rows.setdefault(name, {"method": name[0], "mask": name[1], "pass": name[2], "cells": []})
        row["cells"].append([e.figure.world, e.figure.tflops, e.predicted, e.relative])
    worst = found[int(relative.argmax())].figure
    return {
        "median": float(np.median(relative)),
        "worst": float(relative.max()),
        "worst_at": f"{worst.method} {worst.mask} {'backward' if worst.is_backward else 'forward'} P={worst.world}",
        "over_30_percent": int((relative > 0.3).sum()),
        "figures": len(found),
        "rows": list(rows.values()),
    }


def _errors_text(found: dict[str, Any], full: bool) -> str:
    head = (
        f"the model on {found['figures']} published figures (H100, 8k tokens a GPU): median error "
        f"{100 * found['median']:.1f} %, worst {100 * found['worst']:.0f} % ({found['worst_at']}), "
        f"{found['over_30_percent']} above 30 %. Its rates were fitted to these figures."
    )
    if not full:
        return head
    worlds = [str(cell[0]) for cell in found["rows"][0]["cells"]]
    rows = [["method", "mask", "pass", *(f"P={w} TFLOP/s published/model (error)" for w in worlds)]]
    for row in found["rows"]:
        cells = [f"{p:.0f}/{m:.0f} ({100 * r:+.0f} %)" for _, p, m, r in row["cells"]]
        rows.append([row["method"], row["mask"], row["pass"], *cells])
    return head + "\n" + _table(rows)


def simulate(
    worlds: list[int],
    mask_names: list[str],
    methods: list[str],
    *,
    tokens: int,
    packs: int,
    machine: Any,
    degree: int | None = None,
    window: int = 1024,
    progress: Any = None,
) -> list[dict[str, Any]]:
    """Predictions: one row for each mask, number of ranks, method and pass.

    Args:
        worlds, mask_names, methods: what to predict.
        tokens: per rank.
        packs: packs of documents averaged for the varlen masks.
        machine: ``magi_attention.simulation.Machine``.
        degree: stages of our plan; None lets the cost model choose.
        window: of the ``window`` mask.
        progress: called with a text for each mask and number of ranks.

    Returns:
        Rows with seconds of the slowest rank, exposed seconds, TFLOP/s per GPU, received bytes of the busiest rank.
    """
    from ..simulation import METHODS, Documents, predict
    from ..simulation import ours as plan_ours

    rows = []
    for name in mask_names:
        for world in worlds:
            total, causal = tokens * world, not name.endswith("full")
            if name.startswith("varlen"):
                masks = Documents.packs(total, causal, packs)
            else:
                masks = [Documents((total,), causal, window if name == "window" else 0)]
            for method in methods:
                built: list[Any] = []
                for mask in masks:
                    if method == "magi":
                        built.append(plan_ours(machine, mask, world, degree=degree))
                    else:
                        built.append(METHODS[method](machine, mask, world))
                for backward in (False, True):
                    row = {"mask": name, "world_size": world, "method": method}
                    row["pass"] = "backward" if backward else "forward"
                    if any(ranks is None for ranks in built):
                        rows.append(row | {"tflops": None, "total_s": None, "exposed_s": None, "gib_per_rank": None})
                        continue
                    found = [predict(machine, ranks, backward=backward) for ranks in built]
                    flops = [m.area * machine.pair_flops * (2.5 if backward else 1) / world for m in masks]
                    speed = [f / p.total_s / 1e12 for f, p in zip(flops, found, strict=True)]
                    volume = [
                        max(
                            sum(
                                s.count * (s.nvlink_bytes + s.network_bytes) * (s.backward_bytes if backward else 1)
                                for s in steps
                            )
                            for steps in ranks
                        )
                        for ranks in built
                    ]
                    row |= {
                        "tflops": sum(speed) / len(speed),
                        "total_s": sum(p.total_s for p in found) / len(found),
                        "exposed_s": sum(p.exposed_s for p in found) / len(found),
                        "gib_per_rank": sum(volume) / len(volume) / 2**30,
                    }
                    rows.append(row)
            if progress is not None:
                progress(f"{name} on {world}")
    return rows


def _predictions_text(rows: list[dict[str, Any]]) -> str:
    out = [["mask", "pass", "ranks", "method", "TFLOP/s/GPU", "time ms", "exposed ms", "GiB/rank"]]
    for row in sorted(rows, key=lambda r: (r["mask"], r["pass"] == "backward", r["world_size"])):
        cells = [row["mask"], row["pass"], str(row["world_size"]), row["method"]]
        if row["tflops"] is None:
            cells += ["more ranks than heads", "", "", ""]
        else:
            cells += [f"{row['tflops']:.0f}", f"{1e3 * row['total_s']:.3f}", f"{1e3 * row['exposed_s']:.3f}"]
            cells.append(f"{row['gib_per_rank']:.3f}")
        out.append(cells)
    return _table(out)


def _plot(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    masks = list(dict.fromkeys(row["mask"] for row in rows))
    figure, axes = pyplot.subplots(2, len(masks), figsize=(4.2 * len(masks), 6.4), squeeze=False, sharex=True)
    for column, mask in enumerate(masks):
        for line, direction in enumerate(("forward", "backward")):
            axis = axes[line][column]
            for method in dict.fromkeys(row["method"] for row in rows):
                points = [
                    (row["world_size"], row["tflops"])
                    for row in rows
                    if (row["mask"], row["pass"], row["method"]) == (mask, direction, method) and row["tflops"]
                ]
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", label=method, lw=2 if method == "magi" else 1)
            axis.set_xscale("log", base=2)
            axis.set_title(f"{mask}, {direction}")
            axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("TFLOP/s per GPU (predicted)")
    axes[-1][0].set_xlabel("ranks")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def run(args: argparse.Namespace) -> int:
    """Check the model on published figures, predict, print, draw."""
    from ..simulation import H200

    if args.plot is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            print(f"{args.prog}: error: --plot needs matplotlib: pip install magi-attention[draw]", file=sys.stderr)
            return 2
    machine = replace(
        H200,
        gpus_per_node=args.gpus_per_node,
        num_heads_q=args.num_heads_q,
        num_heads_kv=args.num_heads_kv,
        head_dim=args.head_dim,
        **{n: v for n in ("nvlink_gbs", "network_gbs") if (v := getattr(args, n)) is not None},
    )
    if args.num_heads_q % args.num_heads_kv:
        print(
            f"{args.prog}: error: --num-heads-q must be a multiple of --num-heads-kv ({args.num_heads_kv}), "
            f"got {args.num_heads_q}",
            file=sys.stderr,
        )
        return 2
    known = published_errors()
    rows = simulate(
        args.ranks, args.masks, args.methods, tokens=args.tokens, packs=args.packs, machine=machine,
        degree=args.degree, window=args.window, progress=_Progress(len(args.ranks) * len(args.masks)),
    )  # fmt: skip
    if args.json:
        print(json.dumps({"machine": asdict(machine), "published": known, "predictions": rows}, indent=2))
    else:
        print(_errors_text(known, args.errors))
        print(f"\npredictions, {args.tokens} tokens a rank, slowest rank; volume is of the busiest rank")
        print(_predictions_text(rows))
    if args.plot is not None:
        try:
            _plot(rows, args.plot)
        except OSError as error:
            print(f"{args.prog}: error: --plot {args.plot}: {error.strerror or error}", file=sys.stderr)
            return 2
        print(f"wrote {Path(args.plot)}", file=sys.stderr)
    return 0


def add_parser(commands: Any) -> None:
    """Add the command to a parser."""
    from ..simulation import METHODS

    parser = commands.add_parser(
        "simulate",
        help="predicted times on 2 to 4096 ranks, ours and others",
        description="Predict time, exposed communication and volume of our plans and of other systems' shapes.",
    )
    parser.add_argument("--ranks", type=_numbers, default=[8, 64, 512], metavar="P,...", help="default: 8,64,512")
    parser.add_argument("--masks", type=_words(MASKS), default=["causal", "varlen_causal"], metavar="M,...",
                        help=f"of {', '.join(MASKS)} (default: causal,varlen_causal)")  # fmt: skip
    parser.add_argument("--methods", type=_words(tuple(METHODS)), default=list(METHODS), metavar="X,...",
                        help=f"of {', '.join(METHODS)} (default: all)")  # fmt: skip
    parser.add_argument("--tokens", type=_positive, default=8192, help="per rank (default: 8192)")
    parser.add_argument("--packs", type=_positive, default=3, help="packs of documents averaged (default: 3)")
    parser.add_argument("--window", type=_positive, default=1024, help="of the window mask (default: 1024)")
    parser.add_argument("--degree", type=_positive, help="remote stages of our plan (default: the cost model chooses)")
    parser.add_argument("--gpus-per-node", type=_positive, default=8, help="that share NVLink (default: 8)")
    parser.add_argument("--nvlink-gbs", type=_rate, help="achieved GB/s of a GPU one way (default: fitted)")
    parser.add_argument("--network-gbs", type=_rate, help="achieved GB/s of a GPU one way (default: fitted)")
    parser.add_argument("--num-heads-q", type=_positive, default=64, help="default: 64")
    parser.add_argument("--num-heads-kv", type=_positive, default=8, help="default: 8")
    parser.add_argument("--head-dim", type=_positive, default=128, help="default: 128")
    parser.add_argument("--errors", action="store_true", help="every published figure beside the model's")
    parser.add_argument("--json", action="store_true", help="numbers as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw throughput over ranks (needs matplotlib)")
    parser.set_defaults(run=run, prog=parser.prog)
