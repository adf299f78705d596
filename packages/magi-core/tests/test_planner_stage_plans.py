"""Stage plans: one grid of query tiles per rank, each tile first once and last once, every cell in one stage."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from magi_core.bands import Bands
from magi_core.planner import Owners, PlanOptions, build_stage_plans, plan_distributed
from magi_core.planner.stage_plans import q_tile_starts, stage_tile_flags

FIRST, LAST = 1, 2


@st.composite
def cases(draw):
    total_q, total_k = draw(st.sampled_from([1, 7, 300, 700])), draw(st.sampled_from([1, 7, 300, 700]))
    world = draw(st.integers(1, 4))

    def owners(total):
        cuts = [0, *sorted(draw(st.lists(st.integers(0, total), max_size=5))), total]
        ranges = [[] for _ in range(world)]
        for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
            ranges[draw(st.integers(0, world - 1))].append((begin, end))
        return Owners(ranges, total)

    # Disjoint in q, so that no pair is covered twice.
    edges = [0, *sorted(draw(st.lists(st.integers(0, total_q), max_size=4))), total_q]
    q = np.stack([edges[:-1], edges[1:]], axis=1)
    k = [sorted((draw(st.integers(0, total_k)), draw(st.integers(0, total_k)))) for _ in q]
    bands = Bands.from_slices(q, np.array(k), [draw(st.integers(0, 3)) for _ in q])
    chosen = PlanOptions(degree=draw(st.integers(0, 4)), min_chunk_size=draw(st.sampled_from([1, 50])))
    block_m = draw(st.sampled_from([64, 128]))
    return plan_distributed(bands, total_q, total_k, owners(total_q), owners(total_k), chosen), block_m


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_tiles_begin_once_and_end_once(case):
    plan, block_m = case
    for rank in range(plan.world_size):
        mine = plan.rank_plan(rank)
        stages = build_stage_plans(mine, 4, 2, block_m=block_m)
        assert len(stages) == 1 + plan.num_stages
        parts = [(mine.local_bands, mine.num_k), *((s.bands, s.num_keys) for s in mine.stages)]
        starts = q_tile_starts(mine, block_m)
        seen = []  # (tile begin, stage, flags) of every tile in every queue
        for s, (flex, (bands, num_k)) in enumerate(zip(stages, parts, strict=True)):
            flex.check()
            assert flex.header["stage"] == s
            assert flex.header["num_stages"] == len(stages)
            assert (flex.header["total_q"], flex.header["total_k"]) == (mine.num_q, num_k)
            visible = bands.to_dense(mine.num_q, num_k).any(axis=1)
            tiles = {}
            for tile in flex.fwd_tiles:
                begin, end, flags = int(tile[0]), int(tile[1]), int(tile[4]) & 3
                assert begin in starts
                assert end == min(begin + block_m, mine.num_q)
                tiles[begin] = flags
            seen += [(begin, s, flags) for begin, flags in tiles.items()]
            for begin in starts[:-1].tolist():
                if visible[begin : begin + block_m].any():
                    assert begin in tiles, "a touched tile must be in the queue"
                elif begin in tiles:
                    assert s == 0, "an untouched tile may be in stage 0 only"
                    assert tiles[begin] == FIRST | LAST
        for begin in starts[:-1].tolist():
            mine_only = sorted((s, flags) for b, s, flags in seen if b == begin)
            assert mine_only, "every query tile is written by some stage"
            assert [bool(flags & FIRST) for _, flags in mine_only] == [True] + [False] * (len(mine_only) - 1)
            assert [bool(flags & LAST) for _, flags in mine_only] == [False] * (len(mine_only) - 1) + [True]


def test_flags_by_hand():
    """Two ranks, causal: rank 1's tiles take local keys first and end with the remote ones."""
    owners = Owners.contiguous(512, 2)
    bands = Bands.from_slices([[0, 512]], [[0, 512]], [1])
    plan = plan_distributed(bands, 512, 512, owners, owners)
    first, second = plan.rank_plan(0), plan.rank_plan(1)
    assert stage_tile_flags(first, q_tile_starts(first)).tolist() == [[3, 3], [0, 0]]
    assert stage_tile_flags(second, q_tile_starts(second)).tolist() == [[1, 1], [2, 2]]


def test_a_rank_without_queries_has_empty_plans():
    owners = Owners([[(0, 8)], []], 8)
    bands = Bands.from_slices([[0, 8]], [[0, 8]], [0])
    for stage in build_stage_plans(plan_distributed(bands, 8, 8, owners, owners).rank_plan(1)):
        assert len(stage.fwd_tiles) == 0


def test_rows_that_see_nothing_are_written_in_stage_zero():
    owners = Owners.contiguous(512, 2)
    bands = Bands.from_slices([[0, 128]], [[0, 512]], [0])
    stages = build_stage_plans(plan_distributed(bands, 512, 512, owners, owners).rank_plan(1))
    assert stages[0].fwd_tiles[:, 0].tolist() == [0, 128]
    assert (stages[0].fwd_tiles[:, 4] & 3).tolist() == [3, 3]
    assert all(len(s.fwd_tiles) == 0 for s in stages[1:])


def test_double_cover_needs_consent():
    owners = Owners.contiguous(8, 2)
    bands = Bands.from_slices([[0, 8], [0, 8]], [[0, 8], [0, 4]], [0, 0])
    mine = plan_distributed(bands, 8, 8, owners, owners).rank_plan(0)
    with pytest.raises(ValueError, match="allow_overlap"):
        build_stage_plans(mine)
    assert len(build_stage_plans(mine, allow_overlap=True)) == 2


def test_block_m_is_checked():
    owners = Owners.contiguous(8, 2)
    mine = plan_distributed(Bands(), 8, 8, owners, owners).rank_plan(0)
    with pytest.raises(ValueError, match="block_m must be at least 1, got 0"):
        build_stage_plans(mine, block_m=0)
