"""Every schedule covers every visible pair as often as the mask does, and reads no other key."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from magi_core.backends import schedule
from magi_core.backends.schedule import Schedule
from magi_core.bands import Bands
from magi_core.testing import dense_counts, masks


def counts_of(tiles, total_stationary, total_moving):
    counts = np.zeros((total_stationary, total_moving), np.int64)
    for tile in tiles:
        for job in tile.jobs:
            assert tile.begin <= job.s0 < job.s1 <= tile.end
            moving = np.arange(job.m0, job.m1) if job.index is None else job.index
            assert (np.diff(moving) > 0).all() and len(moving) == job.num_moving
            if job.entries is not None:
                for row, begin, end in job.entries.tolist():
                    counts[job.s0 + row, moving[begin:end]] += 1
                continue
            distance = moving[None, :] - np.arange(job.s0, job.s1)[:, None]
            visible = (distance >= job.lo) & (distance <= job.hi)
            assert job.is_full == visible.all()
            assert visible.any(0).all() and visible.any(1).all()  # nothing is read that no slice covers
            counts[job.s0 : job.s1, moving] += visible
    return counts


def check(slices, total_q, total_k, num_heads=8, segments=None):
    segments = np.array([[0, total_q, 3]]) if segments is None else segments
    q, k, types = [s[:2] for s in slices], [s[2:4] for s in slices], [s[4] for s in slices]
    bands = Bands.from_slices(q, k, types).canonical()
    built = Schedule.build(bands.data, total_q, total_k, segments, num_heads, True)
    expected = dense_counts(slices, total_q, total_k).numpy()
    assert (counts_of(built.forward, total_q, total_k) == expected).all()
    assert (counts_of(built.backward, total_k, total_q) == expected.T).all()
    assert [t.begin for t in built.forward[1:]] == [t.end for t in built.forward[:-1]]
    return built


@pytest.mark.parametrize("kind", masks.KINDS + masks.ODD)
@pytest.mark.parametrize("num_heads", [1, 8])
def test_suite(kind, num_heads):
    check(masks.make(kind, 1000, window=130, block=90), 1000, 1000, num_heads)


@settings(max_examples=60, deadline=None)
@given(
    total_q=st.integers(0, 90),
    total_k=st.integers(0, 90),
    draws=st.lists(st.tuples(*[st.integers(0, 90)] * 4, st.integers(0, 3)), max_size=12),
    sizes=st.sampled_from([(16, 20, 100), (32, 40, 1000), (8, 64, 20)]),
)
def test_any_slices_in_small_blocks(total_q, total_k, draws, sizes):
    size, step, overhead = sizes
    before = schedule._TILE_SIZES, schedule._STEPS, schedule._JOB_OVERHEAD
    schedule._TILE_SIZES, schedule._STEPS, schedule._JOB_OVERHEAD = (size,), (step, step), overhead
    try:
        slices = [
            (*sorted((min(a, total_q), min(b, total_q))), *sorted((min(c, total_k), min(d, total_k))), t)
            for a, b, c, d, t in draws
        ]
        check(slices, total_q, total_k, 1)
    finally:
        schedule._TILE_SIZES, schedule._STEPS, schedule._JOB_OVERHEAD = before


def test_documents_of_two_tokens_share_jobs():
    built = check(masks.make("pairs", 1024), 1024, 1024)
    assert sum(len(tile.jobs) for tile in built.forward) <= 2 * len(built.forward) <= 64


def test_a_window_reads_little_more_than_itself():
    slices = masks.make("swa_causal", 4096, window=432)
    bands = Bands.from_slices([s[:2] for s in slices], [s[2:4] for s in slices], [s[4] for s in slices]).canonical()
    built = Schedule.build(bands.data, 4096, 4096, np.array([[0, 4096, 3]]), 8, False)
    computed = sum((job.s1 - job.s0) * job.num_moving for tile in built.forward for job in tile.jobs)
    assert computed <= 1.4 * masks.area(slices)


def test_segments_keep_their_flags_and_empty_rows_are_few_tiles():
    segments = np.array([[0, 100, 1], [100, 300, 3], [400, 10_400, 2]])
    built = Schedule.build(np.array([[0, 50, 0, 50, -49, 49]], np.int32), 10_400, 50, segments, 1, False)
    for begin, end, flags in segments.tolist():
        inside = [t for t in built.forward if begin <= t.begin < end]
        assert inside[0].begin == begin and inside[-1].end == end and {t.flags for t in inside} == {flags}
    assert not [t for t in built.forward if 300 <= t.begin < 400] and len(built.forward) < 12
