"""The plan of all ranks as one flat buffer, and what one rank reads out of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .. import _host
from ..bands import Bands
from ..errors import checked_int
from ._arrays import Int32Array, Int64Array, band_array, frozen, int64_array
from .options import PlanOptions
from .owners import Owners

# Word index of each header field: csrc/host/dist_plan.h.
_HEADER = [
    "magic",
    "version",
    "digest",
    "num_words",
    "world_size",
    "total_q",
    "total_k",
    "num_stages",
    "blocking",
    "predicted_fs",
    "num_bands",
    "bands",
    "num_q_runs",
    "q_runs",
    "num_k_runs",
    "k_runs",
    "areas",
    "stage_offsets",
    "num_stage_ranges",
    "stage_ranges",
]


@dataclass(frozen=True, eq=False)
class StagePlan:
    """One remote stage of one rank.

    Attributes:
        recv: ``(n, 3)`` int64 rows (source rank, k0, k1), global keys, ascending k0. The stage's key buffer is these
            ranges, back to back.
        send: ``(n, 3)`` int64 rows (destination rank, l0, l1), local keys, ascending (destination, l0): for each
            destination its ranges are, back to back, what it receives from this rank, in its order.
        bands: local queries x the stage's key buffer.
        num_keys: length of the key buffer.
    """

    recv: Int64Array
    send: Int64Array
    bands: Bands

    @property
    def num_keys(self) -> int:
        return int((self.recv[:, 2] - self.recv[:, 1]).sum())

    @property
    def num_sent(self) -> int:
        """Tokens sent, one copy per destination."""
        return int((self.send[:, 2] - self.send[:, 1]).sum())


@dataclass(frozen=True, eq=False)
class RankPlan:
    """What one rank computes and exchanges: its local stage first, then the remote ones.

    Attributes:
        rank, world_size: whose plan.
        num_q, num_k: local queries and keys.
        local_bands: local queries x local keys.
        stages: remote stages; the same number on every rank, transfers may be empty.
        blocking: every remote key must be there before anything is computed (degree 0).
    """

    rank: int
    world_size: int
    num_q: int
    num_k: int
    local_bands: Bands
    stages: tuple[StagePlan, ...]
    blocking: bool

    @property
    def num_stages(self) -> int:
        """Remote stages."""
        return len(self.stages)


def _packed_bands(words: Int32Array) -> Bands:
    return Bands(words.reshape(-1, 6))


class DistPlan:
    """An immutable plan for all ranks; equal on every rank that planned with equal arguments.

    Args:
        buffer: the flat int64 form (``plan.buffer``), of this version and unchanged since it was made.

    Raises:
        ValueError: the buffer is no plan, of another version, changed, or inconsistent.
    """

    def __init__(self, buffer: Any) -> None:
        words = int64_array(buffer, "buffer").copy()
        _host.lib().planner_check_dist_plan(words)
        self._words = words
        self._header = dict(zip(_HEADER, words[: len(_HEADER)].tolist()))
        self._rank_plans: dict[int, RankPlan] = {}

    @property
    def buffer(self) -> Int64Array:
        """``(num_words,)`` int64, read-only; serialise this."""
        view: Int64Array = self._words.view()
        view.setflags(write=False)
        return view

    @property
    def digest(self) -> int:
        """64 bits; two ranks that hold the same digest planned the same."""
        return int(self._header["digest"]) & (2**64 - 1)

    @property
    def world_size(self) -> int:
        return int(self._header["world_size"])

    @property
    def total_q(self) -> int:
        return int(self._header["total_q"])

    @property
    def total_k(self) -> int:
        return int(self._header["total_k"])

    @property
    def num_stages(self) -> int:
        """Remote stages, equal on every rank; 0 when nothing has to travel."""
        return int(self._header["num_stages"])

    @property
    def blocking(self) -> bool:
        """Degree 0: the one remote stage is awaited before anything is computed."""
        return bool(self._header["blocking"])

    @property
    def predicted_fs(self) -> int:
        """Predicted time of the slowest rank, femtoseconds; 0 when the cost model was not asked (static, uniform)."""
        return int(self._header["predicted_fs"])

    def _section(self, name: str, count: int, width: int) -> Int64Array:
        first = self._header[name]
        section: Int64Array = self._words[first : first + count * width].reshape(count, width)
        return section

    @cached_property
    def bands(self) -> Bands:
        """The whole mask, global coordinates."""
        return Bands(self._section("bands", self._header["num_bands"], 6))

    def _owners(self, which: str, total: int) -> Owners:
        rows = self._section(f"{which}_runs", self._header[f"num_{which}_runs"], 3)
        return Owners.from_table(rows.astype(np.int32), self.world_size, total)

    @cached_property
    def q_owners(self) -> Owners:
        """Which rank holds which queries."""
        return self._owners("q", self.total_q)

    @cached_property
    def k_owners(self) -> Owners:
        """Which rank holds which keys; the same object as ``q_owners`` when they are the same."""
        sections = [self._section(f"{which}_runs", self._header[f"num_{which}_runs"], 3) for which in "qk"]
        if self.total_q == self.total_k and np.array_equal(sections[0], sections[1]):
            return self.q_owners
        return self._owners("k", self.total_k)

    @cached_property
    def balance(self) -> Int64Array:
        """``(world_size,)`` int64: visible pairs that each rank computes."""
        return frozen(self._section("areas", self.world_size, 1)[:, 0].copy())

    @cached_property
    def traffic(self) -> Int64Array:
        """``(num_stages, world_size, world_size)`` int64: tokens of keys sent in a stage from rank [1] to rank [2]."""
        return frozen(_host.array(_host.lib().planner_traffic(self._words)))

    def num_received(self) -> Int64Array:
        """``(world_size,)`` tokens of keys that each rank receives: its distinct remote keys, each once."""
        return np.asarray(self.traffic.sum(axis=(0, 1)), np.int64)

    def num_sent(self) -> Int64Array:
        """``(world_size,)`` tokens of keys that each rank sends, one copy per destination."""
        return np.asarray(self.traffic.sum(axis=(0, 2)), np.int64)

    def received_bytes(self, bytes_per_token: int) -> Int64Array:
        """``(world_size,)`` bytes received in the forward pass.

        Args:
            bytes_per_token: of keys and values together: ``num_heads_kv * (head_dim + head_dim_v) * itemsize``.
        """
        return self.num_received() * checked_int(bytes_per_token, "bytes_per_token", minimum=0)

    def rank_plan(self, rank: int) -> RankPlan:
        """What ``rank`` computes and exchanges; made at first use and kept."""
        rank = checked_int(rank, "rank", minimum=0, maximum=self.world_size - 1)
        if rank not in self._rank_plans:
            packed = _host.array(_host.lib().planner_rank_plan(self._words, rank))
            self._rank_plans[rank] = self._unpacked(rank, packed)
        return self._rank_plans[rank]

    def _unpacked(self, rank: int, packed: Int32Array) -> RankPlan:
        # Layout: csrc/binding/host_planner.cc, packed().
        num_stages, num_local = packed[:2].tolist()
        counts = packed[2 : 2 + 3 * num_stages].reshape(-1, 3).tolist()
        at = 2 + 3 * num_stages

        def take(count: int, width: int) -> Int32Array:
            nonlocal at
            at += count * width
            return packed[at - count * width : at].reshape(count, width)

        local_bands = _packed_bands(take(num_local, 6))
        stages = []
        for num_recv, num_send, num_bands in counts:
            recv, send = (frozen(take(n, 3).astype(np.int64)) for n in (num_recv, num_send))
            stages.append(StagePlan(recv, send, _packed_bands(take(num_bands, 6))))
        return RankPlan(
            rank=rank,
            world_size=self.world_size,
            num_q=self.q_owners.num_local(rank),
            num_k=self.k_owners.num_local(rank),
            local_bands=local_bands,
            stages=tuple(stages),
            blocking=self.blocking,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DistPlan):
            return NotImplemented
        return np.array_equal(self._words, other._words)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[type[DistPlan], tuple[Int64Array]]:
        return DistPlan, (self._words,)

    def __repr__(self) -> str:
        return (
            f"DistPlan(world_size={self.world_size}, total_q={self.total_q}, total_k={self.total_k}, "
            f"num_stages={self.num_stages}, digest={self.digest:#018x})"
        )


def plan_distributed(
    mask_or_bands: Any,
    total_q: int,
    total_k: int,
    q_owners: Owners,
    k_owners: Owners,
    options: PlanOptions | None = None,
) -> DistPlan:
    """Plans attention over a mask whose queries and keys are spread over ranks.

    Keys travel, queries stay: a rank computes the rows it owns and receives each remote key it sees exactly once.

    Args:
        mask_or_bands: Mask, Bands or ``(n, 6)`` int rows, global coordinates.
        total_q, total_k: rows and columns of the mask; may differ (cross attention).
        q_owners, k_owners: owners of queries (total ``total_q``) and of keys (total ``total_k``), one world size. For
            self attention pass the same object twice.
        options: stages and cost model; defaults when None.

    Raises:
        ValueError: totals, world sizes or bands that do not fit one another. TypeError: wrong types.
    """
    for name, owners in (("q_owners", q_owners), ("k_owners", k_owners)):
        if not isinstance(owners, Owners):
            raise TypeError(f"{name} must be Owners, got {type(owners).__name__}")
    chosen = PlanOptions() if options is None else options
    if not isinstance(chosen, PlanOptions):
        raise TypeError(f"options must be PlanOptions, got {type(chosen).__name__}")
    for total, name, owners in ((total_q, "q", q_owners), (total_k, "k", k_owners)):
        if checked_int(total, f"total_{name}", minimum=0) != owners.total:
            raise ValueError(f"{name}_owners must own total_{name} = {total} tokens, got {owners.total}")
    if q_owners.world_size != k_owners.world_size:
        raise ValueError(
            f"k_owners must have the world size of q_owners ({q_owners.world_size}), got {k_owners.world_size}"
        )
    return DistPlan(
        _host.array(
            _host.lib().planner_plan_distributed(
                band_array(mask_or_bands),
                q_owners._table3(),
                k_owners._table3(),
                q_owners.world_size,
                q_owners.total,
                k_owners.total,
                chosen.to_array(),
            )
        )
    )
