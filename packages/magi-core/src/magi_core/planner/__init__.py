"""The distributed planner: which rank computes what, and which keys travel when.

Replicated and without a collective: every rank calls it with equal arguments and gets equal plans. Decisions are made
by integer arithmetic in the host library (csrc/host); this package checks arguments and names results. A typical road::

    chunk_size = suggest_chunk_size(bands, total_q, world_size)
    areas = chunk_areas(bands, chunk_size, total_q)
    chunks = dispatch_chunks(areas, world_size, bands=bands, chunk_size=chunk_size, total_q=total_q)
    owners = Owners.from_chunks(chunks, chunk_size, total_q)
    plan = plan_distributed(bands, total_q, total_k, owners, owners, PlanOptions(degree=2))
    stages = build_stage_plans(plan.rank_plan(rank), num_heads_q=8, num_heads_kv=2)

Neither torch nor a device is needed.
"""

from __future__ import annotations

from .dispatch import DISPATCH_ALGORITHMS, chunk_areas, dispatch_chunks, dispatch_lower_bound, suggest_chunk_size
from .dist_plan import DistPlan, RankPlan, StagePlan, plan_distributed
from .explain import PlanReport, explain_plan
from .options import PlanOptions
from .owners import Owners
from .stage_plans import build_stage_plans
from .verify import PlanError, verify

__all__ = [
    "DISPATCH_ALGORITHMS",
    "DistPlan",
    "Owners",
    "PlanError",
    "PlanOptions",
    "PlanReport",
    "RankPlan",
    "StagePlan",
    "build_stage_plans",
    "chunk_areas",
    "dispatch_chunks",
    "dispatch_lower_bound",
    "explain_plan",
    "plan_distributed",
    "suggest_chunk_size",
    "verify",
]
