"""Planning: one rank's time from slices to device-ready tables, and what placements cost in traffic.

Times are of this process (``time.process_time``), so that a busy machine does not count: planning runs on one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from ..case import Case, Check, Setup, register

TOKENS = 8192
HEADS_Q, HEADS_KV = 64, 8
PACKS = 20
LIMITS_MS = {  # the table of what is promised: mask -> by number of ranks
    "causal": {8: 1, 64: 10, 512: 80},
    "varlen_causal": {8: 1, 64: 10, 512: 80},
    "block_causal": {8: 1, 64: 12, 512: 100},
    "window1024": {8: 1, 64: 6, 512: 50},
}


def _ranges(cu: Any) -> Any:
    import numpy as np

    return np.ascontiguousarray(np.stack([cu[:-1], cu[1:]], 1), np.int32)


def _slices(kind: str, total: int, seed: int = 0, documents: int = 0) -> tuple[Any, Any, Any]:
    """``q_ranges, k_ranges, types`` as int32 arrays."""
    import numpy as np
    from magi_core.testing import masks

    if kind == "block_causal":
        starts = np.arange(0, total, 4096)
        ends = np.minimum(starts + 4096, total)
        return (
            _ranges(np.append(starts, total)),
            np.stack([0 * ends, ends], 1).astype(np.int32),
            np.zeros(len(ends), np.int32),
        )
    if kind == "documents":
        cuts = np.sort(np.random.default_rng(seed).choice(np.arange(1, total), documents - 1, replace=False))
        pairs = _ranges(np.concatenate([[0], cuts, [total]]))
        return pairs, pairs, np.ones(len(pairs), np.int32)
    if kind == "log_normal":
        draws = np.random.default_rng(seed).lognormal(0.0, 1.0, documents)
        lengths = np.maximum(1, np.floor(draws / draws.sum() * (total - documents)).astype(np.int64))
        lengths[0] += total - lengths.sum()
        pairs = _ranges(np.cumsum([0, *lengths]))
        return pairs, pairs, np.ones(len(pairs), np.int32)
    name, options = ("swa_causal", {"window": 1024}) if kind == "window1024" else (kind, {"seed": seed})
    table = np.array(masks.make(name, total, **options), np.int32)
    return tuple(np.ascontiguousarray(x) for x in (table[:, :2], table[:, 2:4], table[:, 4]))  # type: ignore[return-value]


def _plan(slices: tuple[Any, Any, Any], total: int, world: int, alg: str = "balanced", size: int | None = None) -> Any:
    from magi_core.bands import Bands
    from magi_core.planner import (
        Owners,
        PlanOptions,
        chunk_areas,
        dispatch_chunks,
        plan_distributed,
        suggest_chunk_size,
    )

    bands = Bands.from_slices(*slices)
    if size is None:
        size = suggest_chunk_size(bands, total, world)
    areas = chunk_areas(bands, size, total)
    chunks = dispatch_chunks(areas, world, alg, bands=bands, chunk_size=size, total_q=total)
    owners = Owners.from_chunks(chunks, size, total)
    return plan_distributed(bands, total, total, owners, owners, PlanOptions(degree=2))


def _process_ms(call: Callable[[], Any], times: int = 5) -> float:
    taken = []
    for _ in range(times):
        begun = time.process_time()
        call()
        taken.append(1e3 * (time.process_time() - begun))
    return statistics.median(taken)


@cache
def _everything(kind: str, world: int, documents: int = 0) -> Callable[[], Any]:
    """All of one rank's planning, from slices to the tables of its kernels."""
    total = TOKENS * world if not documents else 1 << 20
    slices = _slices(kind, total, documents=documents)

    def run() -> Any:
        from magi_core.planner import build_stage_plans

        plan = _plan(slices, total, world)
        stages = build_stage_plans(plan.rank_plan(world // 2), HEADS_Q, HEADS_KV)
        return plan, stages

    return run


def _verified(result: Any) -> Check:
    """0 when the brute force finds nothing; the largest plans are held to their area, each rank's tables to theirs."""
    from magi_core.planner import verify

    plan, stages = result
    if plan.total_q <= 1 << 17:
        verify(plan)
    off = abs(int(plan.balance.sum()) - plan.bands.area())
    rank = plan.rank_plan(plan.world_size // 2)
    parts = rank.local_bands.area() + sum(s.bands.area() for s in rank.stages)
    off += abs(parts - int(plan.balance[plan.world_size // 2])) + abs(len(stages) - 1 - rank.num_stages)
    return Check(float(off), 0.0, "brute force" if plan.total_q <= 1 << 17 else "areas")


def _time_case(kind: str, world: int, limit_ms: float, documents: int = 0) -> None:
    def setup() -> Setup:
        run = _everything(kind, world, documents)
        measures: dict[str, Callable[[], float]] = {"process_ms": lambda: _process_ms(run)}
        if world == 512:

            def exponent() -> float:
                import numpy as np

                ranks = (8, 64, 512)
                each = [_process_ms(_everything(kind, p)) for p in ranks]
                return float(np.polyfit(np.log(ranks), np.log(each), 1)[0])

            measures["growth_exponent"] = exponent
        return Setup({"magi": run}, lambda name, result: _verified(result), measures)

    bounds = {"process_ms": limit_ms} | ({"growth_exponent": 1.3} if world == 512 else {})
    name = f"{kind}{documents or ''}"
    params = {"mask": name, "world_size": world, "tokens_a_rank": (1 << 20) // world if documents else TOKENS}
    register(Case(f"planner/time/{name}/p{world}", "plan", setup, params, bounds=bounds, threads=1))


def _best_min_heap(slices: tuple[Any, Any, Any], total: int, world: int) -> Any:
    """Min heap at the chunk size with its least largest receive, of those balanced to 1.05 (else the best balanced)."""
    found = []
    for size in (128, 256, 512, 1024, 2048):
        plan = _plan(slices, total, world, "min_heap", size)
        balance = plan.balance.max() / plan.balance.mean()
        found.append((balance > 1.05, int(plan.num_received().max()) if balance <= 1.05 else balance, size, plan))
    return min(found, key=lambda x: x[:3])[3]


def _lower_bound(slices: tuple[Any, Any, Any], total: int, world: int) -> float:
    """Tokens that cuts of the sequence into ``world`` equal blocks at least share: documents that span a border are
    read from both sides; a placement that cuts documents only at block borders receives this, balance apart."""
    received = 0
    for begin, end in slices[0].tolist():
        first, last = begin * world // total, (end - 1) * world // total
        for block in range(first + 1, last + 1):
            received += max(0, -(-block * total // world) - begin)
    return received / world


@cache
def _traffic(kind: str, world: int, documents: int) -> dict[str, float]:
    """Means over the packs of received tokens, and the worst balance and busiest ranks of ours."""
    ours, heap, bound, balance, sender, receiver = [], [], [], [], [], []
    total = TOKENS * world
    for seed in range(PACKS):
        slices = _slices(kind, total, seed, documents)
        plan = _plan(slices, total, world)
        received, sent = plan.num_received(), plan.num_sent()
        ours.append(float(received.mean()))
        heap.append(float(_best_min_heap(slices, total, world).num_received().mean()))
        bound.append(_lower_bound(slices, total, world))
        balance.append(float(plan.balance.max() / plan.balance.mean()))
        sender.append(float(sent.max() / max(1.0, sent.mean())))
        receiver.append(float(received.max() / max(1.0, received.mean())))
    mean = statistics.fmean
    return {
        "traffic_over_min_heap": mean(ours) / mean(heap),
        "received_tokens": mean(ours),
        "min_heap_tokens": mean(heap),
        "contiguous_tokens": mean(bound),
        "balance": mean(balance),
        "worst_balance": max(balance),
        "busiest_sender": mean(sender),
        "busiest_receiver": mean(receiver),
    }


def _traffic_case(kind: str, world: int, documents: int, share: float, balance: float) -> None:
    def setup() -> Setup:
        total = TOKENS * world
        slices = _slices(kind, total, 0, documents)

        def plan() -> Any:
            return _plan(slices, total, world)

        def check(name: str, result: Any) -> Check:
            off = abs(int(result.balance.sum()) - result.bands.area())
            return Check(float(off), 0.0, "areas")

        names = ("traffic_over_min_heap", "received_tokens", "min_heap_tokens", "contiguous_tokens", "balance",
                 "worst_balance", "busiest_sender", "busiest_receiver")  # fmt: skip
        measures = {n: (lambda n=n: _traffic(kind, world, documents)[n]) for n in names}
        return Setup({"magi": plan}, check, measures)

    bounds = {"traffic_over_min_heap": share, "balance": balance, "busiest_sender": 1.5, "busiest_receiver": 1.6}
    params = {"mask": kind, "world_size": world, "tokens_a_rank": TOKENS, "packs": PACKS}
    register(Case(f"planner/traffic/{kind}/p{world}", "plan_traffic", setup, params, bounds=bounds, threads=1))


def _window_case() -> None:
    total, world = 1 << 18, 8

    def setup() -> Setup:
        slices = _slices("window1024", total)

        def plan() -> Any:
            return _plan(slices, total, world)

        def check(name: str, result: Any) -> Check:
            return Check(float(abs(int(result.balance.sum()) - result.bands.area())), 0.0, "areas")

        return Setup(
            {"magi": plan},
            check,
            {
                "received_max": lambda: float(plan().num_received().max()),
                "balance": lambda: float(plan().balance.max() / plan().balance.mean()),
            },
        )

    params = {"mask": "window1024", "world_size": world, "tokens_a_rank": total // world}
    bounds = {"received_max": 1100.0, "balance": 1.02}
    register(Case("planner/traffic/window1024/p8", "plan_traffic", setup, params, bounds=bounds, threads=1))


for _kind, _limits in LIMITS_MS.items():
    for _world, _limit in _limits.items():
        _time_case(_kind, _world, _limit)
_time_case("documents", 64, 20.0, documents=10_000)
_traffic_case("varlen_causal", 8, 0, 0.35, 1.02)
_traffic_case("varlen_causal", 64, 0, 0.40, 1.05)
_traffic_case("log_normal", 8, 50, 0.60, 1.02)
_traffic_case("log_normal", 64, 403, 0.60, 1.05)
_window_case()
