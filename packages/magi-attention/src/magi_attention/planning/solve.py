"""From a request to a live plan: mask, placement of tokens, transfers and stages, this rank's part.

Replicated: every rank solves the whole problem from equal arguments, in the host library, and nothing is exchanged.
What is equal for all ranks of a process (tests run many) is solved once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
from magi_comm.groups import Communicator
from magi_comm.two_level import TwoLevelCommunicator, make_exchange
from magi_core.bands import Bands
from magi_core.mask import Mask
from magi_core.planner import (
    DistPlan,
    Owners,
    PlanOptions,
    build_stage_plans,
    chunk_areas,
    dispatch_chunks,
    plan_distributed,
    suggest_chunk_size,
    verify,
)

from .. import env
from ..config import (
    BalancedDispatchAlg,
    BatchToppHeapDispatchAlg,
    DispatchAlg,
    DispatchConfig,
    DistAttnConfig,
    OverlapConfig,
    RandomSelectDispatchAlg,
    SequentialDispatchAlg,
    SortedSequentialSelectAlg,
    ToppHeapDispatchAlg,
    UniformOverlapAlg,
)
from ..env import EnvSnapshot
from ..runtime.attention import DistAttnRuntime, RemoteStage
from ..runtime.handles import handles
from ..runtime.placement import TokenPlacement
from ..runtime.transport import Transport
from .arguments import GroupLike, as_group, as_mask
from .key import DistAttnRuntimeKey
from .manager import DistAttnRuntimeMgr
from .registry import dist_attn_runtime_dict_mgr

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeyRequest:
    """What the key functions were asked for; see ``api.magi_attn_flex_key`` for the fields."""

    q_ranges: Any
    k_ranges: Any
    attn_mask_type: Any
    total_seqlen_q: int
    total_seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    cp_group_or_mesh: GroupLike
    dist_attn_config: DistAttnConfig
    allow_overlap: bool = False

    def mask(self) -> Mask:
        """The checked mask."""
        return as_mask(
            self.q_ranges,
            self.k_ranges,
            self.attn_mask_type,
            self.total_seqlen_q,
            self.total_seqlen_k,
            allow_overlap=self.allow_overlap,
        )

    def check_sizes(self) -> None:
        """Refuse sizes that no attention has."""
        for name in ("num_heads_q", "num_heads_kv", "head_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise TypeError(f"{name} must be an int, got {value!r} of {type(value).__name__}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.num_heads_q % self.num_heads_kv:
            raise ValueError(
                f"num_heads_q must be a multiple of num_heads_kv ({self.num_heads_kv}), got {self.num_heads_q}"
            )


class _Memo:
    """The last few results of an expensive pure function, shared by the threads of a process."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._lock = threading.Lock()
        self._locks: dict[Any, threading.Lock] = {}
        self._values: OrderedDict[Any, Any] = OrderedDict()

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._locks.clear()
            self._values.clear()

    def get(self, name: Any, make: Any) -> Any:
        """The value of ``name``, made by ``make`` when it is not there."""
        with self._lock:
            own = self._locks.setdefault(name, threading.Lock())
        with own:  # one thread makes it, the others of the same name wait for that
            with self._lock:
                if name in self._values:
                    self._values.move_to_end(name)
                    return self._values[name]
            value = make()
            with self._lock:
                self._values[name] = value
                while len(self._values) > self._max_size:
                    old, _ = self._values.popitem(last=False)
                    self._locks.pop(old, None)
        return value


_chunk_sizes = _Memo(16)
_placements = _Memo(16)
_dist_plans = _Memo(16)


def forget_solutions() -> None:
    """Drop what was solved and may be shared; keys keep their own."""
    _chunk_sizes.clear()
    _placements.clear()
    _dist_plans.clear()


def chunk_size_for(
    bands: Bands, total: int, world_size: int, dispatch: DispatchConfig, alg: DispatchAlg, min_chunks_per_rank: int
) -> int:
    """Tokens of a chunk: ``ceil(total / (min_chunks_per_rank * world_size))``, at most the configured size, at least 1.

    Where nobody chose (no size, the usual number of chunks, our own algorithm), the mask does: see
    ``magi_core.planner.suggest_chunk_size``.
    """
    if (
        dispatch.chunk_size is None
        and isinstance(alg, BalancedDispatchAlg)
        and min_chunks_per_rank == EnvSnapshot().min_chunks_per_rank
    ):
        return suggest_chunk_size(bands, total, world_size)
    automatic = max(1, -(-total // (min_chunks_per_rank * world_size)))
    return automatic if dispatch.chunk_size is None else min(automatic, dispatch.chunk_size)


def _algorithm_options(alg: DispatchAlg) -> dict[str, Any]:
    if isinstance(alg, BalancedDispatchAlg):
        return {"balance_ppm": round(1e6 * alg.balance_slack)}
    if isinstance(alg, ToppHeapDispatchAlg):
        return {"top_p": float(alg.top_p)}
    if isinstance(alg, BatchToppHeapDispatchAlg):
        return {"top_p": float(alg.top_p), "num_of_select_chunk": alg.num_of_select_chunk}
    if isinstance(alg, SortedSequentialSelectAlg):
        return {"allocation_ratio": float(alg.allocation_ratio)}
    if isinstance(alg, RandomSelectDispatchAlg):
        return {"seed": alg.random_seed}
    return {}


def place_by_area(
    bands: Bands, total: int, world_size: int, chunk_size: int, alg: DispatchAlg, *, even: bool
) -> TokenPlacement:
    """Chunks of query rows on ranks, as ``alg`` shares them out."""
    areas = chunk_areas(bands, chunk_size, total)
    chunks = dispatch_chunks(
        areas,
        world_size,
        alg.type,
        bands=bands,
        chunk_size=chunk_size,
        total_q=total,
        **_algorithm_options(alg),
    )
    return TokenPlacement.from_chunks(total, chunk_size, [c.tolist() for c in chunks], even=even)


def place_contiguously(total: int, world_size: int, *, even: bool) -> TokenPlacement:
    """Blocks of equal length in rank order; the last ones may be short or empty."""
    block = max(1, -(-total // world_size))
    chunks = [[rank] if rank * block < total else [] for rank in range(world_size)]
    return TokenPlacement.from_chunks(total, block, chunks, even=even)


def plan_options(config: OverlapConfig) -> PlanOptions:
    """The planner's options of an overlap configuration.

    The public cost factors are a ratio in disguise: left at their defaults (1 and 1), they say nothing, and the planner
    takes its own costs.
    """
    alg, seed = config.alg, None
    if isinstance(alg, UniformOverlapAlg) and alg.random_costs:
        seed = alg.random_seed or 0
    costs = {}
    if (config.calc_cost_factor, config.comm_cost_factor) != (1.0, 1.0):
        costs = {
            "pair_cost_fs": PlanOptions.cost_from_us(config.calc_cost_factor, "OverlapConfig.calc_cost_factor"),
            "token_cost_fs": PlanOptions.cost_from_us(config.comm_cost_factor, "OverlapConfig.comm_cost_factor"),
        }
    return PlanOptions(
        degree=config.degree,
        max_degree=config.dynamic_max_degree,
        min_chunk_size=config.min_chunk_size,
        max_num_chunks=config.max_num_chunks,
        alg=alg.type.value,
        shuffle_seed=seed,
        **costs,
    )


def _owners(placement: TokenPlacement) -> Owners:
    return Owners([r.astype(np.int32) for r in placement.ranges], placement.total)


def _dist_plan(
    mask: Mask, q_placement: TokenPlacement, k_placement: TokenPlacement, options: PlanOptions, sanity_check: bool
) -> DistPlan:
    def make() -> DistPlan:
        q_owners = _owners(q_placement)
        k_owners = q_owners if k_placement is q_placement else _owners(k_placement)
        plan = plan_distributed(mask.bands, mask.total_q, mask.total_k, q_owners, k_owners, options)
        if sanity_check:
            verify(plan)
        return plan

    name = (mask.digest, mask.total_q, mask.total_k, q_placement.digest, k_placement.digest, options, sanity_check)
    return _dist_plans.get(name, make)  # type: ignore[no-any-return]


def make_key(
    request: KeyRequest, *, is_same_source: bool = True, is_q_permutable: bool = True, is_k_permutable: bool = True
) -> DistAttnRuntimeKey:
    """The key of a request, with a live plan behind it."""
    request.check_sizes()
    for name, flag in (
        ("is_same_source", is_same_source),
        ("is_q_permutable", is_q_permutable),
        ("is_k_permutable", is_k_permutable),
    ):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, got {flag!r} of {type(flag).__name__}")
    mask = request.mask()
    comm = as_group(request.cp_group_or_mesh)
    snapshot = env.snapshot()
    config = request.dist_attn_config
    dispatch_config = config.dispatch_config
    even = not dispatch_config.uneven_shard and comm.size > 1  # one rank is the plain operator: nothing to even out
    is_shared = is_same_source and mask.total_q == mask.total_k
    is_permutable = is_q_permutable and (is_k_permutable or not is_shared)
    alg = dispatch_config.alg if is_permutable else SequentialDispatchAlg()
    chunk_size: int = _chunk_sizes.get(
        (mask.digest, mask.total_q, comm.size, dispatch_config, alg, snapshot.min_chunks_per_rank),
        lambda: chunk_size_for(mask.bands, mask.total_q, comm.size, dispatch_config, alg, snapshot.min_chunks_per_rank),
    )
    q_placement: TokenPlacement = _placements.get(
        ("q", mask.digest, mask.total_q, comm.size, chunk_size, alg, even),
        lambda: place_by_area(mask.bands, mask.total_q, comm.size, chunk_size, alg, even=even),
    )
    k_placement = q_placement
    if not is_shared:
        # Keys have no area of their own; contiguous blocks keep transfers in few ranges.
        k_placement = _placements.get(
            ("k", mask.total_k, comm.size, even), lambda: place_contiguously(mask.total_k, comm.size, even=even)
        )
    return _key_on(request, mask, comm, snapshot, chunk_size, q_placement, k_placement)


def make_key_on_placement(request: KeyRequest, manager: DistAttnRuntimeMgr) -> DistAttnRuntimeKey:
    """The key of a request whose tokens stay where another plan put them."""
    request.check_sizes()
    key = manager.key
    return _key_on(
        request,
        request.mask(),
        key.cp_group,
        env.snapshot(),
        key.chunk_size,
        manager.transport("q").placement,
        manager.transport("k").placement,
    )


def _key_on(
    request: KeyRequest,
    mask: Mask,
    comm: Communicator,
    snapshot: EnvSnapshot,
    chunk_size: int,
    q_placement: TokenPlacement,
    k_placement: TokenPlacement,
) -> DistAttnRuntimeKey:
    rank = comm.rank
    config = request.dist_attn_config
    dsink_reduce = config.dsink_reduce if config.dsink_reduce is not None else snapshot.dsink_all_reduce_op
    key = DistAttnRuntimeKey(
        mask=mask,
        num_heads_q=int(request.num_heads_q),
        num_heads_kv=int(request.num_heads_kv),
        head_dim=int(request.head_dim),
        pad_size=sum(q_placement.shard_lens) - q_placement.total,
        chunk_size=chunk_size,
        cp_group=comm,
        cp_group_or_mesh=request.cp_group_or_mesh,
        dist_attn_config=config,
        env=snapshot,
        dsink_reduce=dsink_reduce,
        placement=(q_placement.digest, k_placement.digest),
        total_seqlen_q=mask.total_q,
        total_seqlen_k=mask.total_k,
        shard_q=q_placement.shard_lens[rank],
        shard_k=k_placement.shard_lens[rank],
        padded_q=sum(q_placement.shard_lens),
        padded_k=sum(k_placement.shard_lens),
        handle=handles.new(),
    )

    def make() -> DistAttnRuntimeMgr:
        start = time.perf_counter()
        plan = _dist_plan(mask, q_placement, k_placement, plan_options(config.overlap_config), snapshot.sanity_check)
        q_transport = Transport(q_placement, comm)
        k_transport = q_transport if k_placement is q_placement else Transport(k_placement, comm)
        runtime = _runtime(key, plan, request.allow_overlap)
        _logger.info(
            "rank %d of %d planned %d x %d tokens in %.1f ms: chunks of %d, %d remote stage(s), plan %#018x",
            rank, comm.size, mask.total_q, mask.total_k, 1e3 * (time.perf_counter() - start), chunk_size,
            plan.num_stages, plan.digest,
        )  # fmt: skip
        return DistAttnRuntimeMgr(key, plan, runtime, q_transport, k_transport)

    return dist_attn_runtime_dict_mgr.get_or_make(key, make).key


def _runtime(key: DistAttnRuntimeKey, plan: DistPlan, allow_overlap: bool) -> DistAttnRuntime:
    comm, snapshot = key.cp_group, key.env
    rank_plan = plan.rank_plan(comm.rank)
    stage_plans = build_stage_plans(rank_plan, key.num_heads_q, key.num_heads_kv, allow_overlap=allow_overlap)

    def sends(stage: int) -> list[Any] | None:
        """Every rank's transfers, which relays between nodes must know: from the plan, so that nobody has to ask."""
        if not isinstance(comm, TwoLevelCommunicator):
            return None
        return [plan.rank_plan(rank).stages[stage].send for rank in range(comm.size)]

    remote = tuple(
        RemoteStage(
            plan=stage_plan,
            exchange=make_exchange(comm, stage.recv, stage.send, num_local=rank_plan.num_k, sends=sends(i)),
            num_keys=stage.num_keys,
        )
        for i, (stage_plan, stage) in enumerate(zip(stage_plans[1:], rank_plan.stages, strict=True))
    )
    overlaps = bool(remote) and not plan.blocking
    return DistAttnRuntime(
        comm=comm,
        local=stage_plans[0],
        remote=remote,
        is_blocking=plan.blocking,
        num_q=rank_plan.num_q,
        num_k=rank_plan.num_k,
        owes_keys=any(stage.num_sent for stage in rank_plan.stages),
        backend=snapshot.core_backend,
        deterministic=snapshot.deterministic_mode,
        fwd_sm_margin=snapshot.ffa_forward_sm_margin if overlaps else 0,
        bwd_sm_margin=snapshot.ffa_backward_sm_margin if overlaps else 0,
        dsink_reduce=key.dsink_reduce,
    )


__all__ = [
    "KeyRequest",
    "chunk_size_for",
    "forget_solutions",
    "make_key",
    "make_key_on_placement",
    "place_by_area",
    "place_contiguously",
    "plan_options",
]
