"""Chunk areas and the dispatch algorithms."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from magi_core.bands import Bands
from magi_core.planner import (
    DISPATCH_ALGORITHMS,
    Owners,
    chunk_areas,
    dispatch_chunks,
    dispatch_lower_bound,
    plan_distributed,
    suggest_chunk_size,
)

ALGORITHMS = sorted(set(DISPATCH_ALGORITHMS) - {"backtracking_pruning"})
ANY_COUNTS = {"dynamic_programming", "binary_search"}


@st.composite
def slices(draw, total_q, total_k, max_slices=6):
    def ranges(total):
        a, b = sorted((draw(st.integers(0, total)), draw(st.integers(0, total))))
        return a, b

    n = draw(st.integers(0, max_slices))
    q = [ranges(total_q) for _ in range(n)]
    k = [ranges(total_k) for _ in range(n)]
    types = [draw(st.integers(0, 3)) for _ in range(n)]
    return Bands.from_slices(np.array(q, np.int32).reshape(-1, 2), np.array(k, np.int32).reshape(-1, 2), types)


def causal(total):
    return Bands.from_slices([[0, total]], [[0, total]], [1])


def documents(lengths):
    ends = np.cumsum(lengths)
    ranges = np.stack([ends - lengths, ends], axis=1)
    return Bands.from_slices(ranges, ranges, [1] * len(ranges))


def loads(chunks, areas):
    return [int(np.sum(areas[c])) for c in chunks]


@given(data=st.data())
def test_chunk_areas_count_the_cells_of_their_rows(data):
    total_q, total_k = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    bands = data.draw(slices(total_q, total_k))
    size = data.draw(st.integers(1, 45))
    rows = bands.to_counts(total_q, total_k).sum(axis=1)
    expected = [int(rows[i : i + size].sum()) for i in range(0, total_q, size)]
    assert chunk_areas(bands, size, total_q).tolist() == expected


def test_chunk_areas_of_a_million_tokens_are_exact_past_32_bits():
    total = 1 << 20
    areas = chunk_areas(causal(total), 4096, total)
    assert int(areas.sum()) == total * (total + 1) // 2
    assert int(areas[-1]) == sum(range(total - 4095, total + 1))


@pytest.mark.parametrize(
    ("chunk_size", "total", "message"),
    [
        (0, 8, "chunk_size must be at least 1, got 0"),
        (-3, 8, "chunk_size must be at least 1, got -3"),
        (4, -1, "total_q must be at least 0, got -1"),
        (4, 7, r"rows \[0, 8\) must lie inside \[0, total_q = 7\)"),
    ],
)
def test_chunk_areas_refuse(chunk_size, total, message):
    with pytest.raises(ValueError, match=message):
        chunk_areas(causal(8), chunk_size, total)


def test_chunk_areas_refuse_floats():
    with pytest.raises(TypeError, match="chunk_size must be an integer, got float"):
        chunk_areas(causal(8), 2.0, 8)


@pytest.mark.parametrize("alg", ALGORITHMS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("total", [7, 1000, 4097])
def test_every_algorithm_deals_every_chunk_once(alg, world_size, total):
    lengths = [total // 2, total // 4, total - total // 2 - total // 4]
    bands = documents(lengths)
    size = max(1, -(-total // (8 * world_size)))
    areas = chunk_areas(bands, size, total)
    again = [
        dispatch_chunks(
            areas,
            world_size,
            alg,
            bands=bands,
            chunk_size=size,
            total_q=total,
            top_p=0.5,
            num_of_select_chunk=3,
            allocation_ratio=0.5,
            seed=7,
            node_limit=100_000,
        )
        for _ in range(2)
    ]
    chunks = again[0]
    assert [c.tolist() for c in chunks] == [c.tolist() for c in again[1]]
    assert len(chunks) == world_size
    assert sorted(itertools.chain.from_iterable(c.tolist() for c in chunks)) == list(range(len(areas)))
    assert all(np.all(np.diff(c) > 0) for c in chunks)
    if alg not in ANY_COUNTS:
        counts = {len(c) for c in chunks}
        assert counts <= {len(areas) // world_size, -(-len(areas) // world_size)}
    assert max(loads(chunks, areas)) >= dispatch_lower_bound(areas, world_size)


@pytest.mark.parametrize("alg", ALGORITHMS)
def test_ranks_without_chunks_are_legal(alg):
    bands = documents([2, 1])
    areas = chunk_areas(bands, 1, 3)
    chunks = dispatch_chunks(areas, 8, alg, bands=bands, chunk_size=1, total_q=3)
    assert sorted(itertools.chain.from_iterable(c.tolist() for c in chunks)) == [0, 1, 2]
    assert [c.tolist() for c in dispatch_chunks([], 3, alg, bands=np.zeros((0, 6)), chunk_size=1, total_q=0)] == [
        []
    ] * 3


def brute_force(areas, world_size, equal_counts):
    """The least largest load over every assignment."""
    best = None
    floor, ceil = len(areas) // world_size, -(-len(areas) // world_size)
    for ranks in itertools.product(range(world_size), repeat=len(areas)):
        counts = np.bincount(ranks, minlength=world_size)
        if equal_counts and not (counts.min() >= floor and counts.max() <= ceil):
            continue
        load = int(np.bincount(ranks, weights=areas, minlength=world_size).max())
        best = load if best is None else min(best, load)
    return best


@settings(max_examples=25)
@given(areas=st.lists(st.integers(0, 30), min_size=1, max_size=7), world_size=st.integers(1, 3))
def test_exact_algorithms_find_the_least_largest_load(areas, world_size):
    weights = np.array(areas)
    for alg in ("dynamic_programming", "binary_search", "backtracing_pruning"):
        chunks = dispatch_chunks(weights, world_size, alg)
        expected = brute_force(areas, world_size, equal_counts=alg not in ANY_COUNTS)
        assert max(loads(chunks, weights)) == expected, alg


@given(areas=st.lists(st.integers(0, 1000), min_size=1, max_size=40), world_size=st.integers(1, 6))
def test_improvers_are_never_worse_than_min_heap(areas, world_size):
    weights = np.array(areas)
    plain = max(loads(dispatch_chunks(weights, world_size, "min_heap"), weights))
    for alg in ("lower_bound", "binary_search", "backtracing_pruning"):
        assert max(loads(dispatch_chunks(weights, world_size, alg, node_limit=20_000), weights)) <= plain, alg
    assert plain >= dispatch_lower_bound(weights, world_size)


def test_min_heap_spreads_chunks_without_area():
    chunks = dispatch_chunks([5, 0, 0, 0, 0], 4, "min_heap")
    assert sorted(len(c) for c in chunks) == [1, 1, 1, 2]


def test_sequential_gives_blocks():
    assert [c.tolist() for c in dispatch_chunks([1] * 7, 3, "sequential_select")] == [[0, 1, 2], [3, 4], [5, 6]]


def test_random_depends_on_the_seed_only():
    one, two, other = (dispatch_chunks([1] * 64, 4, "random_select", seed=s) for s in (1, 1, 2))
    assert [c.tolist() for c in one] == [c.tolist() for c in two]
    assert [c.tolist() for c in one] != [c.tolist() for c in other]


def test_topp_heap_keeps_a_document_together():
    """Documents of 7 to 12 chunks: with every rank a candidate, affinity decides."""
    lengths = [96, 64, 80, 72, 64, 56, 80]
    bands = documents(lengths)
    document = np.repeat(np.arange(7), np.array(lengths) // 8)
    areas = chunk_areas(bands, 8, 512)
    together = dispatch_chunks(areas, 4, "topp_heap", bands=bands, chunk_size=8, total_q=512, top_p=1.0)
    apart = dispatch_chunks(areas, 4, "topp_heap", bands=bands, chunk_size=8, total_q=512, top_p=0.0)

    def documents_per_rank(chunks):
        return sum(len(np.unique(document[c])) for c in chunks)

    assert documents_per_rank(together) < documents_per_rank(apart)


def test_sorted_sequential_pours_slices_in_runs():
    bands = documents([128, 64, 64])
    areas = chunk_areas(bands, 8, 256)
    chunks = dispatch_chunks(areas, 2, "sorted_sequential_select", bands=bands, chunk_size=8, total_q=256)
    assert chunks[0].tolist() == list(range(16))  # the longest document, whole, on the first rank
    assert chunks[1].tolist() == list(range(16, 32))


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"alg": "magic"}, ValueError, "alg must be one of balanced, min_heap, .* got 'magic'"),
        ({"world_size": 0}, ValueError, "world_size must be at least 1, got 0"),
        ({"areas": [1, -2]}, ValueError, "areas must not be negative, got -2"),
        ({"areas": [2**62, 2**62]}, ValueError, "areas: their sum must fit 62 bits"),
        ({"areas": [0.5]}, TypeError, "areas must hold integers"),
        ({"areas": [[1]]}, ValueError, r"areas must have shape \(n,\), got \(1, 1\)"),
        (
            {"alg": "topp_heap"},
            ValueError,
            "alg 'topp_heap' looks at keys: bands, chunk_size and total_q must be given",
        ),
        ({"bands": np.zeros((0, 6))}, ValueError, "bands need chunk_size and total_q as well"),
        ({"top_p": 1.5}, ValueError, r"top_p must be in \[0, 1\], got 1.5"),
        ({"top_p": "all"}, TypeError, "top_p must be a number, got str 'all'"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        (
            {"bands": causal(8), "chunk_size": 2, "total_q": 8, "areas": [1]},
            ValueError,
            r"areas must have one entry per chunk \(4\), got 1",
        ),
    ],
)
def test_dispatch_refuses(kwargs, error, message):
    arguments = {"areas": [1, 2, 3], "world_size": 2} | kwargs
    with pytest.raises(error, match=message):
        dispatch_chunks(**arguments)


def test_owners_of_chunks_must_cover_every_chunk():
    for chunks, message in (
        ([[0], [1]], "chunk 2 is given to no rank"),
        ([[0, 1], [1, 2]], r"chunks\[1\] holds chunk 1, which is given twice"),
        ([[0, 1, 2, 3]], r"chunks\[0\] must hold ids in \[0, 3\), got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            Owners.from_chunks(chunks, 4, 10)


def received(bands, total, owners):
    plan = plan_distributed(bands, total, total, owners, owners)
    return plan.num_received(), plan.balance


def log_normal_documents(num_documents, total, seed):
    draws = np.random.default_rng(seed).lognormal(0.0, 1.0, num_documents)
    lengths = np.maximum(1, np.floor(draws / draws.sum() * (total - num_documents)).astype(np.int64))
    lengths[0] += total - lengths.sum()
    return documents(lengths)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("world_size", "num_documents"), [(8, 50), (32, 200)])
def test_balanced_halves_the_traffic_of_min_heap(world_size, num_documents, seed):
    """Packed documents, 8k tokens a rank, chunks of 512: as balanced as min-heap, at less than 60 % of its traffic."""
    total = 8192 * world_size
    bands = log_normal_documents(num_documents, total, seed)
    areas = chunk_areas(bands, 512, total)
    by_alg = {}
    for alg in ("balanced", "min_heap"):
        chunks = dispatch_chunks(areas, world_size, alg, bands=bands, chunk_size=512, total_q=total)
        by_alg[alg] = received(bands, total, Owners.from_chunks(chunks, 512, total))
    tokens, balance = by_alg["balanced"]
    allowed = max(1.011 * int(areas.sum()) / world_size, dispatch_lower_bound(areas, world_size))
    assert balance.max() <= allowed
    assert tokens.sum() < 0.6 * by_alg["min_heap"][0].sum()


def test_balanced_keeps_a_window_contiguous():
    """Window of 1024 over 256k tokens, 8 ranks: each receives the window behind its block, not scattered pieces."""
    total, window = 1 << 18, 1024
    bands = Bands.from_slices([[0, window], [window, total]], [[0, window], [1, total]], [1, 3])
    areas = chunk_areas(bands, 512, total)
    chunks = dispatch_chunks(areas, 8, bands=bands, chunk_size=512, total_q=total)
    tokens, balance = received(bands, total, Owners.from_chunks(chunks, 512, total))
    assert tokens.max() <= 1100
    assert balance.max() * 8 <= 1.02 * balance.sum()


@given(areas=st.lists(st.integers(0, 1000), min_size=1, max_size=60), world_size=st.integers(1, 6))
def test_balanced_without_a_mask_has_fewer_runs_than_min_heap_or_better_balance(areas, world_size):
    weights = np.array(areas)
    ours = dispatch_chunks(weights, world_size)
    heap = dispatch_chunks(weights, world_size, "min_heap")

    def runs(chunks):
        return sum(int(np.sum(np.diff(c) > 1)) + 1 for c in chunks if len(c))

    allowed = max(1.01 * sum(areas) / world_size, dispatch_lower_bound(weights, world_size))
    assert runs(ours) <= runs(heap) or max(loads(ours, weights)) <= max(*loads(heap, weights), allowed)


def test_balanced_handles_equal_and_empty_chunks():
    assert [c.tolist() for c in dispatch_chunks([7] * 8, 4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [c.tolist() for c in dispatch_chunks([0] * 4, 2)] == [[0, 1], [2, 3]]


def test_chunk_size_follows_the_largest_chunk():
    assert suggest_chunk_size(causal(65536), 65536, 8) == 1024  # eight a rank: its last chunk is a quarter of the mean
    assert suggest_chunk_size(causal(65536), 65536, 8, limit=300) == 300
    lengths = [16384] + [256] * 192
    size = suggest_chunk_size(documents(lengths), 65536, 8)
    assert size < 1024
    areas = chunk_areas(documents(lengths), size, 65536)
    assert 5 * 8 * areas.max() <= 4 * areas.sum() or size in (64, 128)
    assert [suggest_chunk_size(Bands(), total, world) for total, world in ((0, 3), (7, 8), (1000, 4))] == [1, 1, 32]
    assert suggest_chunk_size(documents([3, 4]), 7, 2) == 1
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        suggest_chunk_size(Bands(), 8, 2, limit=0)


def test_absurd_sizes_are_refused_not_tried():
    total = 2**31 - 1
    with pytest.raises(ValueError, match="chunk_size must give at most 16777216 chunks, got 1 for 2147483647 rows"):
        chunk_areas(causal(total), 1, total)
    for world_size in (65537, 2**31 - 1):
        with pytest.raises(ValueError, match=f"world_size must be at least 1 and at most 65536, got {world_size}"):
            dispatch_chunks([1, 2], world_size)
        with pytest.raises(ValueError, match=f"world_size must be at least 1 and at most 65536, got {world_size}"):
            suggest_chunk_size(causal(8), 8, world_size)


def test_many_chunks_are_dealt_without_a_search():
    """Four million chunks: a layout only, in well under the time any search would take."""
    areas = np.arange(1 << 22)
    chunks = dispatch_chunks(areas, 2)
    assert [len(c) for c in chunks] == [1 << 21, 1 << 21]
    assert max(loads(chunks, areas)) * 2 <= 1.001 * areas.sum()


@pytest.mark.parametrize("seed", range(3))
def test_suggested_chunks_are_balanced_and_no_smaller_than_that_takes(seed):
    """Log-normal packs on 64 ranks: chunks of 512, not 128, whose owners would send five times the mean."""
    total, world_size = 8192 * 64, 64
    bands = log_normal_documents(403, total, seed)
    size = suggest_chunk_size(bands, total, world_size)
    assert size >= 256
    areas = chunk_areas(bands, size, total)
    chunks = dispatch_chunks(areas, world_size, bands=bands, chunk_size=size, total_q=total)
    owners = Owners.from_chunks(chunks, size, total)
    plan = plan_distributed(bands, total, total, owners, owners)
    assert plan.balance.max() * world_size <= 1.02 * plan.balance.sum()
    assert plan.num_sent().max() <= 4 * plan.num_sent().mean()
