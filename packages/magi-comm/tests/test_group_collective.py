"""`group_cast` and `group_reduce` against a brute-force oracle, on worlds of threads."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from magi_comm import WorkWithPostProcessFn, group_cast, group_reduce
from magi_comm.testing import ThreadWorld

INF = float("inf")


@dataclass
class Side:
    """One rank's part of a cast: its input splits with their destinations, its output splits with their sources."""

    sizes_in: list[int] = field(default_factory=list)
    targets: list[list[int]] = field(default_factory=list)
    sizes_out: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)


@st.composite
def casts(draw, max_world: int = 5, whole: bool = False) -> list[Side]:
    """A cast of a whole group. ``whole`` keeps the split boundaries of the senders in the outputs."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = draw(st.integers(1, max_world))
    longest = draw(st.sampled_from([0, 1, 5, 60]))
    density = draw(st.sampled_from([0.0, 0.4, 1.0]))
    sides = [Side() for _ in range(n)]
    for side in sides:
        for _ in range(int(rng.integers(0, 6))):
            side.sizes_in.append(int(rng.integers(0, longest + 1)))
            side.targets.append([r for r in range(n) if rng.random() < density])
    for r, side in enumerate(sides):
        queues = {
            s: [size for size, t in zip(other.sizes_in, other.targets, strict=True) if r in t]
            for s, other in enumerate(sides)
        }
        while any(queues.values()):
            s = int(rng.choice([s for s, q in queues.items() if q]))
            size = queues[s].pop(0)
            if not whole:
                if queues[s] and rng.random() < 0.3:
                    size += queues[s].pop(0)
                if rng.random() < 0.3:
                    cut = int(rng.integers(0, size + 1))
                    queues[s].insert(0, size - cut)
                    size = cut
            side.sizes_out.append(size)
            side.sources.append(s)
    return sides


def rows_of(seed: int, count: int, width: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(count, *width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def wire_rows(sides: list[Side], s: int, r: int) -> list[int]:
    """Rows of the input of ``s`` that go to ``r``, in order."""
    rows: list[int] = []
    start = 0
    for size, targets in zip(sides[s].sizes_in, sides[s].targets, strict=True):
        if r in targets:
            rows.extend(range(start, start + size))
        start += size
    return rows


def received_rows(sides: list[Side], r: int) -> list[tuple[int, int]]:
    """(source, row of its input) of each output row of ``r``."""
    streams = {s: iter(wire_rows(sides, s, r)) for s in range(len(sides))}
    return [
        (s, next(streams[s])) for size, s in zip(sides[r].sizes_out, sides[r].sources, strict=True) for _ in range(size)
    ]


@given(
    sides=casts(), given_output=st.booleans(), asynchronous=st.booleans(), as_tensors=st.booleans(), lse=st.booleans()
)
def test_cast(sides, given_output, asynchronous, as_tensors, lse):
    n = len(sides)
    inputs = [rows_of(r, sum(side.sizes_in), (2, 3), torch.bfloat16) for r, side in enumerate(sides)]
    lses = [rows_of(100 + r, sum(side.sizes_in), (2,), torch.float32) for r, side in enumerate(sides)]

    def main(comm):
        side = sides[comm.rank]
        sizes_in, sizes_out, targets, sources = side.sizes_in, side.sizes_out, side.targets, side.sources
        if as_tensors:
            padding = [0, 0]
            matrix = torch.full((len(sizes_in) + 2, n), -1)
            for i, t in enumerate(targets):
                matrix[i, : len(t)] = torch.tensor(t, dtype=torch.int64)
            targets = matrix
            sizes_in = torch.tensor(sizes_in + padding)
            sizes_out, sources = torch.tensor(sizes_out + padding), torch.tensor([*sources, n, n])
        total = sum(side.sizes_out)
        output = torch.full((total + 2, 2, 3), 7.0, dtype=torch.bfloat16) if given_output else None
        extra = {"cast_lse": True, "input_lse": lses[comm.rank]} if lse else {}
        work = group_cast(inputs[comm.rank], output, sizes_in, sizes_out, targets, sources, comm, asynchronous, **extra)
        assert isinstance(work, WorkWithPostProcessFn)
        result = work.wait_post_process(output)
        got, got_lse = result if lse else (result, None)
        if given_output:
            assert got is output
            assert (got[total:] == 7).all()
        return got[:total], None if got_lse is None else got_lse[:total]

    for r, (got, got_lse) in enumerate(ThreadWorld(n).run(main)):
        origin = received_rows(sides, r)
        assert torch.equal(got, torch.stack([inputs[s][i] for s, i in origin]) if origin else got[:0])
        if lse:
            assert torch.equal(got_lse, torch.stack([lses[s][i] for s, i in origin]) if origin else got_lse[:0])


def contributions(sides: list[Side], partials: list) -> list[list[list]]:
    """Per owner and row, what the sources send back for it, by ascending source."""
    result: list[list[list]] = [[[] for _ in range(sum(side.sizes_in))] for side in sides]
    for r in range(len(sides)):
        for j, (owner, row) in enumerate(received_rows(sides, r)):
            result[owner][row].append(partials[r][j])
    return result


REDUCE_DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.float64),
]


@given(
    sides=casts(whole=True),
    op=st.sampled_from(["sum", "avg"]),
    accumulate=st.booleans(),
    asynchronous=st.booleans(),
    dtypes=st.sampled_from(REDUCE_DTYPES),
)
def test_reduce_sum_and_avg_bit_for_bit(sides, op, accumulate, asynchronous, dtypes):
    n = len(sides)
    wide = torch.promote_types(torch.float32, dtypes[0])
    partials = [rows_of(r, sum(side.sizes_out), (3,), dtypes[0]) for r, side in enumerate(sides)]
    own = [rows_of(50 + r, sum(side.sizes_in), (3,), dtypes[1]) for r, side in enumerate(sides)]

    def main(comm):
        side = sides[comm.rank]
        output = own[comm.rank].clone()
        work = group_reduce(
            partials[comm.rank], output, side.sizes_out, side.sizes_in, side.sources, side.targets, comm, asynchronous,
            reduce_op=op, acc_reduce=accumulate,
        )  # fmt: skip
        assert work.wait_post_process(output) is output
        with pytest.raises(RuntimeError, match="exactly once"):
            work.wait_post_process(output)
        return output

    collected = contributions(sides, partials)
    for r, got in enumerate(ThreadWorld(n).run(main)):
        for i, rows in enumerate(collected[r]):
            exact = own[r][i].to(wide) if accumulate else torch.zeros(3, dtype=wide)
            for row in rows:
                exact = exact + row.to(wide)
            if op == "avg":
                exact = exact / max(1, len(rows) + accumulate)
            assert torch.equal(got[i], exact.to(dtypes[1]))


@given(sides=casts(whole=True), accumulate=st.booleans(), allocate=st.booleans())
def test_reduce_lse(sides, accumulate, allocate):
    n = len(sides)
    allocate = allocate and not accumulate

    def states(seed: int, count: int):
        out, lse = rows_of(seed, count, (2, 3)), 4 * rows_of(seed + 1, count, (2,))
        lse[torch.rand(lse.shape, generator=torch.Generator().manual_seed(seed)) < 0.3] = -INF
        return out.masked_fill(lse.unsqueeze(-1) == -INF, 0.0), lse

    partials = [states(2 * r, sum(side.sizes_out)) for r, side in enumerate(sides)]
    own = [states(100 + 2 * r, sum(side.sizes_in)) for r, side in enumerate(sides)]

    def main(comm):
        side = sides[comm.rank]
        output, output_lse = (None, None) if allocate else (t.clone() for t in own[comm.rank])
        return group_reduce(
            partials[comm.rank][0], output, side.sizes_out, side.sizes_in, side.sources, side.targets, comm,
            reduce_op="lse", acc_reduce=accumulate, input_lse=partials[comm.rank][1], output_lse=output_lse,
        ).wait_post_process()  # fmt: skip

    collected = contributions(sides, [list(zip(*p, strict=True)) for p in partials])
    for r, (out, lse) in enumerate(ThreadWorld(n).run(main)):
        for i, rows in enumerate(collected[r]):
            every = [*rows, (own[r][0][i], own[r][1][i])] if accumulate else rows
            lses = torch.stack([x for _, x in every]) if every else torch.full((1, 2), -INF, dtype=torch.float64)
            outs = torch.stack([x for x, _ in every]) if every else torch.zeros(1, 2, 3, dtype=torch.float64)
            whole = torch.logsumexp(lses, 0)
            weights = torch.where(lses == -INF, 0.0, (lses - whole).exp())
            torch.testing.assert_close(lse[i], whole, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(out[i], (weights.unsqueeze(-1) * outs).sum(0), rtol=1e-12, atol=1e-12)


def test_all_empty_states_reduce_to_zero_and_minus_infinity():
    def main(comm):
        nan, nothing = torch.full((2, 1, 3), float("nan")), torch.full((2, 1), -INF)
        owner = [[0, 1, 2]] if comm.rank == 0 else []
        sizes = [2] if comm.rank == 0 else []
        out = nan.clone() if comm.rank == 0 else nan[:0].clone()
        lse = nothing.clone() if comm.rank == 0 else nothing[:0].clone()
        return group_reduce(nan, out, [2], sizes, [0], owner, comm, reduce_op="lse", input_lse=nothing,
                            output_lse=lse).wait_post_process(out)  # fmt: skip

    out, lse = ThreadWorld(3).run(main)[0]
    assert torch.equal(out, torch.zeros(2, 1, 3))
    assert torch.equal(lse, torch.full((2, 1), -INF))


def test_tuples_travel_in_one_collective():
    def main(comm):
        other = 1 - comm.rank
        k, v = torch.full((2, 3), 1.0 + comm.rank), torch.full((2, 1), 10.0 + comm.rank, dtype=torch.bfloat16)
        got = group_cast((k, v), None, [2], [2], [[other]], [other], comm).wait_post_process()
        into = (torch.zeros(2, 3), torch.zeros(2, 1))
        back = group_reduce(got, into, [2], [2], [other], [[other]], comm).wait_post_process(into)
        return [x[0, 0].item() for x in (*got, *back)]

    assert ThreadWorld(2).run(main) == [[2.0, 11.0, 1.0, 10.0], [1.0, 10.0, 2.0, 11.0]]


def test_the_buffer_given_at_the_end_wins():
    def main(comm):
        x = torch.full((1, 1), 1.0 + comm.rank)
        first, second = torch.full((1, 1), 5.0), torch.full((1, 1), 6.0)
        peer = 1 - comm.rank
        got = group_cast(x, first, [1], [1], [[peer]], [peer], comm).wait_post_process(second)
        assert got is second
        total = torch.full((1, 1), 100.0)
        group_reduce(x, first, [1], [1], [peer], [[peer]], comm).wait_post_process(total)
        return first.item(), second.item(), total.item()

    assert ThreadWorld(2).run(main) == [(5.0, 2.0, 102.0), (5.0, 1.0, 101.0)]


def test_partials_travel_in_comm_dtype():
    def main(comm):
        x = torch.full((1, 1), 1 + 2.0**-10)
        results = []
        narrow, wide = {"comm_dtype": torch.bfloat16}, {"reduce_dtype": torch.float32}
        for options in ({}, narrow, {**narrow, **wide}, wide):
            out = torch.zeros(1, 1)
            group_reduce(x, out, [1], [1], [comm.rank], [[comm.rank]], comm, **options).wait_post_process(out)
            results.append(out.item())
        return results

    assert ThreadWorld(1).run(main) == [[1 + 2.0**-10, 1.0, 1.0, 1 + 2.0**-10]]


def call_cast(**changes):
    arguments = {
        "input": torch.ones(3, 2), "output": None, "input_split_sizes": [1, 2], "output_split_sizes": [2],
        "dst_indices": [[], [0]], "src_index": [0], "group": ThreadWorld(2).comms[0],
    }  # fmt: skip
    return group_cast(**{**arguments, **changes})


def call_reduce(**changes):
    arguments = {
        "input": torch.ones(3, 2), "output": torch.ones(2, 2), "input_split_sizes": [1, 2], "output_split_sizes": [2],
        "dst_index": [1, 0], "src_indices": [[0]], "group": ThreadWorld(2).comms[0],
    }  # fmt: skip
    return group_reduce(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"input": 3}, TypeError, "rank 0 of 2: group_cast: input must be a tensor or a tuple of tensors, got int"),
        ({"input": torch.ones(4, 2)}, ValueError, r"input must have sum\(input_split_sizes\) = 3 rows, got shape \(4,"),
        ({"input_split_sizes": [4, -1]}, ValueError, r"input_split_sizes\[1\] must not be negative, got -1"),
        ({"input_split_sizes": [1.5, 2]}, TypeError, r"input_split_sizes\[0\] must be an integer, got float"),
        ({"input_split_sizes": torch.ones(2)}, TypeError, "input_split_sizes must be a list or a 1-d integer tensor"),
        ({"output_split_sizes": 2}, TypeError, "output_split_sizes must be a list of integers, got int"),
        ({"output_split_sizes": [3]}, ValueError, "dst_indices and src_index must agree on what this rank sends to it"),
        (
            {"dst_indices": [[0]]},
            ValueError,
            r"dst_indices must have one list per split of input_split_sizes \(2\), got",
        ),
        ({"dst_indices": [[], [0, 0]]}, ValueError, r"dst_indices\[1\] must be distinct ranks, got \[0, 0\]"),
        ({"dst_indices": [[], [2]]}, ValueError, r"dst_indices\[1\] must be ranks of the group, 0 to 1, got \[2\]"),
        ({"dst_indices": torch.ones(2).int()}, TypeError, "dst_indices must be a list of lists or a 2-d integer"),
        ({"src_index": [2]}, ValueError, r"src_index\[0\] must be a rank of the group, 0 to 1, got 2"),
        ({"src_index": torch.tensor([2])}, ValueError, r"src_index\[0\] must be a rank of the group, 0 to 1, got 2"),
        ({"src_index": []}, ValueError, r"src_index must have one rank per split of output_split_sizes \(1\), got 0"),
        ({"output": torch.ones(1, 2)}, ValueError, r"output must have at least sum\(output_split_sizes\) = 2 rows"),
        ({"output": torch.ones(2, 3)}, ValueError, "output must have the row shape, dtype and device of input"),
        ({"output": (torch.ones(2, 2),) * 2}, ValueError, "output must hold 1 tensors as input does, got 2"),
        ({"cast_lse": 1}, TypeError, "cast_lse must be a bool, got int"),
        ({"cast_lse": True}, TypeError, r"input_lse must be a tensor \(rows, heads\), got NoneType"),
        ({"input_lse": torch.ones(3)}, ValueError, "input_lse and output_lse need cast_lse=True"),
        ({"cast_lse": True, "input_lse": torch.ones(3).half()}, TypeError, "input_lse must be float32 or float64"),
        ({"cast_lse": True, "input_lse": torch.ones(2)}, ValueError, "input_lse must have the shape of input without"),
        (
            {"group": "world"},
            TypeError,
            "group must be a ProcessGroup, a DeviceMesh of one or two axes",
        ),
        ({"split_alignment": 4}, TypeError, "unexpected keyword argument 'split_alignment'"),
    ],
)
def test_wrong_arguments_of_cast_are_refused_by_name(changes, error, message):
    with pytest.raises(error, match=message):
        call_cast(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"input": torch.ones(3, 2).int()}, TypeError, "rank 0 of 2: group_reduce: input must be of a floating dtype"),
        ({"output": None}, ValueError, r"output must be given with acc_reduce=True .*, got None"),
        ({"output": torch.ones(2, 2).int()}, ValueError, "output must be floating, with the row shape and device"),
        ({"dst_index": [0, 2]}, ValueError, r"dst_index\[1\] must be a rank of the group"),
        ({"src_indices": [[0, 5]]}, ValueError, r"src_indices\[0\] must be ranks of the group, 0 to 1, got \[0, 5\]"),
        ({"src_indices": [[1]]}, ValueError, "src_indices and dst_index must agree on what this rank sends to itself"),
        ({"reduce_op": "max"}, ValueError, "reduce_op must be one of sum, avg, lse, got 'max'"),
        ({"reduce_op": "lse"}, TypeError, "input_lse must be a tensor"),
        ({"reduce_op": "lse", "input_lse": torch.ones(3)}, ValueError, "output_lse must be given with reduce_op='lse'"),
        ({"input_lse": torch.ones(3)}, ValueError, "input_lse and output_lse need reduce_op='lse', got 'sum'"),
        ({"acc_reduce": None}, TypeError, "acc_reduce must be a bool, got NoneType"),
        ({"reduce_dtype": torch.bfloat16}, ValueError, "reduce_dtype must be torch.float32, torch.float64 or None"),
        ({"comm_dtype": "bf16"}, TypeError, "comm_dtype must be a floating torch.dtype or None, got 'bf16'"),
        ({"deterministic": True}, TypeError, "unexpected keyword argument 'deterministic'"),
    ],
)
def test_wrong_arguments_of_reduce_are_refused_by_name(changes, error, message):
    with pytest.raises(error, match=message):
        call_reduce(**changes)


def test_neither_records_a_graph():
    def main(comm):
        x = torch.ones(2, 2, requires_grad=True)
        got = group_cast(x, None, [2], [2], [[0]], [0], comm).wait_post_process()
        into = torch.zeros(2, 2)
        group_reduce(x, into, [2], [2], [0], [[0]], comm).wait_post_process(into)
        return got.requires_grad, into.requires_grad

    assert ThreadWorld(1).run(main) == [(False, False)]
