"""`RangeExchange` against a brute-force oracle, on worlds of threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from magi_comm.range_exchange import RangeExchange
from magi_comm.testing import RankFailure, ThreadWorld, Transfers, random_transfers


def plans(max_world: int = 5, overlap: bool = False):
    return st.builds(
        random_transfers,
        st.integers(0, 2**32 - 1),
        st.integers(1, max_world),
        st.sampled_from([0, 1, 7, 40, 300]),
        st.sampled_from([0.0, 0.3, 1.0]),
        overlap=st.just(overlap),
    )


def exchange_of(comm, plan: Transfers) -> RangeExchange:
    rank = comm.rank
    return RangeExchange(comm, plan.recv[rank], plan.send(rank), num_local=plan.sizes[rank])


def local_rows(rank: int, size: int, width: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, *width, generator=generator, dtype=torch.float64).to(dtype)


@given(plan=plans(), dtypes=st.lists(st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.int32]),
                                     min_size=1, max_size=3), asynchronous=st.booleans())  # fmt: skip
def test_cast_gives_the_ranges_in_the_order_of_recv(plan, dtypes, asynchronous):
    widths = [(3,), (2, 5), ()]
    inputs = [
        [local_rows(10 * i + r, size, widths[i], d) for i, d in enumerate(dtypes)] for r, size in enumerate(plan.sizes)
    ]

    def main(comm):
        exchange = exchange_of(comm, plan)
        exchange.verify()
        given = inputs[comm.rank][0] if len(dtypes) == 1 else inputs[comm.rank]
        result = exchange.cast(given, async_op=asynchronous).wait()
        return [result] if len(dtypes) == 1 else list(result)

    results = ThreadWorld(plan.world_size).run(main)
    for r in range(plan.world_size):
        for i in range(len(dtypes)):
            expected = torch.cat([inputs[r][i][:0], *(inputs[s][i][a:b] for s, a, b in plan.recv[r])])
            assert results[r][i].is_contiguous()
            assert torch.equal(results[r][i], expected)


@given(plan=plans(overlap=True), dtype=st.sampled_from([torch.bfloat16, torch.float32]),
       into_dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))  # fmt: skip
def test_reduce_sums_own_rows_first_then_sources_by_rank_bit_for_bit(plan, dtype, into_dtype):
    n = plan.world_size
    partials = [local_rows(100 + r, sum(b - a for _, a, b in plan.recv[r]), (2, 3), dtype) for r in range(n)]
    own = [local_rows(r, plan.sizes[r], (2, 3), into_dtype) for r in range(n)]
    expected = [x.to(torch.float64 if into_dtype == torch.float64 else torch.float32) for x in own]
    expected = [x.clone() for x in expected]
    for r in range(n):
        position = dict.fromkeys(range(n), 0)
        streams: dict[int, list[torch.Tensor]] = {s: [] for s in range(n)}
        offset = 0
        for s, a, b in plan.recv[r]:
            streams[s].extend(partials[r][offset : offset + b - a])
            offset += b - a
        for s in range(n):
            for a, b in plan.moves[s][r]:
                for row in range(a, b):  # r ascending in the outer loop: ascending source at the owner
                    expected[s][row] += streams[s][position[s]].to(expected[s].dtype)
                    position[s] += 1

    def main(comm):
        into = own[comm.rank].clone()
        result = exchange_of(comm, plan).reduce(partials[comm.rank], into, async_op=True).wait()
        assert result is into
        return into

    for got, exact in zip(ThreadWorld(n).run(main), expected, strict=True):
        assert torch.equal(got, exact.to(into_dtype))


@given(plan=plans())
def test_reduce_is_the_transpose_of_cast(plan):
    """sum over ranks of <cast(x), y> equals <x, reduce(y)>."""

    def main(comm):
        x = local_rows(comm.rank, plan.sizes[comm.rank], (4,), torch.float64)
        exchange = exchange_of(comm, plan)
        received = exchange.cast(x).wait()
        y = local_rows(50 + comm.rank, exchange.num_recv, (4,), torch.float64)
        into = torch.zeros_like(x)
        exchange.reduce(y, into).wait()
        return (received * y).sum().item(), (x * into).sum().item()

    results = ThreadWorld(plan.world_size).run(main)
    assert sum(a for a, _ in results) == pytest.approx(sum(b for _, b in results), rel=1e-12, abs=1e-12)


@given(plan=plans(), empty=st.floats(0, 1))
def test_reduce_lse_equals_logsumexp_in_float64(plan, empty):
    n, heads, dim = plan.world_size, 2, 3

    def states(seed: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        out = local_rows(seed, rows, (heads, dim), torch.float64)
        lse = 5 * local_rows(seed + 1, rows, (heads,), torch.float64)
        nothing = torch.rand(lse.shape, generator=torch.Generator().manual_seed(seed)) < empty
        out[nothing] = float("nan")  # never to be read
        return out, lse.masked_fill(nothing, float("-inf"))

    own = [states(2 * r, plan.sizes[r]) for r in range(n)]
    parts = [states(1000 + 2 * r, sum(b - a for _, a, b in plan.recv[r])) for r in range(n)]
    collected: list[list[list[tuple[torch.Tensor, torch.Tensor]]]] = [
        [[(own[r][0][i], own[r][1][i])] for i in range(plan.sizes[r])] for r in range(n)
    ]
    for r in range(n):
        streams: dict[int, list[int]] = {s: [] for s in range(n)}
        offset = 0
        for s, a, b in plan.recv[r]:
            streams[s].extend(range(offset, offset + b - a))
            offset += b - a
        for s in range(n):
            rows = iter(streams[s])
            for a, b in plan.moves[s][r]:
                for row in range(a, b):
                    j = next(rows)
                    collected[s][row].append((parts[r][0][j], parts[r][1][j]))

    def main(comm):
        into = tuple(x.clone() for x in own[comm.rank])
        return exchange_of(comm, plan).reduce(parts[comm.rank], into, "lse").wait()

    for r, (out, lse) in enumerate(ThreadWorld(n).run(main)):
        for i in range(plan.sizes[r]):
            outs = torch.stack([o for o, _ in collected[r][i]])
            lses = torch.stack([x for _, x in collected[r][i]])
            whole = torch.logsumexp(lses, 0)
            torch.testing.assert_close(lse[i], whole, rtol=1e-12, atol=1e-12)
            if len(collected[r][i]) == 1:
                continue  # nothing reached this row: it is as it was
            weights = torch.where(lses == float("-inf"), 0.0, (lses - whole).exp()).unsqueeze(-1)
            exact = torch.where(weights == 0, 0.0, weights * outs).sum(0)
            torch.testing.assert_close(out[i], exact, rtol=1e-11, atol=1e-12)


def test_partials_travel_in_wire_dtype_and_are_summed_in_float32():
    def main(comm):
        n = comm.size
        exchange = RangeExchange(comm, [(0, 0, 1)], [(r, 0, 1) for r in range(n)] if comm.rank == 0 else [])
        into = torch.zeros(1, 1, dtype=torch.float32)
        exchange.reduce(torch.full((1, 1), 1 + 2.0**-10), into, wire_dtype=torch.bfloat16).wait()
        exact = torch.zeros(1, 1, dtype=torch.float32)
        exchange.reduce(torch.full((1, 1), 1 + 2.0**-10), exact).wait()
        return into.item(), exact.item()

    assert ThreadWorld(3).run(main)[0] == (3.0, 3 + 3 * 2.0**-10)


def test_low_precision_is_not_accumulated_in_low_precision():
    def main(comm):
        exchange = RangeExchange(comm, [(0, 0, 1)], [(r, 0, 1) for r in range(comm.size)] if comm.rank == 0 else [])
        into = torch.full((1, 1), 256.0, dtype=torch.bfloat16)
        return exchange.reduce(torch.ones(1, 1, dtype=torch.bfloat16), into).wait().item()

    assert ThreadWorld(4).run(main)[0] == 260.0  # 256 + 1 rounds to 256 in bfloat16, four times


def test_several_exchanges_in_flight_may_be_waited_for_in_any_order():
    def main(comm):
        other = 1 - comm.rank
        exchange = RangeExchange(comm, [(other, 0, 3)], [(other, 0, 3)])
        works = [exchange.cast(torch.full((3, 2), 10.0 * i + comm.rank), async_op=True) for i in range(4)]
        return [works[i].wait()[0, 0].item() for i in (2, 0, 3, 1)]

    assert ThreadWorld(2).run(main) == [[21.0, 1.0, 31.0, 11.0], [20.0, 0.0, 30.0, 10.0]]


def test_cast_into_a_given_buffer_leaves_the_rest_alone():
    def main(comm):
        other = 1 - comm.rank
        exchange = RangeExchange(comm, [(other, 0, 2)], [(other, 1, 3)])
        out = torch.full((4, 1), -1.0)
        exchange.cast(torch.arange(3.0)[:, None] + 10 * comm.rank, out=out).wait()
        return out.flatten().tolist()

    assert ThreadWorld(2).run(main) == [[11.0, 12.0, -1.0, -1.0], [1.0, 2.0, -1.0, -1.0]]


def test_strided_inputs_and_empty_features():
    def main(comm):
        other = 1 - comm.rank
        exchange = RangeExchange(comm, [(other, 0, 4)], [(other, 0, 2), (other, 3, 5)])
        wide = torch.arange(60.0).reshape(2, 5, 6).transpose(0, 1)[:, :, ::2] + 100 * comm.rank
        k, nothing = exchange.cast((wide, torch.ones(5, 0, 3))).wait()
        return k, nothing.shape, wide

    results = ThreadWorld(2).run(main)
    for r in range(2):
        k, shape, _ = results[r]
        assert torch.equal(k, results[1 - r][2][[0, 1, 3, 4]])
        assert shape == (4, 0, 3)


@pytest.mark.parametrize(
    ("recv", "send", "error", "message"),
    [
        ([(2, 0, 1)], [], ValueError, r"rank 0 of 2: recv\[0\] must be \(rank in \[0, 2\).*got \(2, 0, 1\)"),
        ([(1, 3, 1)], [], ValueError, r"recv\[0\] must be .*start <= end.*got \(1, 3, 1\)"),
        ([], [(1, -1, 1)], ValueError, r"send\[0\] must be .*got \(1, -1, 1\)"),
        ([], [(1, 0, 9)], ValueError, r"send must stay inside the 5 local rows, got range \[0, 9\) to rank 1"),
        ([], [(0, 0, 1)], ValueError, r"send gives 1 rows to this rank itself, recv expects 0"),
        ([[1, 2]], [], ValueError, r"recv must be \(n, 3\) rows .*got shape \(1, 2\)"),
        ([(1.0, 0.0, 2.0)], [], TypeError, r"recv must hold integers, got dtype float64"),
    ],
)
def test_a_wrong_plan_is_refused_at_once(recv, send, error, message):
    comm = ThreadWorld(2).comms[0]
    with pytest.raises(error, match=message):
        RangeExchange(comm, recv, send, num_local=5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda e: e.cast(torch.ones(4, 1)),
            ValueError,
            r"rank 0 of 1: tensors\[0\] must have 5 local rows, got shape",
        ),
        (lambda e: e.cast([]), ValueError, "tensors must hold at least one tensor"),
        (lambda e: e.cast([torch.ones(5), 3]), TypeError, r"tensors\[1\] must be a tensor, got int"),
        (lambda e: e.cast(torch.ones(5, 1), out=torch.ones(5, 2)), ValueError, r"out\[0\] must have at least 2 rows"),
        (lambda e: e.cast(torch.ones(5, 1), out=torch.ones(5, 1).int()), ValueError, r"out\[0\] must have the dtype"),
        (lambda e: e.reduce(torch.ones(3, 1), torch.ones(5, 1)), ValueError, r"partials\[0\] must have one row per"),
        (lambda e: e.reduce(torch.ones(2, 1), torch.ones(4, 1)), ValueError, r"into\[0\] must have at least 5 rows"),
        (lambda e: e.reduce(torch.ones(2, 1), torch.ones(6, 1)), ValueError, r"into must have 5 local rows, got \[6\]"),
        (lambda e: e.reduce(torch.ones(2, 1).int(), torch.ones(5, 1)), TypeError, r"partials\[0\] must be of a float"),
        (lambda e: e.reduce(torch.ones(2, 1), torch.ones(5, 1), "max"), ValueError, "op must be one of sum, avg, lse"),
        (lambda e: e.reduce(torch.ones(2, 1), torch.ones(5, 1), "lse"), ValueError, r"must be the pair \(out, lse\)"),
        (lambda e: e.reduce(torch.ones(2, 1), (torch.ones(5, 1),)), TypeError, "must both be tensors or both be seq"),
        (lambda e: e.reduce(torch.ones(2, 1), torch.ones(5, 1), wire_dtype=torch.int8), TypeError, "wire_dtype must"),
        (lambda e: e.cast(torch.ones(5, 1), outputs=None), TypeError, "unexpected keyword argument 'outputs'"),
    ],
)
def test_wrong_tensors_are_refused_by_name(call, error, message):
    exchange = RangeExchange(ThreadWorld(1).comms[0], [(0, 0, 2)], [(0, 1, 3)], num_local=5)
    with pytest.raises(error, match=message):
        call(exchange)


def test_verify_names_the_pair_that_disagrees():
    def main(comm):
        recv = [(0, 0, 3)] if comm.rank == 1 else []
        send = [(1, 0, 2)] if comm.rank == 0 else []
        RangeExchange(comm, recv, send).verify()

    with pytest.raises(RankFailure, match="send of rank 0 gives 2 rows to rank 1, whose recv expects 3"):
        ThreadWorld(2).run(main)


@settings(max_examples=5)
@given(plan=plans(max_world=8))
def test_a_short_and_a_long_way_through_the_rows_agree(plan):
    """Slice copies and index copies are the same map."""
    from magi_comm import rows

    def main(comm):
        x = local_rows(comm.rank, plan.sizes[comm.rank], (3,), torch.float32)
        exchange = exchange_of(comm, plan)
        received = exchange.cast(x).wait()
        return received, exchange.reduce(received, x.clone()).wait()

    results = []
    for least in (0, 10**9):
        rows._LONG_RUN["cpu"], before = least, rows._LONG_RUN["cpu"]
        try:
            results.append(ThreadWorld(plan.world_size).run(main))
        finally:
            rows._LONG_RUN["cpu"] = before
    for a, b in zip(*results, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
