"""The same collectives over real gloo processes, from one persistent pool."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from magi_comm import GroupCommunicator, RangeExchange, as_communicator, group_cast, group_reduce
from magi_comm.testing import ProcessPool, RankFailure, ThreadWorld, process_pool
from torch.distributed.device_mesh import DeviceMesh

INF = float("inf")


@pytest.fixture(scope="module")
def pool():
    return process_pool(8)


def every_collective(comm, seed: int):
    """Casts, reductions and the rest on one random plan; the results are compared between worlds."""
    n, rank = comm.size, comm.rank
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 40, n)
    moves = [
        [np.sort(rng.integers(0, sizes[s] + 1, (rng.integers(0, 4), 2)), axis=1) for _ in range(n)] for s in range(n)
    ]
    send = [(r, int(a), int(b)) for r in range(n) for a, b in moves[rank][r]]
    recv = [(s, int(a), int(b)) for s in range(n) for a, b in moves[s][rank]]
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    k = torch.randn(int(sizes[rank]), 2, 8, generator=generator).to(torch.bfloat16)
    v = torch.randn(int(sizes[rank]), 2, 5, generator=generator)
    exchange = RangeExchange(comm, recv, send, num_local=int(sizes[rank]))
    exchange.verify()
    pending = [exchange.cast((k, v), async_op=True), exchange.cast(v, async_op=True)]
    got_v = pending[1].wait()
    got_k, _ = pending[0].wait()
    dk, dv = torch.ones(k.shape), torch.zeros(v.shape, dtype=torch.float64)
    exchange.reduce((got_k, got_v), (dk, dv), async_op=True).wait()
    lse = torch.randn(exchange.num_recv, 2, generator=generator)
    out, out_lse = torch.zeros(v.shape), torch.full(v.shape[:2], -INF)
    exchange.reduce((got_v, lse), (out, out_lse), "lse").wait()
    total = torch.full((3,), 1.0 + rank)
    comm.all_reduce(total, "avg")
    gathered = [torch.empty(2, dtype=torch.bfloat16) for _ in range(n)]
    comm.all_gather(gathered, torch.full((2,), float(rank), dtype=torch.bfloat16))
    word = torch.tensor([rank])
    comm.broadcast(word, n - 1)
    comm.barrier()
    return [got_k, got_v, dk, dv, out, out_lse, total, torch.stack(gathered), word]


@pytest.mark.parametrize("world_size", [1, 2, 4, 8], ids="w{}".format)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_processes_agree_with_threads_bit_for_bit(pool, world_size, seed):
    processes = pool.run(every_collective, seed, world_size=world_size)
    threads = ThreadWorld(world_size).run(every_collective, seed)
    for a, b in zip(processes, threads, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)


def asymmetric(comm):
    """Rank 0 owns nothing, 1 gives to all, 2 only to itself, 3 gives nothing and takes from 1 twice the same."""
    sizes_in = [[], [3, 0, 2], [1, 4], [5]][comm.rank]
    targets = [[], [[0, 1, 3], [2], [3]], [[2], []], [[]]][comm.rank]
    sizes_out, sources = [([3], [1]), ([3], [1]), ([1, 0], [2, 1]), ([2, 3], [1, 1])][comm.rank]
    x = torch.arange(sum(sizes_in), dtype=torch.float32)[:, None] + 100 * comm.rank
    output = torch.full((sum(sizes_out), 1), -1.0)
    got = group_cast(x, output, sizes_in, sizes_out, targets, sources, comm, async_op=True).wait_post_process(output)
    into = torch.full(x.shape, 1000.0)
    ones = torch.ones(sum(sizes_out), 1) * (1 + comm.rank)
    total = group_reduce(ones, into, sizes_out, sizes_in, sources, targets, comm, async_op=True)
    average = group_reduce(ones, into.clone(), sizes_out, sizes_in, sources, targets, comm, reduce_op="avg",
                           acc_reduce=False)  # fmt: skip
    return [t.flatten().tolist() for t in (got, total.wait_post_process(into), average.wait_post_process())]


def test_asymmetric_and_zero_splits_on_four_ranks(pool):
    expected = [
        [[100.0, 101.0, 102.0], [], []],
        [[100.0, 101.0, 102.0], [1007.0] * 3 + [1004.0] * 2, [7 / 3] * 3 + [4.0] * 2],
        [[200.0], [1003.0] + [1000.0] * 4, [3.0] + [0.0] * 4],
        [[100.0, 101.0, 102.0, 103.0, 104.0], [1000.0] * 5, [0.0] * 5],
    ]
    for results in (pool.run(asymmetric, world_size=4), ThreadWorld(4).run(asymmetric)):
        for got, exact in zip(results, expected, strict=True):
            assert got == [pytest.approx(x) for x in exact]


def nothing_at_all(comm):
    exchange = RangeExchange(comm, [], [])
    got = exchange.cast((torch.ones(3, 0), torch.ones(3, 2))).wait()
    into = torch.ones(3, 2)
    exchange.reduce(torch.ones(0, 2), into).wait()
    return [tuple(t.shape) for t in got], into.sum().item()


def test_every_rank_joins_empty_transfers(pool):
    assert pool.run(nothing_at_all, world_size=4) == [([(0, 0), (0, 2)], 6.0)] * 4


def on_mesh_axes(comm):
    """Two groups at once: a 2 x 4 mesh, casts along both axes, neither is the world."""
    mesh = DeviceMesh("cpu", torch.arange(8).reshape(2, 4), mesh_dim_names=("dp", "cp"))
    results = []
    for axis in ("dp", "cp"):
        axis_comm = as_communicator(mesh[axis])
        assert isinstance(axis_comm, GroupCommunicator)
        assert as_communicator(mesh.get_group(axis)) is axis_comm
        peer = (axis_comm.rank + 1) % axis_comm.size
        source = (axis_comm.rank - 1) % axis_comm.size
        x = torch.tensor([[comm.rank]])
        got = group_cast(x, None, [1], [1], [[peer]], [source], mesh[axis]).wait_post_process()
        word = torch.tensor([comm.rank])
        axis_comm.broadcast(word, 1)
        results += [got.item(), word.item()]
    return results


def test_groups_that_are_not_the_world(pool):
    results = pool.run(on_mesh_axes)
    for r, got in enumerate(results):
        row, column = divmod(r, 4)
        assert got == [(1 - row) * 4 + column, 4 + column, row * 4 + (column - 1) % 4, row * 4 + 1]


def refused_locally(comm):
    if comm.rank == 1:
        group_cast(torch.ones(2), None, [1], [2], [[0]], [0], comm)
    comm.barrier()


def test_a_wrong_argument_is_reported_by_its_rank_while_the_others_wait(pool):
    with pytest.raises(
        RankFailure, match=r"rank 1 of 2: group_cast: input must have sum\(input_split_sizes\) = 1 rows"
    ) as e:
        pool.run(refused_locally, world_size=2)
    assert e.value.rank == 1
    assert isinstance(e.value.__cause__, ValueError)
    assert "in refused_locally" in e.value.details


def is_running(process: int) -> bool:
    """Whether it exists and is no zombie (an orphan's exit may wait for the init process to notice)."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def die(comm):
    if comm.rank == 1:
        os._exit(7)
    return comm.rank


def sleep_long(comm):
    if comm.rank == 1:
        time.sleep(60)
    return comm.rank


def pid(comm):
    return os.getpid(), torch.get_num_threads(), dist.get_world_size()


def test_a_small_pool_survives_death_and_delay():
    with ProcessPool(2) as pool:
        first = pool.run(pid)
        assert pool.run(pid) == first  # the same processes
        assert [threads for _, threads, _ in first] == [1, 1]
        with pytest.raises(RankFailure, match="rank 1 of 2 failed: the process died"):
            pool.run(die)
        second = pool.run(pid)
        assert not {p for p, _, _ in first} & {p for p, _, _ in second}
        with pytest.raises(RankFailure, match=r"ranks \[1\] were not done in 0.5 s") as caught:
            pool.run(sleep_long, timeout_s=0.5)
        assert "in sleep_long" in caught.value.details
        third = pool.run(pid, world_size=1)
    assert not any(is_running(p) for p, _, _ in (*first, *second, *third))


def nested(comm):
    return ProcessPool(2).run(pid)


def spin(comm):
    while True:
        pass


def test_a_rank_cannot_start_a_pool(pool):
    with pytest.raises(RankFailure, match="a process of a pool cannot run a pool"):
        pool.run(nested, world_size=1)


def test_ranks_end_with_their_server_whatever_they_do():
    with ProcessPool(2) as pool:
        pids = [p for p, _, _ in pool.run(pid)]
        server = pool._server
        assert server is not None
        for connection in pool._ranks:
            connection.send_bytes(pickle.dumps((2, spin.__module__, "spin", __file__, pickle.dumps(((), {})))))
        server._process.kill()
        deadline = time.monotonic() + 20
        while any(is_running(p) for p in pids):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_functions_are_found_by_name_and_refused_when_they_have_none(pool):
    assert pool.run("builtins:repr", world_size=1) == ["GroupCommunicator(rank=0, size=1, backend='gloo')"]
    with pytest.raises(ValueError, match="must be a function at the top level of a module"):
        pool.run(lambda comm: comm.rank)
    with pytest.raises(ValueError, match="'package.module:function', got 'die'"):
        pool.run("die")
    with pytest.raises(RankFailure, match="ModuleNotFoundError: No module named 'no_such_module'"):
        pool.run("no_such_module:fn", world_size=1)
    with pytest.raises(ValueError, match=r"world_size must be one of \[1, 2, 4, 8\], got 3"):
        pool.run(pid, world_size=3)
    with pytest.raises(ValueError, match="size must be a positive number of processes, got 0"):
        ProcessPool(0)
    with pytest.raises(ValueError, match="world_sizes must lie in 1 to 2"):
        ProcessPool(2, world_sizes=[4])
