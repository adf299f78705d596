"""Placements of tokens and the exchanges they imply, against numpy on the whole sequence."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from magi_attention.runtime.placement import TokenPlacement


@st.composite
def placements(draw):
    total, world, chunk = draw(st.integers(0, 40)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
    ranks = draw(st.lists(st.integers(0, world - 1), min_size=-(-total // chunk), max_size=-(-total // chunk)))
    chunks = [[i for i, r in enumerate(ranks) if r == rank] for rank in range(world)]
    return TokenPlacement.from_chunks(total, chunk, chunks, even=draw(st.booleans())), chunks, chunk


@given(placements())
def test_tokens_are_the_chunks_in_order_and_partition_the_sequence(case) -> None:
    placement, chunks, size = case
    for rank, ids in enumerate(chunks):
        expected = [t for i in ids for t in range(i * size, min((i + 1) * size, placement.total))]
        assert placement.tokens(rank).tolist() == expected
        assert placement.num_tokens[rank] == len(expected) <= placement.shard_lens[rank]
    assert sorted(placement.rank_order().tolist()) == list(range(placement.total))


@given(placements())
def test_even_shards_have_one_length_and_pad_with_the_last_position(case) -> None:
    placement, _, _ = case
    for rank in range(placement.world_size):
        positions = placement.positions(rank).tolist()
        assert len(positions) == placement.shard_lens[rank]
        assert positions[: placement.num_tokens[rank]] == placement.tokens(rank).tolist()
        assert set(positions[placement.num_tokens[rank] :]) <= {max(placement.total - 1, 0)}


@given(placements(), st.integers(0, 3))
def test_gathered_shards_restore_the_sequence(case, slack) -> None:
    placement, _, _ = case
    stride = max(placement.num_tokens) + slack
    gathered = np.full(stride * placement.world_size, -1)
    for rank in range(placement.world_size):
        gathered[rank * stride : rank * stride + placement.num_tokens[rank]] = placement.tokens(rank)
    assert gathered[placement.gathered_index(stride)].tolist() == list(range(placement.total))


@given(placements(), st.integers(-90, 90))
def test_roll_exchange_is_a_roll_and_moves_only_what_changes_rank(case, shift) -> None:
    placement, _, _ = case
    world, whole = placement.world_size, np.arange(placement.total) * 7 + 1
    local = [whole[placement.tokens(rank)] for rank in range(world)]
    plans = [placement.roll_exchange(rank, shift) for rank in range(world)]
    wire = [np.split(local[r][p.send_index], np.cumsum(p.send_splits)[:-1]) for r, p in enumerate(plans)]
    owner = np.empty(placement.total, int)
    for rank in range(world):
        owner[placement.tokens(rank)] = rank
    for rank, plan in enumerate(plans):
        assert plan.send_splits[rank] == plan.recv_splits[rank] == 0
        assert [len(wire[source][rank]) for source in range(world)] == list(plan.recv_splits)
        result = np.full(len(local[rank]), -1)
        result[plan.copy_to] = local[rank][plan.copy_from]
        result[plan.recv_index] = np.concatenate([wire[source][rank] for source in range(world)])
        assert result.tolist() == np.roll(whole, shift)[placement.tokens(rank)].tolist()
        sources = (placement.tokens(rank) - shift) % max(placement.total, 1)
        assert sum(plan.recv_splits) == int((owner[sources] != rank).sum())


def test_digests_tell_placements_apart() -> None:
    one = TokenPlacement.from_chunks(8, 2, [[0, 1], [2, 3]])
    same = TokenPlacement(8, [[(0, 4)], [(4, 8)]])
    assert one.digest == same.digest
    others = [
        TokenPlacement.from_chunks(8, 2, [[0, 2], [1, 3]]),
        TokenPlacement.from_chunks(7, 2, [[0, 1], [2, 3]]),
        TokenPlacement.from_chunks(7, 2, [[0, 1], [2, 3]], even=True),
        TokenPlacement.from_chunks(8, 2, [[0, 1], [2, 3], []]),
    ]
    assert len({one.digest, *(o.digest for o in others)}) == 5
