"""Range operators against loops over rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from magi_comm import range_fill_, range_gather, range_reduce, rows

INF = float("inf")


@pytest.fixture(params=["short", "long"], autouse=True)
def way(request, monkeypatch):
    """Both ways through the rows: index tensors, and slices."""
    monkeypatch.setitem(rows._LONG_RUN, "cpu", 10**9 if request.param == "short" else 0)


@st.composite
def range_lists(draw, size: int = 23):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    bounds = np.sort(rng.integers(0, size + 1, (draw(st.integers(0, 6)), 2)), axis=1)
    return [tuple(int(x) for x in pair) for pair in bounds], rng


def values(rng, *shape, dtype=torch.float64):
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


@given(case=range_lists(), dim=st.integers(-2, 1), form=st.sampled_from(["list", "int32", "int64"]))
def test_gather(case, dim, form):
    ranges, rng = case
    x = values(rng, *((23, 4) if dim % 2 == 0 else (4, 23)))
    given_ranges = ranges if form == "list" else torch.tensor(ranges, dtype=getattr(torch, form)).reshape(-1, 2)
    got = range_gather(x, given_ranges, dim)
    indices = [i for a, b in ranges for i in range(a, b)]
    assert torch.equal(got, x.index_select(dim, torch.tensor(indices, dtype=torch.int64)))
    if dim % 2 == 0:
        out = torch.empty(len(indices), 4, dtype=torch.float64)
        assert range_gather(x, given_ranges, output=out) is out
        assert torch.equal(out, got)


@given(case=range_lists(), dim=st.integers(0, 1))
def test_fill(case, dim):
    ranges, rng = case
    x = values(rng, *((23, 4) if dim == 0 else (4, 23)))
    expected = x.clone()
    for a, b in ranges:
        expected.narrow(dim, a, b - a).fill_(-1.5)
    assert range_fill_(x, ranges, -1.5, dim) is x
    assert torch.equal(x, expected)


REDUCE_DTYPES = [(torch.float64,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.bfloat16)]


@given(
    case=range_lists(),
    dim=st.integers(0, 1),
    op=st.sampled_from(["sum", "avg"]),
    accumulates=st.booleans(),
    dtypes=st.sampled_from(REDUCE_DTYPES),
)
def test_reduce_in_the_order_of_the_ranges_bit_for_bit(case, dim, op, accumulates, dtypes):
    ranges, rng = case
    starts = [int(rng.integers(0, 15 - (b - a) + 1)) if b - a <= 15 else None for a, b in ranges]
    pairs = [(r, s) for r, s in zip(ranges, starts, strict=True) if s is not None]
    input_ranges = [r for r, _ in pairs]
    output_ranges = [(s, s + b - a) for (a, b), s in pairs]
    x, out = values(rng, 23, 3, dtype=dtypes[0]), values(rng, 15, 3, dtype=dtypes[1])
    wide = torch.promote_types(torch.float32, torch.promote_types(*dtypes))
    expected, count = out.to(wide), [0] * 15
    for j in range(15):
        received = [
            x[a + j - c].to(wide) for (a, _), (c, d) in zip(input_ranges, output_ranges, strict=True) if c <= j < d
        ]
        if not received:
            continue
        total = expected[j] if accumulates else torch.zeros_like(expected[j])
        for row in received:
            total = total + row
        count[j] = len(received)
        expected[j] = total / (count[j] + accumulates) if op == "avg" else total
    if dim == 1:
        x, out = x.T, out.T
    got = range_reduce(x, out, input_ranges, output_ranges, dim, reduce_op=op, acc_reduce=accumulates)
    assert got is out
    assert torch.equal(out if dim == 0 else out.T, expected.to(dtypes[1]))


def test_reduce_lse_merges_states_and_two_empty_ones_to_nothing():
    x = torch.tensor([[[1.0]], [[3.0]], [[float("nan")]]])
    x_lse = torch.tensor([[0.0], [0.0], [-INF]])
    out, lse = torch.full((3, 1, 1), float("nan")), torch.full((3, 1), -INF)
    got = range_reduce(x, out, [(0, 1), (1, 2), (2, 3)], [(0, 1), (0, 1), (1, 2)], reduce_op="lse",
                       input_lse=x_lse, output_lse=lse)  # fmt: skip
    assert got[0] is out
    assert got[1] is lse
    torch.testing.assert_close(lse, torch.tensor([[np.log(2.0)], [-INF], [-INF]], dtype=torch.float32))
    torch.testing.assert_close(out[:2], torch.tensor([[[2.0]], [[0.0]]]))
    assert out[2].isnan().all()  # no range covers it


def test_no_ranges_is_a_no_op():
    x = torch.arange(3.0)
    assert range_gather(x, []).shape == (0,)
    assert torch.equal(range_fill_(x.clone(), torch.empty(0, 2, dtype=torch.int32), 1.0), x)
    assert torch.equal(range_reduce(x, x.clone(), [], []), x)


def test_precomputed_hints_are_accepted():
    x = torch.arange(6.0)
    hints = {
        "cu_range_sizes": torch.tensor([0, 2, 3]),
        "total_size": 3,
        "row_map": torch.tensor([0, 0, 1]),
    }
    assert range_gather(x, [(0, 2), (4, 5)], kernel_backend="per_row", **hints).tolist() == [0.0, 1.0, 4.0]
    range_fill_(x, [(0, 2), (4, 5)], 9.0, **hints)
    assert x.tolist() == [9.0, 9.0, 2.0, 3.0, 9.0, 5.0]
    assert range_reduce(x, torch.zeros(3), [(0, 2), (4, 5)], [(0, 2), (0, 1)], **hints).tolist() == [18.0, 9.0, 0.0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x: range_gather(x, [(0, 7)]),
            ValueError,
            r"range_gather: ranges\[0\] must lie in \[0, 6\) .* \[0, 7\)",
        ),
        (lambda x: range_gather(x, [(3, 2)]), ValueError, r"ranges\[0\] must lie in .* got \[3, 2\)"),
        (lambda x: range_gather(x, [(0.0, 2.0)]), TypeError, "ranges must hold integers, got float64"),
        (lambda x: range_gather(x, [1, 2]), ValueError, r"ranges must be \(N, 2\) pairs .*, got shape \(2,\)"),
        (lambda x: range_gather(x, [(0, 1)], 1), ValueError, r"dim must be a tensor dim of input \(1-d\), got 1"),
        (lambda x: range_gather(x[None], [(0, 1)], 1, x), ValueError, "output can be given for dim=0 only, got dim=1"),
        (lambda x: range_gather(x, [(0, 1)], output=x), ValueError, r"output must be \(1,\) torch.float32 on cpu, got"),
        (lambda x: range_gather(x, [(0, 1)], total_size=2), ValueError, "total_size must be the 1 rows of the ranges"),
        (lambda x: range_gather(x, [(0, 1)], row_map=3), ValueError, "row_map must be a tensor of 1 elements, got int"),
        (
            lambda x: range_gather(x, [], kernel_backend="x"),
            ValueError,
            "kernel_backend must be 'per_row', 'per_range'",
        ),
        (lambda x: range_gather(x, [], block=1), TypeError, "unexpected keyword argument 'block'"),
        (lambda x: range_gather(3, []), TypeError, "input must be a tensor, got int"),
        (lambda x: range_fill_(x, [(0, 7)], 1.0), ValueError, r"range_fill_: ranges\[0\] must lie in \[0, 6\)"),
        (lambda x: range_fill_(x, [], torch.ones(2)), ValueError, "val must be a number, got a tensor of shape"),
        (lambda x: range_reduce(x, x, [(0, 2)], [(0, 1)]), ValueError, "must pair ranges of equal length, got lengths"),
        (lambda x: range_reduce(x, x[None], [], []), ValueError, "output must have the shape of input but for dim 0"),
        (lambda x: range_reduce(x, 3, [], []), TypeError, "output must be a tensor, got int"),
        (lambda x: range_reduce(x, x.int(), [], []), TypeError, "input and output must be floating, got torch.float32"),
        (lambda x: range_reduce(x, x, [], [], reduce_op="max"), ValueError, "reduce_op must be one of sum, avg, lse"),
        (lambda x: range_reduce(x, x, [], [], reduce_op="lse"), ValueError, r"'lse' needs \(rows, heads, head_dim\)"),
        (lambda x: range_reduce(x, x, [], [], reduce_dtype=torch.int8), TypeError, "reduce_dtype must be a floating"),
        (
            lambda x: range_reduce(x, x, [], [], input_lse=x),
            ValueError,
            "input_lse and output_lse need reduce_op='lse'",
        ),
        (lambda x: range_reduce(x, x, [], [], deterministic=1), TypeError, "deterministic must be a bool, got int"),
    ],
)
def test_wrong_arguments_are_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.arange(6.0))
