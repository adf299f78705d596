"""Owners: partitions of tokens over ranks, and maps between global and local ids."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from magi_core.planner import Owners
from magi_core.ranges import AttnRanges


@st.composite
def partitions(draw):
    total = draw(st.integers(0, 60))
    world = draw(st.integers(1, 6))
    return draw(st.lists(st.integers(0, world - 1), min_size=total, max_size=total)), world


def owners_of(ranks, world):
    return Owners([[(i, i + 1) for i, r in enumerate(ranks) if r == rank] for rank in range(world)], len(ranks))


@given(case=partitions())
def test_maps_are_inverse_to_one_another(case):
    ranks, world = case
    owners = owners_of(ranks, world)
    tokens = np.arange(len(ranks))
    rank, local = owners.to_local(tokens)
    assert rank.tolist() == ranks == owners.rank_of_token.tolist()
    for r in range(world):
        mine = owners.local_tokens(r)
        assert mine.tolist() == [i for i, x in enumerate(ranks) if x == r]
        assert owners.to_global(r, np.arange(len(mine))).tolist() == mine.tolist()
        assert local[rank == r].tolist() == list(range(len(mine)))
        assert owners.num_local(r) == len(mine) == owners.num_tokens[r]
        ranges = owners.ranges(r)
        assert np.all(ranges[1:, 0] > ranges[:-1, 1])  # merged: a gap between neighbours
        assert np.all(ranges[:, 0] < ranges[:, 1])
    assert owners.permutation[owners.inverse_permutation].tolist() == tokens.tolist()


def test_forms_of_ranges_are_equal():
    pairs = Owners([[(4, 6), (0, 2)], [(2, 4)], []], 6)
    ranges = Owners([AttnRanges.from_ranges([(0, 2), (4, 6)]), np.array([[2, 3], [3, 4]]), []], 6)
    chunks = Owners.from_chunks([[0, 2], [1], []], 2, 6)
    assert pairs == ranges == chunks
    assert len({pairs, ranges, chunks}) == 1
    assert pairs != Owners([[(0, 2)], [(2, 6)], []], 6)
    assert pairs.table.tolist() == [[0, 0, 2, 0], [0, 4, 6, 2], [1, 2, 4, 0]]


def test_contiguous_blocks():
    owners = Owners.contiguous(7, 3)
    assert [owners.ranges(r).tolist() for r in range(3)] == [[[0, 3]], [[3, 5]], [[5, 7]]]
    assert Owners.contiguous(2, 4).num_tokens.tolist() == [1, 1, 0, 0]
    assert Owners.contiguous(0, 2).num_tokens.tolist() == [0, 0]


def test_arrays_are_read_only():
    owners = Owners.contiguous(7, 3)
    for array in (owners.table, owners.num_tokens, owners.permutation, owners.rank_of_token, owners.ranges(0)):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


@pytest.mark.parametrize(
    ("ranges", "total", "message"),
    [
        ([[(0, 3)], [(2, 4)]], 4, r"owners: token 2 is owned more than once \(again by rank 1\)"),
        ([[(0, 3)], [(1, 2), (3, 4)]], 4, "owners: token 1 is owned more than once"),
        ([[(0, 2)], [(3, 4)]], 4, "owners: token 2 has no owner"),
        ([[(0, 2)], []], 4, "owners: token 2 has no owner"),
        ([[(0, 5)]], 4, r"owners: range \[0, 5\) of rank 0 must lie inside \[0, 4\)"),
        ([[(-1, 4)]], 4, r"owners: range \[-1, 4\) of rank 0"),
        ([[(3, 1), (0, 4)]], 4, r"owners: range \[3, 1\) of rank 0"),
        ([], 4, "world_size must be at least 1 and at most 65536, got 0"),
        ([[(0, 2**40)]], 4, "must fit int32"),
        ([[0, 4]], 4, r"ranges\[0\] must have shape \(n, 2\), got \(2,\)"),
        ([[(0, 1)]], -1, "total must be at least 0, got -1"),
    ],
)
def test_owners_refuse(ranges, total, message):
    with pytest.raises(ValueError, match=message):
        Owners(ranges, total)


def test_maps_refuse_what_lies_outside():
    owners = Owners.contiguous(7, 3)
    with pytest.raises(ValueError, match=r"tokens must be in \[0, 7\), got 0 to 7"):
        owners.to_local([0, 7])
    with pytest.raises(ValueError, match=r"local must be in \[0, 2\), got 2 to 2"):
        owners.to_global(1, [2])
    with pytest.raises(ValueError, match="rank must be at most 2, got 3"):
        owners.num_local(3)
    with pytest.raises(TypeError, match="tokens must hold integers"):
        owners.to_local([0.5])
    assert owners.to_local([])[0].tolist() == []


def test_a_table_of_rows_is_the_same_partition():
    owners = Owners([[(4, 6), (0, 2)], [], [(2, 4), (6, 9)]], 9)
    assert Owners.from_table([[2, 6, 9], [0, 0, 2], [2, 2, 4], [0, 4, 6]], 3, 9) == owners
    assert Owners.from_table(owners.table[:, :3], 3, 9) == owners
    for rows, message in (
        ([[0, 0, 9], [1, 3, 4]], "own"),
        ([[0, 0, 8]], "own"),
        ([[3, 0, 9]], "3"),
        ([[0, 0]], r"rows must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            Owners.from_table(rows, 3, 9)
