"""The distributed road on GPUs: CUDA tensors throughout; NCCL where there are several, one GPU shared otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import magi_attention.api as api
import pipeline_cases as cases
import pytest
import torch
import torch.distributed as dist
from magi_attention import env
from magi_attention.common.enum import MagiAttentionKernelBackend
from magi_comm.groups import CompletedWork
from pipeline_cases import Case
from test_compile import run_step, step
from test_pipeline import assert_exact, gathered
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REFERENCE = {"kernel_backend": MagiAttentionKernelBackend.SDPA}  # float64 on CUDA is the torch backend's
CASES = [
    Case(4, "causal", 1000, "2", "sink"),
    Case(4, "varlen_causal", 1000, "auto", "gqa_softcap"),
    Case(2, "random_bands", 1000, "0", "uneven"),
    Case(4, "cross", 7, "3", "small_chunks"),
]


class ThroughHost:
    """A communicator for processes that share one GPU, where NCCL refuses to run: CUDA tensors go through the host."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> CompletedWork:
        host = output.cpu()
        self.comm.all_to_all_single(host, input.cpu(), output_split_sizes, input_split_sizes)
        output.copy_(host)
        return CompletedWork()

    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False) -> CompletedWork:
        host = tensor.cpu()
        self.comm.all_reduce(host, op)
        tensor.copy_(host)
        return CompletedWork()

    def all_gather(self, outputs: Sequence[Tensor], input: Tensor, async_op: bool = False) -> CompletedWork:
        hosts = [o.cpu() for o in outputs]
        self.comm.all_gather(hosts, input.cpu())
        for output, host in zip(outputs, hosts, strict=True):
            output.copy_(host)
        return CompletedWork()

    def all_gather_object(self, obj: Any) -> list[Any]:
        return self.comm.all_gather_object(obj)

    def broadcast(self, tensor: Tensor, src: int = 0, async_op: bool = False) -> CompletedWork:
        host = tensor.cpu()
        self.comm.broadcast(host, src)
        tensor.copy_(host)
        return CompletedWork()

    def barrier(self) -> None:
        self.comm.barrier()


def on_cuda(comm: Any, case: Case) -> dict[str, Tensor]:
    with env.override(**REFERENCE):
        result = cases.run_rank(comm, case, {name: x.cuda() for name, x in cases.tensors_of(case).items()})
    assert all(x.is_cuda for x in result.values())
    return {name: x.cpu() for name, x in result.items()}


def on_shared_gpu(comm: Any, case: Case) -> dict[str, Tensor]:
    return on_cuda(ThroughHost(comm), case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_that_share_a_gpu(case: Case, process_pool: Any) -> None:
    assert_exact(gathered(process_pool.run(on_shared_gpu, case, world_size=case.world_size)), cases.exact(case))


def nccl_rank(rank: int, world_size: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        device_id=torch.device("cuda", rank),
    )
    try:
        results = {}
        for case in CASES:
            group_case = Case(world_size, case.mask, case.total, case.overlap, case.variant)
            results[group_case] = on_cuda(dist.group.WORLD, group_case)
            with env.override(**REFERENCE):
                key = cases.make_key(group_case, dist.group.WORLD)
            assert api.get_position_ids(key).device == torch.device("cuda", rank)
        torch.save(results, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_nccl_ranks(world_size: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs, has {torch.cuda.device_count()}")
    torch.multiprocessing.spawn(nccl_rank, (world_size, str(tmp_path)), nprocs=world_size)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
    for case in ranks[0]:
        assert_exact(gathered([results[case] for results in ranks]), cases.exact(case))


def test_compiled_on_cuda() -> None:
    from magi_comm.groups import SingleCommunicator

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    x, sink = (torch.randn(*shape, dtype=torch.float64).cuda() for shape in ((61, 4, 8), (2, 4)))
    with env.override(**REFERENCE):
        for cut in (7, 40):
            key = api.magi_attn_varlen_key([0, cut, 61], [0, cut, 61], 4, 2, 8, 0, SingleCommunicator(), causal=True)
            for a, b in zip(run_step(compiled, x, sink, key), run_step(step, x, sink, key), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    api.clear_cache()
