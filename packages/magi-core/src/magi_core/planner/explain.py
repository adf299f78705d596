"""A plan in numbers: balance, traffic, stages and their predicted overlap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import checked_int
from ._arrays import Int64Array
from .dist_plan import DistPlan
from .options import PlanOptions


@dataclass(frozen=True, eq=False)
class PlanReport:
    """What ``explain_plan`` found. Arrays are int64; times are predictions of the cost model in femtoseconds (each
    saturates at 2**56, some 70 seconds).

    Attributes:
        world_size, total_q, total_k, num_stages, blocking, digest: of the plan.
        bytes_per_token: size of one token of keys and values on the wire.
        areas: ``(world,)`` visible pairs per rank.
        num_q, num_k: ``(world,)`` tokens owned.
        received, sent: ``(world,)`` tokens of keys.
        links: ``(world, world)`` tokens from [0] to [1], all stages.
        stage_received: ``(stages, world)`` tokens.
        stage_areas, stage_bands: ``(1 + stages, world)`` pairs and bands; row 0 is the local stage.
        transfer_fs, compute_fs: ``(stages, world)`` and ``(1 + stages, world)`` predicted times.
        total_fs: ``(world,)`` predicted time of each rank with overlap.
        exposed_fs: ``(world,)`` part of it in which the rank only waits.
    """

    world_size: int
    total_q: int
    total_k: int
    num_stages: int
    blocking: bool
    digest: int
    bytes_per_token: int
    areas: Int64Array
    num_q: Int64Array
    num_k: Int64Array
    received: Int64Array
    sent: Int64Array
    links: Int64Array
    stage_received: Int64Array
    stage_areas: Int64Array
    stage_bands: Int64Array
    transfer_fs: Int64Array
    compute_fs: Int64Array
    total_fs: Int64Array
    exposed_fs: Int64Array

    @property
    def balance(self) -> float:
        """Largest area over the mean; 1 is perfect, also when nothing is visible."""
        total = int(self.areas.sum())
        return float(self.areas.max()) * self.world_size / total if total else 1.0

    @property
    def local_share(self) -> float:
        """Share of the pairs that need no remote key."""
        total = int(self.areas.sum())
        return int(self.stage_areas[0].sum()) / total if total else 1.0

    @property
    def critical_rank(self) -> int:
        """The rank that is predicted to end last."""
        return int(self.total_fs.argmax())

    @property
    def reason(self) -> str:
        """Why that rank ends last."""
        rank = self.critical_rank
        mean = max(1, int(self.areas.sum()) // self.world_size)
        if self.exposed_fs[rank] * 10 >= self.total_fs[rank]:
            share = 100 * int(self.exposed_fs[rank]) // max(1, int(self.total_fs[rank]))
            return f"it waits for keys {share} % of its time ({int(self.received[rank])} tokens received)"
        return f"it computes {int(self.areas[rank]) / mean:.3f} times the mean area"

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for JSON."""
        out: dict[str, Any] = {
            name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(self).items()
        }
        return out | {
            "balance": self.balance,
            "local_share": self.local_share,
            "critical_rank": self.critical_rank,
            "reason": self.reason,
        }

    def __str__(self) -> str:
        head = (
            f"{self.world_size} ranks, {self.total_q} queries x {self.total_k} keys, {self.num_stages} remote stage(s)"
            f"{' (blocking)' if self.blocking else ''}, plan {self.digest:#018x}"
        )
        columns = ["rank", "queries", "keys", "pairs", "local %", "recv", "recv KiB", "sent", "sent KiB"]
        columns += [f"stage {s}" for s in range(1, self.num_stages + 1)] + ["bands", "time us", "waits us"]
        rows = []
        for r in range(self.world_size):
            area = int(self.areas[r])
            row: list[int | str] = [r, int(self.num_q[r]), int(self.num_k[r]), area]
            row.append(f"{100 * int(self.stage_areas[0, r]) / area:.1f}" if area else "-")
            for tokens in (int(self.received[r]), int(self.sent[r])):
                row += [tokens, f"{tokens * self.bytes_per_token / 1024:.1f}"]
            row += [int(t) for t in self.stage_received[:, r]]
            row += [int(self.stage_bands[:, r].sum())]
            row += [f"{int(t) / 1e9:.1f}" for t in (self.total_fs[r], self.exposed_fs[r])]
            rows.append([str(x) for x in row])
        widths = [max(len(line[i]) for line in [columns, *rows]) for i in range(len(columns))]
        table = ["  ".join(x.rjust(w) for x, w in zip(line, widths)) for line in [columns, *rows]]
        mean = int(self.received.sum()) / self.world_size
        busiest = f"busiest receiver {int(self.received.max())}, sender {int(self.sent.max())}, mean {mean:.0f} tokens"
        tail = [
            f"balance (largest area / mean) {self.balance:.4f}; {100 * self.local_share:.1f} % of the pairs are local; "
            + busiest,
            f"predicted to end last: rank {self.critical_rank}, because {self.reason}",
        ]
        return "\n".join([head, *table, *tail])


def _costs(amounts: Int64Array, start_fs: int, each_fs: int) -> Int64Array:
    """``start_fs + amount * each_fs`` where there is an amount, 0 elsewhere; at most 2**56, so that sums fit."""
    flat = [min(2**56, start_fs + n * each_fs) if n else 0 for n in amounts.reshape(-1).tolist()]
    return np.array(flat, np.int64).reshape(amounts.shape)


def explain_plan(dist_plan: DistPlan, bytes_per_token: int = 4096, options: PlanOptions | None = None) -> PlanReport:
    """Balance, tokens and bytes per rank and link, stages and predicted overlap of a plan.

    Args:
        dist_plan: the plan.
        bytes_per_token: of keys and values together: ``num_heads_kv * (head_dim + head_dim_v) * itemsize``.
        options: their costs make the prediction; the defaults of ``PlanOptions`` when None. The forward pass is
            predicted as local work under the first transfer, then each stage's work under the next transfer.
    """
    costs = PlanOptions() if options is None else options
    width = checked_int(bytes_per_token, "bytes_per_token", minimum=0)
    world, num_stages = dist_plan.world_size, dist_plan.num_stages
    areas = np.zeros((1 + num_stages, world), np.int64)
    bands = np.zeros((1 + num_stages, world), np.int64)
    for rank in range(world):
        plan = dist_plan.rank_plan(rank)
        for part, part_bands in enumerate([plan.local_bands, *(s.bands for s in plan.stages)]):
            areas[part, rank] = part_bands.area()
            bands[part, rank] = len(part_bands)
    received = dist_plan.traffic.sum(axis=1)
    transfer = _costs(received, costs.transfer_start_fs, costs.token_cost_fs)
    compute = _costs(areas, costs.compute_start_fs, costs.pair_cost_fs)
    busy = compute.sum(axis=0)
    if dist_plan.blocking:
        total = transfer.sum(axis=0) + busy
    else:
        total = compute[-1].copy()
        for stage in range(num_stages):
            total += np.maximum(transfer[stage], compute[stage])
    return PlanReport(
        world_size=world,
        total_q=dist_plan.total_q,
        total_k=dist_plan.total_k,
        num_stages=num_stages,
        blocking=dist_plan.blocking,
        digest=dist_plan.digest,
        bytes_per_token=width,
        areas=dist_plan.balance,
        num_q=dist_plan.q_owners.num_tokens,
        num_k=dist_plan.k_owners.num_tokens,
        received=dist_plan.num_received(),
        sent=dist_plan.num_sent(),
        links=dist_plan.traffic.sum(axis=0),
        stage_received=received,
        stage_areas=areas,
        stage_bands=bands,
        transfer_fs=transfer,
        compute_fs=compute,
        total_fs=total,
        exposed_fs=total - busy,
    )
