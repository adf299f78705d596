"""A brute-force check of any plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import _host
from ._arrays import Int32Array
from .dist_plan import DistPlan, RankPlan


class PlanError(ValueError):
    """A plan that computes, sends or receives something wrong; the message names the first such thing."""


def pack_rank_plan(plan: RankPlan) -> Int32Array:
    """The flat form of csrc/binding/host_planner.cc, ``packed()``."""
    counts = [[len(s.recv), len(s.send), len(s.bands)] for s in plan.stages]
    parts = [np.array([len(plan.stages), len(plan.local_bands)]), np.array(counts).reshape(-1)]
    parts.append(plan.local_bands.data.reshape(-1))
    for stage in plan.stages:
        parts += [stage.recv.reshape(-1), stage.send.reshape(-1), stage.bands.data.reshape(-1)]
    return np.concatenate(parts).astype(np.int32)


def verify(dist_plan: DistPlan, rank_plans: Sequence[RankPlan] | None = None) -> None:
    """Checks a plan row by row and token by token, by code that shares nothing with the planner.

    Checked: every visible pair is computed once (as often as the mask shows it) on the rank that owns its query, and no
    other pair is; bands lie in the index space of their stage; each receive is from the key's owner, of a key that the
    rank does not own, once, and used by some band; each send is matched by its receive, in order, in the same stage;
    all ranks have the same number of stages; areas add up.

    Args:
        dist_plan: the plan.
        rank_plans: one per rank, in the place of the plan's own (to check plans that were stored or changed).

    Raises:
        PlanError: names rank, stage and the first pair, key or number that is wrong.

    Cost: O(rows x bands per row + keys x ranks); seconds for 100k tokens. No part of planning calls it.
    """
    plans = [dist_plan.rank_plan(r) for r in range(dist_plan.world_size)] if rank_plans is None else list(rank_plans)
    if len(plans) != dist_plan.world_size:
        raise PlanError(f"rank_plans must have one plan per rank ({dist_plan.world_size}), got {len(plans)}")
    packed = [pack_rank_plan(plan) for plan in plans]
    offsets = np.cumsum([0, *(len(p) for p in packed)]).astype(np.int64)
    try:
        _host.lib().planner_verify(dist_plan.buffer.copy(), np.concatenate(packed), offsets)
    except ValueError as error:
        raise PlanError(str(error)) from None
