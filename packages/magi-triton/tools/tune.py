"""Time tile candidates of the flash kernels on this GPU; prints the fastest for ``runtime/configs.py``.

    python packages/magi-triton/tools/tune.py --json tiles.json [--dims 64 128] [--seqlen 8192]

First every candidate is compiled, in several processes, into Triton's cache; then they are timed one after another.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

CANDIDATES = {
    "fwd": [(128, 128, 2, 8), (128, 64, 3, 8), (128, 64, 3, 4), (128, 128, 3, 8), (128, 64, 4, 8), (64, 64, 3, 4)],
    "dkdv": [(64, 128, 2, 8), (64, 128, 1, 8), (64, 128, 3, 8), (64, 64, 3, 4), (64, 64, 2, 4), (32, 128, 2, 8)],
    "dq": [(128, 64, 2, 8), (128, 64, 3, 8), (64, 64, 3, 4), (64, 128, 2, 4), (128, 128, 2, 8), (128, 32, 3, 4)],
}


def milliseconds(kind: str, dim: int, candidate: tuple[int, ...], seqlen: int, causal: bool, repeats: int) -> float:
    """Median time of the forward (``fwd``) or the backward (others) with one tile changed; inf where it cannot run."""
    import torch
    from magi_triton.flash import ops  # noqa: F401
    from magi_triton.runtime import configs

    table = configs._TABLES[configs.architecture()][kind]
    before = dict(table)
    table[dim] = configs.Tile(*candidate)
    try:
        q, k, v = (torch.randn(1, h, seqlen, dim, device="cuda", dtype=torch.bfloat16) for h in (32, 4, 4))
        mask = (dim**-0.5, -1, 0 if causal else -1, 0.0)
        flash = torch.ops.magi_triton
        out, lse, _ = flash.flash_fwd(q, k, v, None, None, None, seqlen, seqlen, *mask, 0.0, None)

        def run() -> Any:
            if kind == "fwd":
                return flash.flash_fwd(q, k, v, None, None, None, seqlen, seqlen, *mask, 0.0, None)
            return flash.flash_bwd(q, None, q, k, v, out, lse, None, None, seqlen, seqlen, *mask, 0.0, None)

        run()
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return float(statistics.median(times))
    except Exception as error:  # out of shared memory or registers: not a candidate
        print(f"{kind} d{dim} {candidate}: {str(error).splitlines()[0][:100]}", flush=True)
        return float("inf")
    finally:
        table.clear()
        table.update(before)


def main() -> None:
    """Compile, time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--seqlen", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    todo = [(kind, dim, tile) for kind, tiles in CANDIDATES.items() for dim in args.dims for tile in tiles]
    with multiprocessing.get_context("spawn").Pool(min(12, os.cpu_count() or 1)) as pool:
        pool.starmap(milliseconds, [(*one, args.seqlen, False, 1) for one in todo], chunksize=1)
    best: dict[str, dict[int, Any]] = {}
    for kind, dim, tile in todo:
        ms = milliseconds(kind, dim, tile, args.seqlen, False, 7)
        print(f"{kind:5} d{dim:<4}{tile!s:20}{ms:9.3f} ms", flush=True)
        if ms < best.setdefault(kind, {}).get(dim, (None, float("inf")))[1]:
            best[kind][dim] = (tile, ms)
    print(json.dumps(best))
    if args.json:
        args.json.write_text(json.dumps(best))


if __name__ == "__main__":
    main()
