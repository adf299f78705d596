"""Two levels of links: the results of one level, with fewer rows between nodes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from magi_comm import (
    Communicator,
    CountingCommunicator,
    RangeExchange,
    TwoLevelCommunicator,
    TwoLevelExchange,
    as_communicator,
    group_cast,
    make_exchange,
)
from magi_comm.testing import RankFailure, ThreadWorld, process_pool, random_transfers
from torch.distributed.device_mesh import DeviceMesh

INF = float("inf")
GRIDS = [(1, 1), (1, 3), (3, 1), (2, 2), (2, 3), (3, 2)]


def grid_of(comm, nodes: int, width: int) -> TwoLevelCommunicator:
    """The communicator of a grid, with the traffic between nodes counted."""
    groups = [comm.new_group([a * width + i for a in range(nodes)]) for i in range(width)]
    inter = next(g for g in groups if g is not None)
    groups = [comm.new_group([a * width + i for i in range(width)]) for a in range(nodes)]
    intra = next(g for g in groups if g is not None)
    return TwoLevelCommunicator(comm, CountingCommunicator(inter), intra)


def rows_of(seed: int, count: int, width: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, *width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


cases = st.tuples(st.sampled_from(GRIDS), st.integers(0, 2**32 - 1), st.sampled_from([0, 3, 40]),
                  st.sampled_from([0.0, 0.4, 1.0]), st.booleans())  # fmt: skip


def transfers_of(case):
    (nodes, width), seed, longest, density, overlap = case
    return nodes, width, random_transfers(seed, nodes * width, longest, density, overlap=overlap)


def exchange_of(comm, plan, gather: bool = True) -> TwoLevelExchange:
    rank = comm.rank
    sends = None if gather else [plan.send(r) for r in range(plan.world_size)]
    return TwoLevelExchange(comm, plan.recv[rank], plan.send(rank), num_local=plan.sizes[rank], sends=sends)


@given(case=cases, gather=st.booleans(), given_out=st.booleans())
def test_cast_equals_one_level_and_crosses_once_per_node(case, gather, given_out):
    nodes, width, plan = transfers_of(case)

    def main(comm):
        grid = grid_of(comm, nodes, width)
        k = rows_of(comm.rank, plan.sizes[comm.rank], (2, 3), torch.bfloat16)
        v = rows_of(50 + comm.rank, plan.sizes[comm.rank], (5,), torch.float64)
        one = RangeExchange(comm, plan.recv[comm.rank], plan.send(comm.rank)).cast((k, v)).wait()
        exchange = exchange_of(grid, plan, gather)
        grid.inter.reset()
        out = [torch.empty(x.shape, dtype=x.dtype) for x in one] if given_out else None
        two = exchange.cast((k, v), out=out, async_op=True).wait()
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
        distinct = 0
        for a in range(nodes):
            if a != grid.inter.rank:
                targets = range(a * width, (a + 1) * width)
                distinct += len({i for t in targets for b, e in plan.moves[comm.rank][t] for i in range(b, e)})
        assert grid.inter.total.tokens_sent == distinct

    ThreadWorld(nodes * width).run(main)


@given(case=cases, op=st.sampled_from(["sum", "avg"]), into_dtype=st.sampled_from([torch.bfloat16, torch.float64]))
def test_reduce_equals_one_level(case, op, into_dtype):
    nodes, width, plan = transfers_of(case)

    def main(comm):
        partials = rows_of(comm.rank, plan.num_recv(comm.rank), (3,), torch.float64)
        own = rows_of(100 + comm.rank, plan.sizes[comm.rank], (3,), into_dtype)
        one, two = own.clone(), own.clone()
        RangeExchange(comm, plan.recv[comm.rank], plan.send(comm.rank)).reduce(partials, one, op).wait()
        exchange = exchange_of(grid_of(comm, nodes, width), plan)
        assert exchange.reduce(partials, two, op, async_op=True).wait() is two
        again = own.clone()
        exchange.reduce(partials, again, op).wait()
        assert torch.equal(two, again)
        return one, two

    for one, two in ThreadWorld(nodes * width).run(main):
        tolerance = {"rtol": 1e-12, "atol": 1e-12} if into_dtype == torch.float64 else {}
        torch.testing.assert_close(two, one, **tolerance)


@given(case=cases)
def test_reduce_lse_equals_one_level(case):
    nodes, width, plan = transfers_of(case)

    def states(seed: int, count: int):
        lse = rows_of(seed + 1, count, (2,), torch.float64)
        nothing = torch.rand(lse.shape, generator=torch.Generator().manual_seed(seed)) < 0.4
        out = rows_of(seed, count, (2, 3), torch.float64).masked_fill(nothing.unsqueeze(-1), 0.0)
        return out, lse.masked_fill(nothing, -INF)

    def main(comm):
        partials = states(2 * comm.rank, plan.num_recv(comm.rank))
        own = states(1000 + 2 * comm.rank, plan.sizes[comm.rank])
        one, two = [x.clone() for x in own], [x.clone() for x in own]
        RangeExchange(comm, plan.recv[comm.rank], plan.send(comm.rank)).reduce(partials, one, "lse").wait()
        exchange_of(grid_of(comm, nodes, width), plan).reduce(partials, two, "lse").wait()
        return one, two

    for one, two in ThreadWorld(nodes * width).run(main):
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def test_relays_sum_in_float32_and_send_in_the_wire_dtype():
    """Three ranks of node 1 each return 1 to a row that holds 256 there: summed in bfloat16 it would stay 256."""

    def main(comm):
        send = [(r, 0, 1) for r in (3, 4, 5)] if comm.rank == 0 else []
        recv = [(0, 0, 1)] if comm.rank >= 3 else []
        exchange = TwoLevelExchange(grid_of(comm, 2, 3), recv, send)
        value = 256.0 if comm.rank == 3 else 2.0
        into = torch.zeros(1, 1)
        exchange.reduce(torch.full((len(recv), 1), value, dtype=torch.bfloat16), into).wait()
        return into.item()

    assert ThreadWorld(6).run(main)[0] == 260.0


def test_make_exchange_takes_two_levels_only_where_there_are_two():
    def main(comm):
        kinds = []
        for nodes, width in ((1, 4), (4, 1), (2, 2)):
            grid = grid_of(comm, nodes, width)
            kinds.append(type(make_exchange(grid, [], [])).__name__)
        return [*kinds, type(make_exchange(comm, [], [])).__name__]

    expected = ["RangeExchange", "RangeExchange", "TwoLevelExchange", "RangeExchange"]
    assert ThreadWorld(4).run(main) == [expected] * 4


def wrong_grid(comm):
    TwoLevelCommunicator(comm, comm.new_group(list(range(comm.size))), comm.new_group([comm.rank]))
    TwoLevelCommunicator(comm, comm, comm)


def not_a_grid(comm):
    TwoLevelExchange(comm, [], [])


def foreign_sends(comm):
    TwoLevelExchange(grid_of(comm, 2, 2), [], [], sends=[[]] * 3)


def short_recv(comm):
    send = [(3, 0, 2)] if comm.rank == 0 else []
    TwoLevelExchange(grid_of(comm, 2, 2), [(0, 0, 1)] if comm.rank == 3 else [], send)


@pytest.mark.parametrize(
    ("main", "message"),
    [
        (wrong_grid, r"flat must be the grid of inter x intra \(4 x 4, this rank \d+\), got rank"),
        (not_a_grid, "group must be a TwoLevelCommunicator or a mesh .*, got ThreadCommunicator"),
        (foreign_sends, "sends must hold the rows of each of the 4 ranks"),
        (short_recv, "rank 3 of 4: recv expects 1 rows, the sends of its node give 2"),
    ],
)
def test_mistakes_are_named(main, message):
    with pytest.raises(RankFailure, match=message):
        ThreadWorld(4).run(main)


def on_mesh(comm, seed: int):
    mesh = DeviceMesh("cpu", torch.arange(8).reshape(2, 4))
    grid = as_communicator(mesh)
    assert isinstance(grid, Communicator)
    assert isinstance(grid, TwoLevelCommunicator)
    assert as_communicator(mesh) is grid
    part = DeviceMesh("cpu", torch.arange(8).reshape(2, 2, 2), mesh_dim_names=("dp", "inter", "intra"))
    half = as_communicator(part["inter", "intra"])
    assert (half.size, half.rank) == (4, comm.rank % 4)
    with pytest.raises(ValueError, match="mesh must have mesh_dim_names where it is not the default group in order"):
        as_communicator(DeviceMesh("cpu", torch.arange(8).flip(0).reshape(2, 4)))
    x = torch.full((2, 3), comm.rank)
    halves = group_cast(x, None, [2], [2], [[(half.rank + 1) % 4]], [(half.rank - 1) % 4], half).wait_post_process()
    assert (halves == comm.rank // 4 * 4 + (half.rank - 1) % 4).all()
    plan = random_transfers(seed, 8, 30, 0.6)
    k = rows_of(comm.rank, plan.sizes[comm.rank], (2, 3), torch.bfloat16)
    exchange = make_exchange(grid, plan.recv[comm.rank], plan.send(comm.rank))
    assert isinstance(exchange, TwoLevelExchange)
    first, second = exchange.cast(k, async_op=True), exchange.cast(k + 1, async_op=True)
    got = first.wait()
    into = torch.zeros(k.shape, dtype=torch.float64)
    exchange.reduce(second.wait(), into).wait()
    one = RangeExchange(comm, plan.recv[comm.rank], plan.send(comm.rank))
    exact = torch.zeros(k.shape, dtype=torch.float64)
    one.reduce(one.cast(k + 1).wait(), exact).wait()
    return got, one.cast(k).wait(), into, exact


def test_meshes_of_gloo_processes():
    for got, expected, into, exact in process_pool(8).run(on_mesh, 5, timeout_s=30):
        assert torch.equal(got, expected)
        torch.testing.assert_close(into, exact, rtol=2**-7, atol=2**-6)  # the relays' sums travel in bfloat16
