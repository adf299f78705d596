"""Distributed plans: exact for every mask, world size, overlap degree and placement, with no key sent in vain."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from magi_core.bands import Bands
from magi_core.planner import (
    DistPlan,
    Owners,
    PlanOptions,
    chunk_areas,
    dispatch_chunks,
    explain_plan,
    plan_distributed,
    verify,
)

DEGREES = [0, 1, 2, 3, 4, None]


@st.composite
def placements(draw, total, world):
    """Owners with runs of any length, ranks without tokens included."""
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=12)))
    edges = [0, *cuts, total]
    ranks = draw(st.lists(st.integers(0, world - 1), min_size=len(edges) - 1, max_size=len(edges) - 1))
    ranges = [[] for _ in range(world)]
    for begin, end, rank in zip(edges[:-1], edges[1:], ranks):
        ranges[rank].append((begin, end))
    return Owners(ranges, total)


@st.composite
def masks(draw, total_q, total_k):
    n = draw(st.integers(0, 8))
    rows = [
        (
            *sorted(draw(st.tuples(*[st.integers(0, total_q)] * 2))),
            *sorted(draw(st.tuples(*[st.integers(0, total_k)] * 2))),
        )
        for _ in range(n)
    ]
    array = np.array(rows, np.int32).reshape(-1, 4)
    return Bands.from_slices(array[:, :2], array[:, 2:], [draw(st.integers(0, 3)) for _ in range(n)])


@st.composite
def options(draw):
    return PlanOptions(
        degree=draw(st.sampled_from(DEGREES)),
        max_degree=draw(st.integers(1, 6)),
        min_chunk_size=draw(st.sampled_from([1, 3, 64, 512])),
        max_num_chunks=draw(st.sampled_from([1, 5, 64])),
        alg=draw(st.sampled_from(["uniform", "greedy"])),
        shuffle_seed=draw(st.sampled_from([None, 42])),
        pair_cost_fs=draw(st.sampled_from([0, 50_000, 10**12])),
    )


@st.composite
def cases(draw, totals):
    world = draw(st.integers(1, 8))
    total_q, total_k = draw(st.sampled_from(totals)), draw(st.sampled_from(totals))
    mask = draw(masks(total_q, total_k))
    q_owners, k_owners = draw(placements(total_q, world)), draw(placements(total_k, world))
    if total_q == total_k and draw(st.booleans()):
        k_owners = q_owners
    return mask, total_q, total_k, q_owners, k_owners, draw(options())


def remote_keys(mask, q_owners, k_owners, rank):
    """Keys that some row of the rank sees and the rank does not own, cell by cell."""
    seen = mask.to_dense(q_owners.total, k_owners.total)[q_owners.local_tokens(rank)].any(axis=0)
    seen[k_owners.local_tokens(rank)] = False
    return np.flatnonzero(seen)


@settings(max_examples=60, deadline=None)
@given(case=cases([1, 7, 30]))
def test_cell_by_cell(case):
    """Every cell once on the owner of its row, every remote key once, each send in its receiver's order."""
    mask, total_q, total_k, q_owners, k_owners, chosen = case
    plan = plan_distributed(*case)
    got = np.zeros((total_q, total_k), np.int64)
    plans = [plan.rank_plan(r) for r in range(plan.world_size)]
    for rank, mine in enumerate(plans):
        q, k = q_owners.local_tokens(rank), k_owners.local_tokens(rank)
        got[np.ix_(q, k)] += mine.local_bands.to_counts(len(q), len(k))
        received = []
        for s, stage in enumerate(mine.stages):
            keys = np.concatenate([np.zeros(0, np.int64), *(np.arange(a, b) for _, a, b in stage.recv)])
            assert len(keys) == stage.num_keys
            received.append(keys)
            counts = stage.bands.to_counts(len(q), len(keys))
            np.add.at(got, np.ix_(q, keys), counts)
            for src in range(plan.world_size):
                wanted = [t for p, a, b in stage.recv.tolist() if p == src for t in range(a, b)]
                sends = plans[src].stages[s].send.tolist()
                sent = [token for dst, a, b in sends if dst == rank for token in range(a, b)]
                assert k_owners.to_global(src, sent).tolist() == wanted
        together = np.sort(np.concatenate([np.zeros(0, np.int64), *received]))
        assert together.tolist() == remote_keys(mask, q_owners, k_owners, rank).tolist()
        assert plan.num_received()[rank] == len(together)
    np.testing.assert_array_equal(got, mask.to_counts(total_q, total_k))
    per_row = got.sum(axis=1)
    assert plan.balance.tolist() == [int(per_row[q_owners.local_tokens(r)].sum()) for r in range(plan.world_size)]
    if chosen.degree is not None:
        assert plan.num_stages <= max(1, chosen.degree)


@settings(max_examples=60, deadline=None)
@given(case=cases([7, 1000, 4097]))
def test_random_bands_verify(case):
    plan = plan_distributed(*case)
    verify(plan)
    assert all(len(plan.rank_plan(r).stages) == plan.num_stages for r in range(plan.world_size))


def suite(total):
    """Named masks as slices (q0, q1, k0, k1, type)."""
    third, half = total // 3, total // 2
    docs = [(0, third), (third, half), (half, total)]
    window = min(64, total)
    return {
        "full": [(0, total, 0, total, 0)],
        "causal": [(0, total, 0, total, 1)],
        "varlen_causal": [(a, b, a, b, 1) for a, b in docs],
        "window": [(0, window, 0, window, 1), (window, total, 1, total, 3)],
        "block_causal": [(q, min(q + 256, total), 0, min(q + 256, total), 0) for q in range(0, total, 256)],
        "prefix": [(0, third, 0, third, 1), (third, total, 0, third, 0), (third, total, third, total, 1)],
        "nothing": [],
        "half": [(0, half, 0, half, 1)],
    }


def bands_of(slices):
    rows = np.array(slices, np.int32).reshape(-1, 5)
    return Bands.from_slices(rows[:, :2], rows[:, 2:4], rows[:, 4])


def self_owners(bands, total, world, alg="balanced", size=None):
    size = size or max(1, -(-total // (8 * world)))
    areas = chunk_areas(bands, size, total)
    chunks = dispatch_chunks(areas, world, alg, bands=bands, chunk_size=size, total_q=total)
    return Owners.from_chunks(chunks, size, total)


@pytest.mark.parametrize("total", [7, 1000, 4097])
@pytest.mark.parametrize("world", range(1, 9), ids="world{}".format)
@pytest.mark.parametrize("kind", sorted(suite(7)))
def test_suite(kind, world, total):
    bands = bands_of(suite(total)[kind])
    owners = self_owners(bands, total, world)
    expected = sum(len(remote_keys(bands, owners, owners, r)) for r in range(world))
    for degree in DEGREES:
        plan = plan_distributed(bands, total, total, owners, owners, PlanOptions(degree=degree, min_chunk_size=16))
        verify(plan)
        assert int(plan.num_received().sum()) == expected
        assert plan.blocking == (degree == 0)
        if degree is not None:
            assert plan.num_stages <= max(degree, 1)
        assert explain_plan(plan).areas.sum() == bands.area()


def test_world_of_one_has_no_stage():
    plan = plan_distributed(bands_of(suite(1000)["causal"]), 1000, 1000, *[Owners.contiguous(1000, 1)] * 2)
    assert plan.num_stages == 0
    assert plan.rank_plan(0).local_bands.area() == 1000 * 1001 // 2


def test_bands_fuse_where_local_keys_close_up():
    """Rank 0 sees all of keys 0..12 in a buffer without holes: one band, not one per range."""
    owners = Owners([[(0, 2), (4, 6), (8, 10)], [(2, 4), (6, 8), (10, 12)]], 12)
    plan = plan_distributed(bands_of([(0, 12, 0, 12, 0)]), 12, 12, owners, owners)
    mine = plan.rank_plan(0)
    assert mine.local_bands.data.tolist() == [[0, 6, 0, 6, -5, 5]]
    assert mine.stages[0].bands.data.tolist() == [[0, 6, 0, 6, -5, 5]]
    assert mine.stages[0].recv.tolist() == [[1, 2, 4], [1, 6, 8], [1, 10, 12]]
    assert mine.stages[0].send.tolist() == [[1, 0, 6]]


@pytest.mark.parametrize("alg", ["uniform", "greedy"])
def test_stages_respect_sizes(alg):
    bands = bands_of(suite(4097)["full"])
    owners = Owners.contiguous(4097, 4)
    for minimum, most, degree in ((512, 64, 4), (100, 64, 4), (1, 3, 4), (4000, 64, 4), (1, 64, 2)):
        chosen = PlanOptions(degree=degree, min_chunk_size=minimum, max_num_chunks=most, alg=alg)
        plan = plan_distributed(bands, 4097, 4097, owners, owners, chosen)
        verify(plan)
        for rank in range(4):
            sizes = [s.num_keys for s in plan.rank_plan(rank).stages]
            used = [n for n in sizes if n]
            pieces = min(most, -(-sum(sizes) // minimum))
            assert len(used) <= min(degree, pieces)
            assert all(n >= minimum for n in used[:-1])  # the last piece may be short
            if alg == "uniform":
                assert len(used) == min(degree, pieces)


def test_uniform_stages_start_small():
    owners = Owners.contiguous(4096, 4)
    plan = plan_distributed(
        bands_of([(0, 4096, 0, 4096, 0)]), 4096, 4096, owners, owners, PlanOptions(degree=4, min_chunk_size=512)
    )
    assert [s.num_keys for s in plan.rank_plan(0).stages] == [512, 512, 1024, 1024]


def predicted(plan, chosen):
    return int(explain_plan(plan, options=chosen).total_fs.max())


@pytest.mark.parametrize("kind", ["full", "causal", "varlen_causal", "window", "block_causal"])
@pytest.mark.parametrize("alg", ["uniform", "greedy"])
@pytest.mark.parametrize("token_cost", [1_000_000, 15_000_000, 10**9])
def test_automatic_degree_is_the_best_static_one(kind, alg, token_cost):
    total, world = 4097, 8
    bands = bands_of(suite(total)[kind])
    owners = self_owners(bands, total, world)
    base = PlanOptions(
        min_chunk_size=64, alg=alg, token_cost_fs=token_cost, transfer_start_fs=10**8, compute_start_fs=10**8
    )
    automatic = replace(base, degree=None)
    plan = plan_distributed(bands, total, total, owners, owners, automatic)
    assert plan.predicted_fs == predicted(plan, automatic)
    for degree in (1, 2, 3, 4):
        static = plan_distributed(bands, total, total, owners, owners, replace(base, degree=degree))
        assert plan.predicted_fs <= predicted(static, base)


def test_greedy_is_the_best_split_by_brute_force():
    """Two ranks, seven pieces, degree 3: no borders are predicted to be faster."""
    total = 700
    owners = Owners.contiguous(total, 2)
    bands = bands_of([(0, total, 0, total, 1)])
    chosen = PlanOptions(degree=3, alg="greedy", min_chunk_size=50, transfer_start_fs=10**7, compute_start_fs=10**7)
    plan = plan_distributed(bands, total, total, owners, owners, chosen)
    rank = plan.rank_plan(1)
    pieces = [(a, a + 50) for a in range(0, 350, 50)]
    areas = [bands.clip(q=(350, 700), k=piece).area() for piece in pieces]
    calc = lambda area: chosen.compute_start_fs + area * chosen.pair_cost_fs if area else 0  # noqa: E731
    comm = lambda tokens: chosen.transfer_start_fs + tokens * chosen.token_cost_fs  # noqa: E731
    best = None
    for i in range(1, 8):
        for j in range(i, 8):
            groups = [g for g in (areas[:i], areas[i:j], areas[j:]) if g]
            cost, before = 0, calc(rank.local_bands.area())
            for group in groups:
                cost += max(before, comm(50 * len(group)))
                before = calc(sum(group))
            best = cost + before if best is None else min(best, cost + before)
    assert predicted(plan, chosen) == best


def test_plans_are_values():
    bands = bands_of(suite(1000)["causal"])
    owners = self_owners(bands, 1000, 4)
    one, two = (plan_distributed(bands, 1000, 1000, owners, owners) for _ in range(2))
    assert one == two
    assert one.digest == two.digest
    assert hash(one) == hash(two)
    other = plan_distributed(bands, 1000, 1000, owners, owners, PlanOptions(degree=2, min_chunk_size=16))
    assert other != one
    for copy in (DistPlan(one.buffer), pickle.loads(pickle.dumps(one))):
        assert copy == one
        assert copy.rank_plan(2).local_bands == one.rank_plan(2).local_bands
        assert copy.q_owners == owners
        assert copy.bands.digest == bands.digest
    with pytest.raises(ValueError, match="read-only"):
        one.buffer[0] = 1


def test_buffers_that_are_no_plans_are_refused():
    owners = Owners.contiguous(12, 2)
    good = plan_distributed(bands_of([(0, 12, 0, 12, 1)]), 12, 12, owners, owners).buffer
    for change, message in (
        (lambda w: w[:10], "the magic word is missing"),
        (lambda w: np.zeros(64, np.int64), "the magic word is missing"),
        (lambda w: w[:-1], f"buffer must have {len(good)} words, got {len(good) - 1}"),
        (lambda w: np.where(np.arange(len(w)) == 1, 99, w), "of version 99, this library reads version"),
        (lambda w: np.where(np.arange(len(w)) == len(w) - 1, w + 1, w), "was changed after planning"),
    ):
        with pytest.raises(ValueError, match=message):
            DistPlan(change(good.copy()))


@settings(max_examples=200, deadline=None)
@given(word=st.integers(2, 200), value=st.one_of(st.integers(-3, 70), st.integers(-(2**63), 2**63 - 1)))
def test_a_forged_buffer_never_crashes(word, value):
    """With a digest that fits, a wrong word gives a ValueError or a plan that verify can judge."""
    owners = Owners([[(0, 4), (8, 12)], [(4, 8)]], 12)
    words = plan_distributed(bands_of([(0, 12, 0, 12, 1)]), 12, 12, owners, owners).buffer.copy()
    words[word % len(words)] = value
    words[2] = forged_digest(words)
    try:
        plan = DistPlan(words)
        verify(plan)
        explain_plan(plan)
    except ValueError:
        pass


def forged_digest(words):
    """The digest of csrc/host/dist_plan.cc, to forge with."""
    mask = 2**64 - 1
    h = 0x6D616769
    for i, word in enumerate(words.tolist()):
        if i == 2:
            continue
        h ^= ((word & mask) + 0x9E3779B97F4A7C15 + ((h << 6) & mask) + (h >> 2)) & mask
        h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & mask
        h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & mask
        h ^= h >> 31
    return h - 2**64 if h >= 2**63 else h


def test_the_forger_knows_the_digest():
    owners = Owners.contiguous(12, 2)
    words = plan_distributed(bands_of([(0, 12, 0, 12, 1)]), 12, 12, owners, owners).buffer
    assert forged_digest(words) == words[2]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"total_q": 13}, ValueError, "q_owners must own total_q = 13 tokens, got 12"),
        ({"total_k": 11}, ValueError, "k_owners must own total_k = 11 tokens, got 12"),
        (
            {"k_owners": Owners.contiguous(12, 3)},
            ValueError,
            r"k_owners must have the world size of q_owners \(2\), got 3",
        ),
        ({"q_owners": [[0, 12]]}, TypeError, "q_owners must be Owners, got list"),
        ({"options": {"degree": 2}}, TypeError, "options must be PlanOptions, got dict"),
        (
            {"mask_or_bands": bands_of([(0, 13, 0, 12, 0)])},
            ValueError,
            r"band 0 covers q \[0, 13\) and k \[0, 12\), outside the totals 12 and 12",
        ),
        ({"mask_or_bands": [[1, 2, 3]]}, ValueError, r"bands must have shape \(n, 6\), got \(1, 3\)"),
        ({"mask_or_bands": np.zeros((1, 6))}, TypeError, "bands must hold integers"),
    ],
)
def test_plan_refuses(change, error, message):
    owners = Owners.contiguous(12, 2)
    arguments = {
        "mask_or_bands": bands_of([(0, 12, 0, 12, 1)]),
        "total_q": 12,
        "total_k": 12,
        "q_owners": owners,
        "k_owners": owners,
    } | change
    with pytest.raises(error, match=message):
        plan_distributed(**arguments)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"degree": -1}, ValueError, "degree must be at least 0, got -1"),
        ({"degree": 1.5}, TypeError, "degree must be an integer, got float"),
        ({"degree": 2000}, ValueError, "degree must be at most 1024, got 2000"),
        ({"max_degree": 0}, ValueError, "max_degree must be at least 1, got 0"),
        ({"min_chunk_size": 0}, ValueError, "min_chunk_size must be at least 1, got 0"),
        ({"max_num_chunks": 0}, ValueError, "max_num_chunks must be at least 1, got 0"),
        ({"alg": "magic"}, ValueError, "alg must be one of uniform, greedy, got 'magic'"),
        ({"pair_cost_fs": -1}, ValueError, "pair_cost_fs must be at least 0, got -1"),
        ({"shuffle_seed": -1}, ValueError, "shuffle_seed must be at least 0, got -1"),
    ],
)
def test_options_refuse(kwargs, error, message):
    with pytest.raises(error, match=message):
        PlanOptions(**kwargs)


def test_costs_in_microseconds_round_once():
    assert PlanOptions.cost_from_us(1.5e-3) == 1_500_000
    with pytest.raises(ValueError, match="pair must be finite, not negative and below an hour, got -1"):
        PlanOptions.cost_from_us(-1, "pair")
    with pytest.raises(ValueError, match="got nan"):
        PlanOptions.cost_from_us(float("nan"))


def test_huge_coordinates_do_not_overflow():
    total = 2**31 - 1
    owners = Owners.contiguous(total, 8)
    bands = bands_of([(0, total, 0, total, 1)])
    plan = plan_distributed(bands, total, total, owners, owners, PlanOptions(degree=None, alg="greedy"))
    assert int(plan.balance.sum()) == total * (total + 1) // 2
    assert plan.num_received().tolist() == [int(r[0, 0]) for r in map(owners.ranges, range(8))]
    areas = [
        plan.rank_plan(r).local_bands.area() + sum(s.bands.area() for s in plan.rank_plan(r).stages) for r in range(8)
    ]
    assert areas == plan.balance.tolist()
