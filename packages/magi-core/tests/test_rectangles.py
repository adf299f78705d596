"""Rectangles and AttnMask under their public names, against brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from magi_core.mask import Mask
from magi_core.mask_type import AttnMaskType
from magi_core.ranges import AttnRange, AttnRanges
from magi_core.rectangles import AttnMask, AttnRectangle, AttnRectangles

N = 12


def cells(rectangle):
    q, k = np.arange(N)[:, None], np.arange(N)[None, :]
    rows, columns, d = rectangle.q_range, rectangle.k_range, rectangle.d_range
    inside = (rows.start <= q) & (q < rows.end) & (columns.start <= k) & (k < columns.end)
    return inside & (d.start <= k - q) & (k - q <= d.end)


@st.composite
def rectangles(draw):
    q = sorted(draw(st.tuples(*[st.integers(0, N)] * 2)))
    k = sorted(draw(st.tuples(*[st.integers(0, N)] * 2)))
    d = sorted(draw(st.tuples(*[st.integers(-N, N)] * 2)))
    arguments = [AttnRange(*q), AttnRange(*k), AttnRange(*d)]
    try:
        return AttnRectangle(*arguments)
    except ValueError:
        return AttnRectangle(AttnRange(0, 3), AttnRange(0, 5))


def dense_of(parts):
    return sum((cells(p).astype(int) for p in parts if p is not None), np.zeros((N, N), int))


@given(rectangles(), st.integers(0, N), st.integers(0, N))
def test_cuts_and_segments(rectangle, a, b):
    want = cells(rectangle)
    assert rectangle.area() == want.sum()
    for cut, axis in ((rectangle.cut_q, 0), (rectangle.cut_k, 1)):
        low, high = cut(a)
        first = np.arange(N) < a
        keep = np.broadcast_to(first[:, None] if axis == 0 else first, (N, N))
        assert (dense_of([low]) == (want & keep)).all() and (dense_of([high]) == (want & ~keep)).all()
    start, end = sorted((a, b))
    rows = np.zeros((N, N), bool)
    rows[start:end] = True
    assert (dense_of([rectangle.get_rect_within_q_segment(start, end)]) == (want & rows)).all()
    assert (dense_of([rectangle.get_rect_within_k_segment(start, end)]) == (want & rows.T)).all()


@given(rectangles())
def test_slices_of_a_rectangle(rectangle):
    slices = rectangle.to_qk_range_mask_type()
    assert 1 <= len(slices) <= 3
    parts = [AttnRectangle(q, k, mask_type=code) for q, k, code in slices]
    assert (dense_of(parts) == cells(rectangle)).all()
    flags = (rectangle.is_full(), rectangle.is_causal(), rectangle.is_inv_causal(), rectangle.is_bi_causal())
    for code, flag in enumerate(flags):
        same = AttnRectangle(rectangle.q_range, rectangle.k_range, mask_type=code) if flag else None
        assert not flag or same == rectangle
    assert any(flags) == (len(slices) == 1)
    assert rectangle.clone() == rectangle and hash(rectangle.clone()) == hash(rectangle)


@given(st.lists(rectangles(), max_size=5), st.integers(0, N))
def test_lists(given_rectangles, at):
    many = AttnRectangles(given_rectangles)
    want = dense_of(given_rectangles)
    assert many.area() == want.sum() and many.size == len(many) == len(given_rectangles)
    rows, columns = (np.flatnonzero(want.any(axis=axis)) for axis in (1, 0))
    assert [t for r in many.get_qo_ranges_union() for t in range(r.start, r.end)] == rows.tolist()
    assert [t for r in many.get_kv_ranges_union() for t in range(r.start, r.end)] == columns.tolist()
    assert (many.total_seqlen_qo(), many.total_seqlen_kv()) == (len(rows), len(columns))
    first = np.arange(N)[:, None] < at
    low, high = many.cut_q(at)
    assert (dense_of(low) == want * first).all() and (dense_of(high) == want * ~first).all()
    low, high = many.cut_k(at)
    assert (dense_of(low) == want * first.T).all() and (dense_of(high) == want * ~first.T).all()
    assert many.is_empty() == (not given_rectangles) and list(many) == given_rectangles
    assert many == AttnRectangles(given_rectangles) and many[1:] == AttnRectangles(given_rectangles[1:])


def test_types_and_shrinking():
    q, k = AttnRange(0, 4), AttnRange(0, 6)
    causal = AttnRectangle(q, k, mask_type=AttnMaskType.CAUSAL)
    assert causal.d_range == AttnRange(-3, 2) and causal.is_causal() and not causal.is_full()
    assert AttnRectangle(q, k, mask_type=3).d_range == AttnRange(0, 2)
    assert AttnRectangle(q, k, AttnRange(1, 9), 1).d_range == AttnRange(1, 2)
    narrow = AttnRectangle(q, k, AttnRange(5, 5))
    assert (narrow.q_range, narrow.k_range) == (AttnRange(0, 1), AttnRange(5, 6))
    assert (q, k) == (AttnRange(0, 4), AttnRange(0, 6)), "the ranges given are left as they are"
    window = AttnRectangle(AttnRange(0, 9), AttnRange(0, 9), AttnRange(-2, 3))
    assert window.intersection_q_id_on_left_boundary() == 2
    assert window.intersection_q_id_on_right_boundary() == 5


def test_from_ranges_skips_what_shows_nothing():
    q, k = AttnRanges.from_ranges([(0, 4), (4, 4), (4, 9)]), AttnRanges.from_ranges([(0, 4), (0, 3), (0, 2)])
    many = AttnRectangles.from_ranges(q, k, [AttnMaskType.FULL, AttnMaskType.FULL, AttnMaskType.BICAUSAL])
    assert many.size == 1 and many[0].is_full()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: AttnRectangle(AttnRange(2, 2), AttnRange(0, 4)), ValueError, "must have a visible cell"),
        (lambda: AttnRectangle(AttnRange(0, 4), AttnRange(0, 2), mask_type=3), ValueError, "must have a visible cell"),
        (lambda: AttnRectangle(AttnRange(0, 4), AttnRange(0, 2), mask_type="full"), TypeError, "mask_type must be"),
        (lambda: AttnRectangle(AttnRange(0, 4), AttnRange(0, 2), mask_type=4), ValueError, "0, 1, 2 or 3"),
        (lambda: AttnRectangles([1]), TypeError, "rectangle must be an AttnRectangle"),
        (lambda: AttnMask("mask"), TypeError, "mask must be a Mask"),
        (lambda: AttnMask.from_ranges([(0, 4)], [(0, 9)], 0, 4, 8), ValueError, r"k_ranges\[0\] must lie within"),
        (lambda: AttnMask.make_causal_mask(2, 2, align="left"), ValueError, "align must be"),
        (lambda: AttnMask(Mask.full(4)).make_sub_mask(AttnRange(0, 5), AttnRange(0, 4)), ValueError, "q_range must"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_attn_mask(capsys, tmp_path):
    mask = AttnMask.from_ranges([(0, 3), (3, 8)], [(0, 3), (3, 8)], ["causal", "causal"], 8, 8)
    assert mask.area == 21 and mask.is_square() and not mask.is_empty()
    assert mask.is_varlen_causal() and not mask.is_varlen_full() and not mask.is_pure_causal()
    assert mask.tuples()[1] == (AttnRange(3, 8), AttnRange(3, 8), AttnMaskType.CAUSAL)
    assert mask.calc_sub_area(AttnRange(2, 5), AttnRange(1, 4)) == 4
    sub = mask.make_sub_mask(AttnRange(2, 5), AttnRange(1, 4))
    assert sub.area == 4 and sub.mask.to_dense().tolist() == mask.mask.to_dense()[2:5, 1:4].tolist()
    assert AttnMask.from_mask(mask.mask.to_dense()) == mask
    assert AttnMask(Mask.causal(5, 7)).is_pure_causal() and AttnMask(Mask.full(5, 7)).is_pure_full()
    assert AttnMask(Mask.documents([2, 3])).is_varlen_full() and not AttnMask(Mask.full(5)).is_varlen_causal()
    gap = AttnMask.from_ranges([(0, 3)], [(0, 3)], "full", 8, 8)
    assert not gap.is_varlen_full() and not AttnMask.from_ranges([], [], [], 4, 4).is_pure_full()
    mask.visualize()
    assert "█" in capsys.readouterr().out


def test_attn_mask_tensors():
    torch = pytest.importorskip("torch")
    causal = AttnMask.make_causal_mask(3, 5)
    assert causal.tolist() == Mask.causal(3, 5).to_dense().tolist()
    assert AttnMask.make_causal_mask(3, 5, align="top-left").tolist() == torch.ones(3, 5).tril().bool().tolist()
    mask = AttnMask.from_mask(causal)
    assert mask.is_pure_causal() and torch.equal(mask.mask_tensor, causal)
