"""The same bits on a GPU as on the CPU, from both ways through the rows, and NCCL on one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from magi_comm import GroupCommunicator, RangeExchange, as_communicator, range_reduce, rows
from magi_comm.testing import ThreadWorld, random_transfers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def exchanges(comm, seed: int, device: str):
    """(results that must agree bit for bit, results that go through exp and log)."""
    plan = random_transfers(seed, comm.size, 300, 0.8, overlap=True)
    rank, size = comm.rank, plan.sizes[comm.rank]
    generator = torch.Generator().manual_seed(rank)
    k = torch.randn(size, 2, 8, generator=generator).to(torch.bfloat16).to(device)
    v = torch.randn(size, 2, 5, generator=generator).to(device)
    exchange = RangeExchange(comm, plan.recv[rank], plan.send(rank), num_local=size)
    got_k, got_v = exchange.cast((k, v), async_op=True).wait()
    dk, dv = torch.ones(k.shape, device=device), torch.zeros(v.shape, device=device, dtype=torch.bfloat16)
    exchange.reduce((got_k, got_v), (dk, dv), async_op=True).wait()
    out, lse = torch.zeros(v.shape, device=device), torch.full(v.shape[:2], -float("inf"), device=device)
    exchange.reduce((got_v, got_v[..., 0].contiguous()), (out, lse), "lse").wait()
    mean = torch.zeros(40, 2, 5, device=device)
    if size >= 20:
        range_reduce(v, mean, [(0, 10), (5, 15), (10, 20)], [(0, 10), (3, 13), (30, 40)], reduce_op="avg")
    return [t.cpu() for t in (got_k, got_v, dk, dv)], [t.cpu() for t in (out, lse, mean)]


@pytest.mark.parametrize("long_run", [0, 4096], ids=["slices", "indices"])
@pytest.mark.parametrize("world_size", [1, 4, 8], ids="w{}".format)
def test_a_gpu_gives_the_bits_of_the_cpu(monkeypatch, world_size, long_run):
    monkeypatch.setitem(rows._LONG_RUN, "other", long_run)
    for seed in range(3):
        runs = [ThreadWorld(world_size).run(exchanges, seed, device) for device in ("cuda", "cuda", "cpu")]
        for (exact, merged), (exact_again, merged_again), (exact_cpu, merged_cpu) in zip(*runs, strict=True):
            for a, b, c in zip(exact, exact_again, exact_cpu, strict=True):
                assert torch.equal(a, b)
                assert torch.equal(a, c)
            for a, b, c in zip(merged, merged_again, merged_cpu, strict=True):
                assert torch.equal(a, b)
                torch.testing.assert_close(a, c)


def test_nccl_on_one_rank(tmp_path):
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        comm = as_communicator()
        assert isinstance(comm, GroupCommunicator)
        got, exact = exchanges(comm, 1, "cuda"), ThreadWorld(1).run(exchanges, 1, "cuda")[0]
        for a, b in zip(got[0] + got[1], exact[0] + exact[1], strict=True):
            assert torch.equal(a, b)
        tensor = torch.ones(2, device="cuda")
        comm.all_reduce(tensor, "avg", async_op=True).wait()
        comm.broadcast(tensor)
        comm.barrier()
        assert tensor.tolist() == [1.0, 1.0]
        assert comm.all_gather_object(3) == [3]
    finally:
        dist.destroy_process_group()
