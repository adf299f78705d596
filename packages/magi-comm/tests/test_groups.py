"""Communicators of process groups and of one rank, and traffic counts."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from magi_comm import Communicator, CountingCommunicator, SingleCommunicator, as_communicator, group_cast
from magi_comm.testing import ThreadWorld
from torch.distributed.device_mesh import DeviceMesh


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_torch_distributed_there_is_one_rank():
    comm = as_communicator(None)
    assert isinstance(comm, SingleCommunicator)
    assert isinstance(comm, Communicator)
    assert (comm.rank, comm.size) == (0, 1)
    assert as_communicator() is comm
    out = torch.zeros(2)
    comm.all_to_all_single(out, torch.ones(2), [2], [2]).wait()
    gathered = [torch.zeros(2)]
    comm.all_gather(gathered, out)
    comm.all_reduce(out, "avg")
    comm.broadcast(out)
    comm.barrier()
    assert out.tolist() == gathered[0].tolist() == [1.0, 1.0]
    assert comm.all_gather_object(3) == [3]
    with pytest.raises(ValueError, match="outputs must have one tensor per rank"):
        comm.all_gather([], out)
    with pytest.raises(ValueError, match="src must be a rank of the group, 0 to 0, got 1"):
        comm.broadcast(out, 1)


def test_one_group_has_one_communicator(one_process):
    comm = as_communicator(dist.group.WORLD)
    assert as_communicator(None) is comm
    assert as_communicator(dist.group.WORLD) is comm
    assert as_communicator(comm) is comm
    assert as_communicator(DeviceMesh("cpu", [0])) is comm
    assert copy.deepcopy(comm) is comm
    assert isinstance(comm, Communicator)
    other = as_communicator(dist.new_group([0]))
    assert other is not comm
    alive = weakref.ref(other)
    del other
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("group", "error", "message"),
    [
        (
            "world",
            TypeError,
            "group must be a ProcessGroup, a DeviceMesh of one or two axes, a Communicator or None",
        ),
        (3, TypeError, "got int"),
        (lambda: DeviceMesh("cpu", [[[0]]]), ValueError, "a DeviceMesh of one or two mesh axes, got 3"),
        (lambda: dist.GroupMember.NON_GROUP_MEMBER, ValueError, "group must contain the calling process"),
    ],
)
def test_other_groups_are_refused(one_process, group, error, message):
    with pytest.raises(error, match=message):
        as_communicator(group() if callable(group) else group)


def test_counting_counts_what_goes_to_others():
    def main(comm):
        counting = CountingCommunicator(comm)
        assert isinstance(counting, Communicator)
        n, r = comm.size, comm.rank
        counting.all_to_all_single(torch.empty(sum(range(n)), 2), torch.empty(n * r, 2), list(range(n)), [r] * n)
        counting.all_reduce(torch.ones(4))
        counting.all_reduce(torch.ones(()), "max")
        counting.all_gather([torch.ones(3) for _ in range(n)], torch.ones(3))
        counting.broadcast(torch.ones(5), 1)
        counting.barrier()
        counting.all_gather_object(r)
        return counting

    counting = ThreadWorld(3).run(main)[1]
    a2a = counting.traffic["all_to_all_single"]
    assert (a2a.calls, a2a.tokens_sent, a2a.tokens_received) == (1, 2, 2)
    assert (a2a.bytes_sent, a2a.bytes_received) == (16, 16)
    assert (a2a.tokens_sent_to, a2a.tokens_received_from) == ([1, 0, 1], [0, 0, 2])
    reduce = counting.traffic["all_reduce"]
    assert (reduce.calls, reduce.bytes_sent, reduce.bytes_received) == (2, 20, 20)
    gather = counting.traffic["all_gather"]
    assert (gather.bytes_sent, gather.bytes_received, gather.tokens_sent_to) == (24, 24, [3, 0, 3])
    cast = counting.traffic["broadcast"]
    assert (cast.bytes_sent, cast.bytes_received) == (40, 0)
    assert counting.traffic["barrier"].calls == counting.traffic["all_gather_object"].calls == 1
    assert counting.total.bytes_sent == 16 + 20 + 24 + 40
    assert counting.total.calls == 7
    counting.reset()
    assert counting.total.calls == 0


def test_a_cast_through_counting_is_counted_in_tokens():
    def main(comm):
        counting = CountingCommunicator(comm)
        others = [r for r in range(comm.size) if r != comm.rank]
        k, v = torch.ones(5, 2, 4, dtype=torch.bfloat16), torch.ones(5, 2, 3, dtype=torch.bfloat16)
        group_cast((k, v), None, [5], [5] * len(others), [others], others, counting).wait_post_process()
        return counting.total

    for total in ThreadWorld(4).run(main):
        assert (total.calls, total.tokens_sent, total.tokens_received) == (1, 15, 15)
        assert total.bytes_received == 15 * 2 * (4 + 3) * 2
