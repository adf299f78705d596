"""Ranks as threads: the collectives against their definitions, and mistakes that are reported instead of hanging."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from magi_comm import Communicator, as_communicator
from magi_comm.testing import RankAborted, RankFailure, ThreadWorld


@given(n=st.integers(1, 6), data=st.data())
def test_all_to_all_with_uneven_and_zero_splits(n, data):
    counts = [[data.draw(st.integers(0, 3)) for _ in range(n)] for _ in range(n)]  # [source][destination]

    def main(comm):
        r = comm.rank
        rows = [100 * r + 10 * d + i for d in range(n) for i in range(counts[r][d])]
        expected = [100 * s + 10 * r + i for s in range(n) for i in range(counts[s][r])]
        out = torch.full((len(expected), 2), -1, dtype=torch.int16)
        given_rows = torch.tensor(rows, dtype=torch.int16).reshape(-1, 1).repeat(1, 2)
        work = comm.all_to_all_single(out, given_rows, [counts[s][r] for s in range(n)], counts[r], async_op=True)
        work.wait()
        assert work.is_completed()
        assert out[:, 0].tolist() == out[:, 1].tolist() == expected

    ThreadWorld(n).run(main)


def test_the_other_collectives():
    def main(comm):
        results = {}
        for op in ("sum", "avg", "max", "min"):
            tensor = torch.tensor([1.0 + comm.rank, -comm.rank])
            comm.all_reduce(tensor, op)
            results[op] = tensor.tolist()
        low = torch.full((1,), 256.0 if comm.rank == 0 else 1.0, dtype=torch.bfloat16)
        comm.all_reduce(low)
        results["low"] = low.item()
        outputs = [torch.empty(2) for _ in range(comm.size)]
        comm.all_gather(outputs, torch.full((2,), float(comm.rank)))
        results["gather"] = [o[0].item() for o in outputs]
        tensor = torch.tensor([comm.rank])
        comm.broadcast(tensor, 2)
        results["broadcast"] = tensor.item()
        results["objects"] = comm.all_gather_object({"rank": comm.rank})
        comm.barrier()
        return results

    for result in ThreadWorld(3).run(main):
        assert result == {
            "sum": [6.0, -3.0], "avg": [2.0, -1.0], "max": [3.0, 0.0], "min": [1.0, -2.0], "low": 258.0,
            "gather": [0.0, 1.0, 2.0], "broadcast": 2, "objects": [{"rank": 0}, {"rank": 1}, {"rank": 2}],
        }  # fmt: skip


def test_gathered_objects_are_copies():
    def main(comm):
        objects = comm.all_gather_object([comm.rank])
        objects[0].append(comm.rank)
        comm.barrier()
        return objects[0]

    assert ThreadWorld(2).run(main) == [[0, 0], [0, 1]]


def test_subgroups_work_at_the_same_time():
    def main(comm):
        intra = comm.new_group([0, 1]) or comm.new_group([2, 3])
        inter = comm.new_group([0, 2]) or comm.new_group([1, 3])
        backwards = comm.new_group([3, 2, 1, 0])
        return intra.all_gather_object(comm.rank), inter.all_gather_object(comm.rank), backwards.rank

    assert ThreadWorld(4).run(main) == [
        ([0, 1], [0, 2], 3), ([0, 1], [1, 3], 2), ([2, 3], [0, 2], 1), ([2, 3], [1, 3], 0),
    ]  # fmt: skip


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        y = x.clone()
        comm.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        assert threading.current_thread().name == f"rank-{ctx.comm.rank}"
        grad = grad.clone()
        ctx.comm.all_reduce(grad)
        return grad, None


def test_backward_runs_on_the_thread_of_its_rank():
    def main(comm):
        x = torch.full((2,), 1.0 + comm.rank, requires_grad=True)
        y = AllReduce.apply(x, comm)
        for _ in range(3):
            y = AllReduce.apply(y * y, comm)
        y.sum().backward()
        return x.grad

    exact = [torch.tensor(float(r + 1), dtype=torch.float32, requires_grad=True) for r in range(4)]
    y = sum(exact)
    for _ in range(3):
        y = 4 * y * y
    (4 * 2 * y).backward()  # the losses of all ranks, of two elements each, reach every x
    for got, x in zip(ThreadWorld(4).run(main), exact, strict=True):
        torch.testing.assert_close(got, torch.full((2,), x.grad.item() / 2))


def test_a_rank_that_raises_ends_the_others():
    aborted = []

    def main(comm):
        if comm.rank == 2:
            raise KeyError("lost")
        try:
            comm.barrier()
        except RankAborted as error:
            aborted.append(str(error))
            raise

    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 2 of 4 failed: KeyError: 'lost'") as caught:
        ThreadWorld(4).run(main)
    assert time.monotonic() - start < 10
    assert caught.value.rank == 2
    assert isinstance(caught.value.__cause__, KeyError)
    assert "in main" in caught.value.details
    assert len(aborted) == 3
    assert all("rank 2 failed: KeyError: 'lost'" in text for text in aborted)


def leave_early(comm):
    if comm.rank != 1:
        comm.barrier()


def call_another(comm):
    comm.barrier() if comm.rank else comm.all_reduce(torch.ones(1))


def disagree(comm):
    comm.all_to_all_single(torch.ones(2), torch.ones(3 if comm.rank == 0 else 2), [1, 1],
                           [1, 2] if comm.rank == 0 else [1, 1])  # fmt: skip


def disagree_on_rows(comm):
    shape = (2, 1 + comm.rank)
    comm.all_to_all_single(torch.ones(shape), torch.ones(shape))


def disagree_on_shape(comm):
    comm.all_reduce(torch.ones(1 + comm.rank))


@pytest.mark.parametrize(
    ("main", "message"),
    [
        (leave_early, r"rank 0 of 2 waits in barrier \(collective 0\), but rank 1 has returned without joining it"),
        (call_another, r"rank \d of 2 called .*, rank \d called .*; every rank must call the same collectives"),
        (
            disagree,
            r"rank 0 sends input_split_sizes\[1\] = 2 rows to rank 1, which expects output_split",
        ),
        (disagree_on_rows, r"rank 0 sends torch.float32 rows of \(1,\), rank 1 expects torch.float32 rows of \(2,\)"),
        (disagree_on_shape, "all_reduce: tensors differ over ranks"),
    ],
)
def test_mistakes_do_not_hang(main, message):
    with pytest.raises(RankFailure, match=message):
        ThreadWorld(2, timeout_s=20).run(main)


def test_a_late_rank_is_reported_and_cannot_meet_the_next_run():
    world = ThreadWorld(2, timeout_s=0.3)
    release = threading.Event()

    def main(comm):
        if comm.rank == 1:
            release.wait(20)
        comm.barrier()

    with pytest.raises(RankFailure, match=r"rank 0 of 2 waited 0.3 s in barrier \(collective 0\) for ranks \[1\]"):
        world.run(main)
    release.set()
    assert world.run(lambda comm: comm.all_gather_object(comm.rank)) == [[0, 1], [0, 1]]


def test_a_world_can_be_used_again_after_a_failure_and_keeps_its_communicators():
    world = ThreadWorld(2)
    before = world.run(lambda comm: comm)
    with pytest.raises(RankFailure):
        world.run(leave_early)
    assert world.run(lambda comm: comm) == before
    assert isinstance(before[0], Communicator)
    assert as_communicator(before[0]) is before[0]
    assert copy.deepcopy(before[0]) is before[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda c: c.all_to_all_single(torch.ones(3), torch.ones(2)),
            r"output has 3 rows, not divisible by 2; give",
        ),
        (
            lambda c: c.all_to_all_single(torch.ones(2), torch.ones(2), [2], [1, 1]),
            "output_split_sizes must be 2 non",
        ),
        (lambda c: c.all_to_all_single(torch.ones(2), torch.ones(2), [3, -1], [1, 1]), "output_split_sizes must be 2"),
        (lambda c: c.all_to_all_single(torch.ones(2), torch.ones(2), [1, 1], [1, 2]), "sum to the 2 rows of input"),
        (
            lambda c: c.all_to_all_single(torch.ones(2), torch.ones(2), [2, 0], [1, 1]),
            "sends itself input_split",
        ),
        (lambda c: c.all_to_all_single(torch.ones(2), torch.ones(2).int()), "output must have the dtype, row shape"),
        (lambda c: c.all_to_all_single(torch.ones(2, 2).T, torch.ones(2, 2)), "output must be contiguous"),
        (lambda c: c.all_reduce(torch.ones(2), "prod"), "op must be one of sum, avg, max, min, got 'prod'"),
        (lambda c: c.all_gather([torch.ones(2)], torch.ones(2)), "outputs must be 2 tensors of the shape and dtype"),
        (lambda c: c.broadcast(torch.ones(2), 2), "src must be a rank of the group, 0 to 1, got 2"),
        (lambda c: c.new_group([0, 0]), r"ranks must be distinct, got \[0, 0\]"),
        (lambda c: c.new_group([2]), "new_group: ranks must be a rank of the group"),
    ],
)
def test_what_one_rank_can_know_is_refused_at_once_with_its_rank(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call(ThreadWorld(2).comms[1])
    assert "rank 1" in str(caught.value)


@pytest.mark.parametrize("arguments", [{"size": 0}, {"size": 1.5}, {"size": 2, "timeout_s": 0}])
def test_a_world_needs_ranks_and_time(arguments):
    with pytest.raises(ValueError, match="must be"):
        ThreadWorld(**arguments)
