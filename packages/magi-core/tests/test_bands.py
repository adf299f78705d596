"""The band algebra against brute force."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from magi_core.bands import Bands
from magi_core.builders import from_dense

N = 14
BIG = 2**31 - 1


@st.composite
def rows(draw):
    q = sorted(draw(st.tuples(st.integers(0, N), st.integers(0, N))))
    k = sorted(draw(st.tuples(st.integers(0, N), st.integers(0, N))))
    low = draw(st.one_of(st.just(-BIG), st.integers(-N, N)))
    high = draw(st.one_of(st.just(BIG), st.integers(-N, N)))
    return (*q, *k, low, high)


band_lists = st.lists(rows(), max_size=5)


def cells(row):
    q0, q1, k0, k1, low, high = row
    q, k = np.arange(N)[:, None], np.arange(N)[None, :]
    return (q >= q0) & (q < q1) & (k >= k0) & (k < k1) & (k - q >= low) & (k - q <= high)


def counts(rows):
    return sum((cells(r).astype(int) for r in rows), np.zeros((N, N), int))


@st.composite
def disjoint_rows(draw):
    kept = []
    for row in draw(st.lists(rows(), max_size=6)):
        if not (counts(kept).astype(bool) & cells(row)).any():
            kept.append(row)
    return kept


@given(band_lists)
def test_bands_are_shrunk_to_their_cells(given_rows):
    bands = Bands(given_rows)
    seen = [cells(r) for r in given_rows if cells(r).any()]
    assert len(bands) == len(seen)
    for row, dense in zip(bands.data.tolist(), seen, strict=True):
        q, k = np.nonzero(dense)
        assert row == [q.min(), q.max() + 1, k.min(), k.max() + 1, (k - q).min(), (k - q).max()]


@given(band_lists)
def test_area_counts_and_dense(given_rows):
    bands = Bands(given_rows)
    want = counts(given_rows)
    assert bands.area() == want.sum()
    assert bands.areas().tolist() == [cells(r).sum() for r in bands.data.tolist()]
    assert (bands.to_counts(N, N) == want).all()
    assert (bands.to_dense(N, N) == (want > 0)).all()
    assert bands.to_counts(N, N).dtype == np.int32 and bands.to_dense(N, N).dtype == np.bool_


@given(band_lists, *[st.integers(-2, N + 2)] * 4)
def test_clip(given_rows, q0, q1, k0, k1):
    part = Bands(given_rows).clip(q=(q0, q1), k=(k0, k1))
    want = counts(given_rows)
    keep = np.zeros((N, N), bool)
    keep[max(q0, 0) : max(q1, 0), max(k0, 0) : max(k1, 0)] = True
    assert (part.to_counts(N, N) == np.where(keep, want, 0)).all()
    assert (Bands(given_rows).clip().to_counts(N, N) == want).all()


@given(band_lists, st.integers(0, 5), st.integers(0, 5))
def test_shift(given_rows, dq, dk):
    moved = Bands(given_rows).shift(dq, dk)
    assert (moved.to_counts(N + 5, N + 5)[dq : dq + N, dk : dk + N] == counts(given_rows)).all()
    assert moved.shift(-dq, -dk) == Bands(given_rows)


@given(band_lists)
def test_slices_round_trip(given_rows):
    bands = Bands(given_rows)
    slices = bands.to_slices()
    assert len(slices.mask_types) <= 3 * len(bands)
    assert (Bands.from_slices(*slices).to_counts(N, N) == counts(given_rows)).all()


@given(st.lists(st.tuples(*[st.integers(0, N)] * 4, st.integers(0, 3)), max_size=4))
def test_slices_are_the_public_types(raw):
    slices = [(*sorted(s[:2]), *sorted(s[2:4]), s[4]) for s in raw]
    want = np.zeros((N, N), int)
    for q0, q1, k0, k1, kind in slices:
        sq, sk = q1 - q0, k1 - k0
        for i in range(sq):
            for j in range(sk):
                visible = (not kind & 1 or j <= i + sk - sq) and (not kind & 2 or j >= i)
                want[q0 + i, k0 + j] += visible
    array = np.array(slices, np.int32).reshape(-1, 5)
    bands = Bands.from_slices(array[:, :2], array[:, 2:4], array[:, 4])
    assert (bands.to_counts(N, N) == want).all()
    # One slice of a public type comes back as that one slice when it is made of all its cells.
    for index, row in zip(bands.source.tolist(), bands.data.tolist(), strict=True):
        again = Bands([row]).to_slices()
        assert len(again.mask_types) == 1, slices[index]


@given(disjoint_rows(), st.data())
def test_equal_masks_have_equal_digests(kept, data):
    """Canonical bands do not depend on how a mask is cut into bands, nor on their order."""
    bands = Bands(kept)
    canonical = bands.canonical()
    assert (canonical.to_counts(N, N) == counts(kept)).all()
    assert canonical.canonical() == canonical
    assert canonical == from_dense(canonical.to_dense(N, N))[0], "a function of the cells alone"
    pieces = bands
    for axis in data.draw(st.lists(st.sampled_from("qk"), max_size=4)):
        at = data.draw(st.integers(0, N))
        halves = [pieces.clip(**{axis: (0, at)}), pieces.clip(**{axis: (at, N)})]
        pieces = Bands(np.concatenate([h.data for h in halves]))
    order = data.draw(st.permutations(range(len(pieces))))
    shuffled = Bands(pieces.data[list(order)])
    assert shuffled.canonical() == canonical
    assert shuffled.digest == bands.digest


@given(disjoint_rows(), disjoint_rows())
def test_other_masks_have_other_digests(a, b):
    assert (Bands(a).digest == Bands(b).digest) == bool((counts(a) == counts(b)).all())


@given(band_lists)
def test_canonical_keeps_double_cover(given_rows):
    twice = Bands(given_rows + given_rows)
    assert (twice.canonical().to_counts(N, N) == 2 * counts(given_rows)).all()


@given(band_lists)
def test_overlaps(given_rows):
    bands = Bands(given_rows)
    dense = [cells(r) for r in bands.data.tolist()]
    want = {(i, j) for j in range(len(dense)) for i in range(j) if (dense[i] & dense[j]).any()}
    assert {tuple(p) for p in bands.overlaps(100).tolist()} == want
    assert len(bands.overlaps()) == min(1, len(want))


@given(st.integers(0, 2**32 - 1))
def test_overlaps_of_many(seed):
    """Enough live bands for the sweep with a tree, against all pairs."""
    rng = np.random.default_rng(seed)
    n = 120
    q, k = np.sort(rng.integers(0, 400, (n, 2)), axis=1), np.sort(rng.integers(0, 400, (n, 2)), axis=1)
    small = rng.random(n) < 0.8
    k[small, 1] = np.minimum(k[small, 1], k[small, 0] + 6)
    low = np.where(rng.random(n) < 0.5, -BIG, rng.integers(-300, 300, n))
    bands = Bands(np.column_stack([q, k, low, np.minimum(low.astype(np.int64) + 20, BIG)]))
    want = set()
    for j, b in enumerate(bands.data.tolist()):
        for i, a in enumerate(bands.data[:j].tolist()):
            both = [f(x, y) for f, x, y in zip((max, min, max, min, max, min), a, b, strict=True)]
            if len(Bands([both])):
                want.add((i, j))
    assert {tuple(p) for p in bands.overlaps(n * n).tolist()} == want


def test_causal_pieces_fuse():
    whole = Bands.from_slices([(0, 8)], [(0, 8)], "causal")
    pieces = Bands.from_slices([(0, 3), (3, 8), (3, 8)], [(0, 3), (0, 3), (3, 8)], ["causal", "full", "causal"])
    assert pieces.canonical() == whole and pieces.digest == whole.digest
    window = Bands.from_slices([(0, 4), (4, 10)], [(0, 4), (1, 10)], ["causal", "bi_causal"])
    assert len(window.canonical()) == 1


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 5, 0, 5, -BIG, 0), (0, 5, 5, 8, -BIG, BIG)],  # touch in the last row only
        [(0, 9, 0, 9, -BIG, 0), (0, 5, 5, 8, -BIG, BIG)],  # touch in the last row of one, the other goes on
        [(0, 5, 0, 4, -BIG, BIG), (0, 5, 4, 9, 4, BIG)],  # touch in the first row only
        [(0, 5, 0, 5, -BIG, 0), (4, 9, 5, 9, -BIG, BIG)],  # one row in common, and it joins them
        [(0, 6, 0, 3, -BIG, BIG), (0, 6, 3, 9, 3, 5), (0, 6, 9, 12, -BIG, BIG)],  # moves from one side to the other
    ],
)
def test_bands_that_touch_in_one_row(rows):
    bands = Bands(rows)
    assert bands.canonical() == from_dense(bands.to_dense(N, N))[0]


def test_largest_coordinates():
    """Nothing overflows near 2**31."""
    end = BIG
    bands = Bands.from_slices([(0, end)], [(0, end)], "causal")
    assert bands.area() == end * (end + 1) // 2
    assert bands.canonical() == bands
    assert bands.clip(q=(end - 1, end)).data.tolist() == [[end - 1, end, 0, end, 1 - end, 0]]
    far = Bands.from_slices([(end - 4, end)], [(0, 4)], "bi_causal")
    assert far.area() == 4 and far.shift(-(end - 4), 0).to_dense(4, 4).sum() == 4
    near = Bands.from_slices([(0, 4)], [(end - 4, end)], "inv_causal")
    assert near.area() == 10
    assert Bands([(0, end, 0, end, -BIG - 1, BIG)]).area() == end * end
    assert Bands.from_slices(*bands.to_slices()) == bands


def test_empty_lists():
    for empty in (Bands(), Bands([]), Bands(np.zeros((0, 6), np.int64)), Bands.from_slices([], [])):
        assert len(empty) == 0 and empty.area() == 0 and empty.canonical() == empty
        assert len(empty.to_slices().mask_types) == 0 and empty.clip(q=(0, 3)) == empty
        assert empty.to_dense(2, 3).shape == (2, 3)
    assert Bands.from_slices([(3, 3)], [(0, 9)]) == Bands()


def test_immutable():
    source = np.array([[0, 4, 0, 4, -3, 3]], np.int32)
    bands = Bands(source)
    source[:] = 0
    assert bands.area() == 16
    with pytest.raises(ValueError, match="read-only"):
        bands.data[0, 0] = 1


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Bands([[-1, 1, 0, 2, 0, 0]]), ValueError, "row 0 and column 0 or later, got q0 -1"),
        (lambda: Bands([[0, 1, 2]]), ValueError, r"data must have shape \(n, 6\)"),
        (lambda: Bands(np.zeros((1, 6))), TypeError, "data must hold integers"),
        (lambda: Bands([[0, 1, 0, 2**31, 0, 0]]), ValueError, "fit int32"),
        (lambda: Bands([[0, 10**30, 0, 1, 0, 0]]), TypeError, "data must hold integers"),
        (lambda: Bands.from_slices([(0, 4)], [(0, 4), (4, 8)]), ValueError, "k_ranges must have as many ranges"),
        (lambda: Bands.from_slices([(4, 2)], [(0, 4)]), ValueError, r"q_ranges\[0\] must satisfy 0 <= start <= end"),
        (lambda: Bands.from_slices([(0, 2)], [(-1, 4)]), ValueError, r"k_ranges\[0\] must satisfy 0 <= start <= end"),
        (lambda: Bands.from_slices([(0, 2)], [(0, 4)], [5]), ValueError, "0, 1, 2 or 3"),
        (lambda: Bands.from_slices([(0, 2.5)], [(0, 4)]), TypeError, "q_ranges must hold integers"),
        (lambda: Bands([[0, 4, 0, 4, -3, 3]]).shift(-1, 0), ValueError, "dq must keep rows"),
        (lambda: Bands([[0, 4, 0, 4, -3, 3]]).shift(0, BIG), ValueError, "dk must keep columns"),
        (lambda: Bands([[0, 4, 0, 4, -3, 3]]).shift(0.5), TypeError, "dq must be an integer"),
        (lambda: Bands().to_counts(-1, 4), ValueError, "total_q must be at least 0"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("shape", ["begin", "end"])
def test_many_bands_that_are_live_at_once_take_no_quadratic_time(shape):
    n = 60_000
    rows = np.zeros((n, 6), np.int64)
    rows[:, 2] = 2 * np.arange(n)  # one column each, with a gap: nothing is fused
    rows[:, 3] = rows[:, 2] + 1
    rows[:, 0], rows[:, 1] = (np.arange(n), n) if shape == "begin" else (0, 1 + np.arange(n))
    rows[:, 4], rows[:, 5] = -BIG, BIG
    bands = Bands(rows)
    start = time.process_time()
    assert len(bands.canonical()) == n
    assert time.process_time() - start < 10, "a look at every live band in every row takes minutes"
