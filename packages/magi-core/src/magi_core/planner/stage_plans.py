"""The kernels' plans of one rank: one FlexPlan per stage over one shared grid of query tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import checked_int
from ._arrays import Int32Array
from .dist_plan import RankPlan

if TYPE_CHECKING:
    from ..bands import Bands
    from ..plan import FlexPlan

_FIRST, _LAST = 1, 2  # TileFlags of csrc/include/magi/plan_format.h


def q_tile_starts(rank_plan: RankPlan, block_m: int = 128) -> Int32Array:
    """Borders of the query tiles that all stages of a rank share: ascending int32, ``num_tiles + 1`` entries.

    Tiles are ``block_m`` rows; the last may be short. One grid per (mask, rank) lets a tile carry its running softmax
    from stage to stage.
    """
    rows = checked_int(block_m, "block_m", minimum=1)
    return np.append(np.arange(0, rank_plan.num_q, rows, dtype=np.int32), np.int32(rank_plan.num_q))


def touched_tiles(bands: Bands, starts: Int32Array) -> npt.NDArray[np.bool_]:
    """``(num_tiles,)`` bool: tiles in which some band shows a cell. Bands are shrunk, so their edge rows do."""
    steps = np.zeros(len(starts), np.int64)
    rows = bands.data
    if len(rows) and len(starts) > 1:
        np.add.at(steps, np.searchsorted(starts, rows[:, 0], side="right") - 1, 1)
        np.add.at(steps, np.searchsorted(starts, rows[:, 1] - 1, side="right"), -1)
    return np.asarray(np.cumsum(steps)[: len(starts) - 1] > 0)


def stage_tile_flags(rank_plan: RankPlan, starts: Int32Array) -> Int32Array:
    """``(1 + num_stages, num_tiles)`` int32: FIRST where no earlier stage touches the tile, LAST where no later one.

    Stage 0 is the local one. 0 where a stage does not touch the tile; a tile that no stage touches is FIRST | LAST in
    stage 0, so that its rows are written (out 0, lse -inf, or the sink).
    """
    parts = [rank_plan.local_bands, *(stage.bands for stage in rank_plan.stages)]
    touched = np.stack([touched_tiles(bands, starts) for bands in parts])
    touched[0] |= ~touched.any(axis=0)
    before = np.cumsum(touched, axis=0)
    first, last = touched & (before == 1), touched & (before == before[-1])
    return np.asarray(_FIRST * first + _LAST * last, np.int32)


def build_stage_plans(
    rank_plan: RankPlan,
    num_heads_q: int = 0,
    num_heads_kv: int = 0,
    *,
    block_m: int = 128,
    block_n: int = 128,
    bwd_block_m: int = 64,
    bwd_block_n: int = 128,
    allow_overlap: bool = False,
    num_sms: int = 132,
) -> list[FlexPlan]:
    """One FlexPlan per stage: local first, then the remote ones in order.

    Each plan addresses the rank's local queries and its own stage's keys (``0 .. num_keys``). The stages share one grid
    of query tiles; a tile is in the queue of the stages that touch it, flagged FIRST in the earliest and LAST in the
    latest, and a tile that none touches is in stage 0 with both.

    Args:
        rank_plan: of ``DistPlan.rank_plan``.
        num_heads_q, num_heads_kv: 0 when the plans serve any head count.
        block_m, block_n, bwd_block_m, bwd_block_n, num_sms: as for ``FlexPlan.build``.
        allow_overlap: accept a mask that shows a pair twice.
    """
    from ..plan import FlexPlan

    starts = q_tile_starts(rank_plan, block_m)
    flags = stage_tile_flags(rank_plan, starts)
    parts: list[tuple[Bands, int]] = [(rank_plan.local_bands, rank_plan.num_k)]
    parts += [(stage.bands, stage.num_keys) for stage in rank_plan.stages]
    shared: dict[str, Any] = {
        "num_heads_q": num_heads_q,
        "num_heads_kv": num_heads_kv,
        "block_m": block_m,
        "block_n": block_n,
        "bwd_block_m": bwd_block_m,
        "bwd_block_n": bwd_block_n,
        "num_stages": len(parts),
        "allow_overlap": allow_overlap,
        "num_sms": num_sms,
    }
    return [
        FlexPlan.build(
            bands, rank_plan.num_q, num_k, q_tile_starts=starts, stage=stage, tile_flags=flags[stage], **shared
        )
        for stage, (bands, num_k) in enumerate(parts)
    ]
