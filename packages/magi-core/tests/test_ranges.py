"""Ranges and lists of ranges, against sets of integers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from magi_core.ranges import (
    AttnRange,
    AttnRanges,
    RangeError,
    check_valid_cu_seqlens,
    is_valid_cu_seqlens,
    range_array,
)

N = 20


@st.composite
def pairs(draw):
    start = draw(st.integers(-3, N))
    return start, draw(st.integers(start, N))


lists = st.lists(pairs(), max_size=8)


def tokens(ranges):
    return {t for start, end in ranges for t in range(start, end)}


def as_set(ranges):
    return tokens(r.to_naive_range() for r in ranges)


@given(pairs(), pairs())
def test_two_ranges(a, b):
    x, y = AttnRange(*a), AttnRange(*b)
    mine, other = set(range(*a)), set(range(*b))
    assert x.seqlen == len(x) == len(mine)
    assert set(range(*x.intersect(y).to_naive_range())) == mine & other
    assert x.intersect_size(y) == len(mine & other)
    assert x.union_size(y) == len(mine | other)
    assert as_set(x.union(y)) == mine | other
    assert len(x.union(y)) == (1 if mine & other else 2)
    assert as_set(x.diff_by(y)) == other - mine
    assert not any(r.is_empty() for r in x.diff_by(y))
    assert x.is_overlap_with(y) == bool(mine & other)
    if mine:
        assert x.is_subrange_of(y) == (mine <= other)
    assert (x == y) == (a == b)
    assert x != y or hash(x) == hash(y)
    assert x.offset(5) == AttnRange(a[0] + 5, a[1] + 5)


@given(lists, lists)
def test_lists_are_sets_of_tokens(a, b):
    x, y = AttnRanges.from_ranges(a), AttnRanges.from_ranges(b)
    mine, other = tokens(a), tokens(b)
    before = x.clone()
    merged = x.merge()
    assert as_set(merged) == mine and merged.is_merged() and merged.is_sorted()
    holes, common = x.find_hole_ranges(y), x.find_overlap_ranges(y)
    assert as_set(holes) == mine - other and holes.is_merged()
    assert as_set(common) == mine & other and common.is_merged()
    assert x.find_hole_ranges(y.merge(), is_other_merged=True) == holes
    assert merged.find_overlap_ranges(y, is_self_merged=True) == common
    assert x.total_seqlen == sum(e - s for s, e in a)
    assert x.union_size() == len(mine)
    assert x.intersect_size() == x.total_seqlen - len(mine)
    assert x.intersect_size_with(y) == len(mine & other)
    assert x.union_size_with(y) == len(mine | other)
    assert x.is_non_overlap() == (x.total_seqlen == len(mine))
    assert x == before, "set operations must not change their operands"


@given(lists, st.integers(1, 7))
def test_chunk(a, size):
    x = AttnRanges.from_ranges(a).merge()
    chunks = x.chunk(size)
    flat = [t for chunk in chunks for r in chunk for t in range(r.start, r.end)]
    assert flat == sorted(as_set(x))
    assert all(c.total_seqlen == size for c in chunks[:-1])
    assert all(0 < c.total_seqlen <= size for c in chunks[-1:])


@given(lists, st.integers(1, 5))
def test_alignment(a, n):
    aligned = AttnRanges.from_ranges(a).merge_with_split_alignment(n)
    assert aligned.is_merged()
    assert all(r.start % n == 0 and r.end % n == 0 for r in aligned)
    assert as_set(aligned) == {t for u in tokens(a) for t in range(u // n * n, u // n * n + n)}


@given(lists, st.data())
def test_local_coordinates(a, data):
    merged = AttnRanges.from_ranges(a).merge()
    if merged.is_empty():
        with pytest.raises(ValueError, match="must lie within one range"):
            merged.make_range_local(AttnRange(0, 1))
        return
    flat = [t for r in merged for t in range(r.start, r.end)]
    home = data.draw(st.sampled_from(list(merged)))
    start = data.draw(st.integers(home.start, home.end - 1))
    wanted = AttnRange(start, data.draw(st.integers(start + 1, home.end)))
    local, where = AttnRanges.from_ranges(a).make_range_local(wanted)
    assert flat[local.start : local.end] == list(range(wanted.start, wanted.end))
    assert where == home
    assert merged.make_ranges_local(AttnRanges([wanted]), is_self_merged=True) == AttnRanges([local])


def test_truncate_and_views():
    x = AttnRanges.from_ranges([(5, 9), (0, 3), (9, 12)])
    assert x.truncate(2, 10) == AttnRanges.from_ranges([(5, 9), (2, 3), (9, 10)])
    assert AttnRange(5, 9).truncate(10, 12).is_empty()
    assert x.sort() == AttnRanges.from_ranges([(0, 3), (5, 9), (9, 12)])
    assert (x.start, x.end, x.max_seqlen, x.size, x.last) == (0, 12, 4, 3, AttnRange(9, 12))
    assert x.points == [0, 3, 5, 9, 12]
    assert x[1] == AttnRange(0, 3) and x[1:] == AttnRanges.from_ranges([(0, 3), (9, 12)])
    assert repr(x) == "[[5, 9), [0, 3), [9, 12)]"
    assert not x.is_sorted() and not x.is_merged() and x.is_non_overlap() and x.is_valid()


def test_list_edits():
    x = AttnRanges()
    assert x.is_empty()
    for name in ("start", "end"):
        with pytest.raises(ValueError, match="at least one range"):
            getattr(x, name)
    with pytest.raises(IndexError):
        x.pop()
    x.append(AttnRange(0, 2), check=True)
    x.extend(AttnRanges.from_ranges([(3, 3), (4, 6)]))
    x.insert(0, AttnRange(9, 9))
    assert x.to_naive_ranges() == [(9, 9), (0, 2), (3, 3), (4, 6)]
    assert x.clear_empty().to_naive_ranges() == [(0, 2), (4, 6)]
    assert x.pop() == AttnRange(4, 6) and len(x) == 3
    x[0] = AttnRange(1, 2)
    assert x[0] == AttnRange(1, 2)
    x[0].start = 5
    assert not x.is_valid()
    with pytest.raises(ValueError, match="start <= end"):
        x.check_valid()
    with pytest.raises(TypeError, match="AttnRange"):
        x.append((0, 1))


def test_cu_seqlens():
    x = AttnRanges.from_cu_seqlens([0, 3, 7], 7)
    assert x == AttnRanges.from_ranges([(0, 3), (3, 7)])
    assert x.to_cu_seqlens(7) == [0, 3, 7] and x.is_cu_seqlens(7) and not x.is_cu_seqlens(8)
    assert is_valid_cu_seqlens([], 5)
    for bad in ([1, 3], [0, 3, 3, 7], [0, 5]):
        assert not is_valid_cu_seqlens(bad, 7)
        with pytest.raises(ValueError, match="strictly increase"):
            check_valid_cu_seqlens(bad, 7)
        with pytest.raises(ValueError, match="strictly increase"):
            AttnRanges.from_cu_seqlens(bad, 7)
    with pytest.raises(ValueError, match="must tile"):
        AttnRanges.from_ranges([(0, 2), (3, 4)]).to_cu_seqlens(4)


def test_conversions():
    torch = pytest.importorskip("torch")
    x = AttnRanges.from_ranges([(0, 3), (5, 6)])
    tensor = x.to_tensor()
    assert tensor.dtype == torch.int32 and tensor.tolist() == [[0, 3], [5, 6]]
    for form in (tensor, tensor.numpy(), tensor.tolist(), [AttnRange(0, 3), (5, 6)], x):
        assert AttnRanges.from_ranges(form) == x
        assert range_array(form, "ranges").tolist() == [[0, 3], [5, 6]]
    assert AttnRanges().to_tensor().shape == (0, 2)
    assert range_array([], "ranges").shape == (0, 2)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: AttnRange(3, 2), RangeError, "start <= end"),
        (lambda: AttnRange(0.5, 2), TypeError, "start must be an integer"),
        (lambda: AttnRange(0, True), TypeError, "end must be an integer"),
        (lambda: AttnRange.from_range((1, 2, 3)), TypeError, "pair of ints"),
        (lambda: AttnRanges.from_ranges([(0, 1), 5]), TypeError, "pair of ints"),
        (lambda: AttnRanges.from_ranges([(0, 2), (1, 3)]).chunk(2), ValueError, "must not overlap"),
        (lambda: AttnRanges.from_ranges([(0, 2)]).chunk(0), ValueError, "chunk_size must be at least 1"),
        (lambda: AttnRanges.from_ranges([(0, 2**31)]).to_numpy(), ValueError, "fit int32"),
        (lambda: range_array(np.zeros((2, 3), np.int32), "q_ranges"), ValueError, r"q_ranges must have shape \(n, 2\)"),
        (lambda: range_array(np.zeros((2, 2)), "q_ranges"), TypeError, "q_ranges must hold integers"),
        (lambda: range_array("ab", "q_ranges"), TypeError, "q_ranges must be AttnRanges"),
        (lambda: range_array([[0, 1], [2]], "q_ranges"), ValueError, "q_ranges must be an array"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_negative_ranges_are_legal():
    assert AttnRange(-3, -1).seqlen == 2
    assert issubclass(RangeError, ValueError)
