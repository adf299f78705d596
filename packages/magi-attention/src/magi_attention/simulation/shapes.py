"""What each rank of each system computes and moves, as steps for the cost model.

Rings across ranks know full and causal documents only: a window is computed as a causal mask there.

Sources: DeepSpeed-Ulysses (arXiv:2309.14509), ring attention (arXiv:2310.01889) with zigzag shards, USP
(arXiv:2405.07719), LoongTrain (arXiv:2406.18485); volumes as in the reference "distributed", section 9.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .machine import TILE, Machine, Prediction, Step, Work
from .masks import Documents, up

Ranks = list[list[Step]]  # the steps of each rank that may be the slowest


def _whole(mask: Documents, heads: float) -> Work:
    """All documents on one rank, a share of the heads."""
    n = up(mask.array).astype(float)
    if mask.causal and mask.window:
        pairs = (n * np.minimum(n / 2 + TILE / 2, mask.window + TILE)).sum()
    else:
        pairs = (n * (n + TILE) / 2 if mask.causal else n * n).sum()
    return Work(float(pairs), float(n.sum()), float(n.sum()), heads, segments=len(n), grid=_grid(n))


def _grid(cols: Any) -> float:
    """Thread blocks of a varlen kernel whose grid is the longest segment times the number of segments."""
    return float(cols.max() / TILE * len(cols)) if len(cols) > 1 else 0.0


def _all_to_all(m: Machine, num_bytes: float, ranks: int) -> tuple[float, float]:
    """``(NVLink, network)`` bytes of a rank that spreads ``num_bytes`` over ``ranks`` neighbours."""
    near = min(ranks, m.gpus_per_node)
    return num_bytes * (near - 1) / ranks, num_bytes * (ranks - near) / ranks


def ulysses(m: Machine, mask: Documents, world: int) -> Ranks | None:
    """Heads split over all ranks: two blocking all-to-alls. None where there are more ranks than heads."""
    if m.num_heads_q % world:
        return None
    tokens = mask.total / world
    kv = m.kv_bytes * max(1.0, world / m.num_heads_kv)
    nvlink, network = _all_to_all(m, tokens * (2 * m.q_bytes + kv), world)
    return [[Step(_whole(mask, 1 / world), nvlink, network, backward_bytes=1.0, is_alltoall=True)]]


def _ring(m: Machine, mask: Documents, ring: int, heads: float, tokens: float, over_network: bool) -> list[Step]:
    """Zigzag ring attention: every document in ``2 * ring`` pieces; ``tokens`` of keys travel in each step."""
    piece = np.ceil(mask.array / (2 * ring))  # each document padded to a multiple of 2 * ring
    one, two = up(piece).astype(float), up(2 * piece).astype(float)
    rows, count = float(two.sum()), float(len(piece))
    first = Work(
        float((two * (two + TILE) / 2 if mask.causal else two * two).sum()), rows, rows, heads, segments=count,
        grid=_grid(two),
    )  # fmt: skip
    num_bytes = tokens * m.kv_bytes * heads
    link = (0.0, num_bytes) if over_network else (num_bytes, 0.0)
    if ring == 1:
        return [Step(_whole(mask, heads))]
    steps = [Step(first, link[0], link[1], is_hidden=True, backward_bytes=3.0)]  # keys, and their gradients in fp32
    # Later steps of a causal mask see half of the keys, or are half of the rows.
    pairs = float((two * one if mask.causal else two * two).sum())
    cols = float((one if mask.causal else two).sum())
    later = Work(pairs, rows, cols, heads, merge_rows=2 * float(piece.sum()), segments=count, grid=_grid(two))
    steps.append(Step(later, link[0], link[1], is_hidden=True, backward_bytes=3.0, count=ring - 2))
    steps.append(Step(later))
    return steps


def ring_p2p(m: Machine, mask: Documents, world: int) -> Ranks:
    """Keys and values travel once around."""
    return [_ring(m, mask, world, 1.0, mask.total / world, world > m.gpus_per_node)]


def ring_allgather(m: Machine, mask: Documents, world: int) -> Ranks:
    """One all-gather of keys and values, then two kernels over half of the rows each."""
    piece = up(np.ceil(mask.array / (2 * world))).astype(float)
    n = up(mask.array).astype(float)
    share = n / 2 if mask.causal else n  # the two pieces of a rank see n in sum, by zigzag
    half = Work(
        float((piece * (share + (TILE / 2 if mask.causal else 0))).sum()), float(piece.sum()), float(share.sum()),
        segments=len(n), grid=_grid(n),
    )  # fmt: skip
    total = mask.total * m.kv_bytes
    nodes = max(1, world // m.gpus_per_node)
    # Each node's GPUs bring the keys of other nodes in together, then share them.
    network = total * (nodes - 1) / nodes / min(world, m.gpus_per_node)
    gather = Step(Work(), total * (world - 1) / world, network, backward_bytes=3.0)
    return [[gather, Step(half, count=2)]]


def usp(m: Machine, mask: Documents, world: int) -> Ranks:
    """Heads split inside a node, a zigzag ring across nodes."""
    near = math.gcd(min(world, m.gpus_per_node), m.num_heads_q)
    tokens = mask.total / world
    kv = m.kv_bytes * max(1.0, near / m.num_heads_kv)
    nvlink, _ = _all_to_all(m, tokens * (2 * m.q_bytes + kv), near)
    ring = world // near
    return [
        [
            Step(Work(), nvlink, 0.0, backward_bytes=1.0, is_alltoall=True),
            *_ring(m, mask, ring, 1 / near, tokens * near, ring > 1),
        ]
    ]


def loongtrain(m: Machine, mask: Documents, world: int) -> Ranks:
    """USP whose ring is two nested ones: the same volume, a transfer waited for at the end of each inner ring."""
    ranks = usp(m, mask, world)
    ring = world // math.gcd(min(world, m.gpus_per_node), m.num_heads_q)
    windows = max((d for d in range(1, math.isqrt(ring) + 1) if ring % d == 0), default=1)
    extra = ranks[0][1]
    return [[*ranks[0], Step(Work(), extra.nvlink_bytes, extra.network_bytes, backward_bytes=3.0, count=windows)]]


def _banded(bands: Any) -> Work:
    rows = (bands.data[:, 1] - bands.data[:, 0]).astype(float)
    if len(rows) == 0:
        return Work()
    width = np.asarray(bands.areas(), float) / rows
    keys = (bands.data[:, 3] - bands.data[:, 2]).astype(float)
    cut = width < keys  # a diagonal crosses it
    tiled = up(rows).astype(float)
    pairs = tiled * np.where(cut, np.minimum(up(keys), width + TILE / 2), up(keys))
    return Work(float(pairs.sum()), float(tiled.sum()), float(up(keys).sum()), segments=len(rows))


def ours(
    m: Machine,
    mask: Documents,
    world: int,
    *,
    alg: str = "balanced",
    chunk_size: int | None = None,
    degree: int | None = None,
    relay: bool = True,
    look_at: int = 4,
) -> Ranks:
    """The plan that a key would make, rank by rank: the busiest in area, receiving and sending.

    Args:
        alg, chunk_size, degree: of the plan; None lets the mask and the cost model choose.
        relay: keys cross between nodes once per node.
        look_at: ranks looked at for each of the four kinds of busiest.
    """
    from magi_core.planner import (
        Owners,
        PlanOptions,
        chunk_areas,
        dispatch_chunks,
        plan_distributed,
        suggest_chunk_size,
    )

    bands, total = mask.bands(), mask.total
    size = suggest_chunk_size(bands, total, world) if chunk_size is None else chunk_size
    areas = chunk_areas(bands, size, total)
    chunks = dispatch_chunks(areas, world, alg, bands=bands, chunk_size=size, total_q=total)
    owners = Owners.from_chunks(chunks, size, total)
    plan = plan_distributed(bands, total, total, owners, owners, PlanOptions(degree=degree))
    node = np.arange(world) // m.gpus_per_node
    near = node[:, None] == node[None, :]
    recv = np.zeros((plan.num_stages, 2, world))
    sent = np.zeros_like(recv)
    for stage, tokens in enumerate(plan.traffic):
        moved = np.where(near, tokens, 0)
        recv[stage, 0], sent[stage, 0] = moved.sum(0), moved.sum(1)
        recv[stage, 1], sent[stage, 1] = tokens.sum(0) - recv[stage, 0], tokens.sum(1) - sent[stage, 0]
    if relay and world > m.gpus_per_node:
        _relay(plan, m, recv, sent)
    busiest = [plan.balance, recv.sum((0, 1)), sent[:, 1].sum(0), recv[:, 1].sum(0)]
    ranks = sorted({int(r) for by in busiest for r in np.argsort(-by, kind="stable")[:look_at]})
    out = []
    for rank in ranks:
        mine = plan.rank_plan(rank)
        works = [_banded(b) for b in (mine.local_bands, *(s.bands for s in mine.stages))]
        both = np.maximum(recv, sent)[:, :, rank] * m.kv_bytes  # links are full duplex
        steps = [Step(works[s], float(both[s, 0]), float(both[s, 1]), is_hidden=True) for s in range(plan.num_stages)]
        out.append([*steps, Step(works[-1])])
    return out


def _relay(plan: Any, m: Machine, recv: Any, sent: Any) -> None:
    """Network traffic with each key sent once to each node: union of the ranges its ranks receive, spread over them."""
    world, per = plan.world_size, m.gpus_per_node
    stages = plan.num_stages
    by_node = np.zeros((stages, world, -(-world // per)))  # keys of each source that each node needs, once
    for first in range(0, world, per):
        plans = [plan.rank_plan(r) for r in range(first, min(first + per, world))]
        for stage in range(stages):
            rows = np.concatenate([p.stages[stage].recv for p in plans])
            rows = rows[rows[:, 0] // per != first // per]
            # One line for all sources, each on its own stretch: what lies beyond all earlier ends is new.
            shift = rows[:, 0] * (plan.total_k + 1)
            begins, stops = rows[:, 1] + shift, rows[:, 2] + shift
            order = np.argsort(begins, kind="stable")
            ends = np.maximum.accumulate(stops[order])
            starts = np.maximum(begins[order], np.concatenate([[0], ends[:-1]]))
            np.add.at(by_node[stage, :, first // per], rows[order, 0], np.maximum(0, ends - starts))
    for stage in range(stages):
        sent[stage, 1] = by_node[stage].sum(1)
        recv[stage, 1] = np.repeat(by_node[stage].sum(0) / per, per)[:world]


METHODS: dict[str, Callable[[Machine, Documents, int], Ranks | None]] = {
    "magi": ours,
    "ulysses": ulysses,
    "ring_p2p": ring_p2p,
    "ring_allgather": ring_allgather,
    "usp": usp,
    "loongtrain": loongtrain,
}


def predict(m: Machine, ranks: Ranks, *, backward: bool) -> Prediction:
    """The slowest rank."""
    return max((m.rank(steps, backward) for steps in ranks), key=lambda p: p.total_s)
