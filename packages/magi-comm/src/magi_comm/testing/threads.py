"""Ranks as threads of one process, behind the same `Communicator` interface as process groups.

Made for exhaustive tests: a world starts in under a millisecond, a mistake is reported instead of hanging, and
split sizes of both sides are compared. Autograd on the CPU runs ``backward`` on the calling thread, so collectives
inside a backward pass belong to the rank that called it.
"""

from __future__ import annotations

import copy
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..groups import Work, check_all_to_all, check_rank, check_reduce_op

__all__ = ["RankAborted", "RankFailure", "ThreadCommunicator", "ThreadWorld"]


class RankFailure(RuntimeError):
    """A rank of a test world failed: ``rank`` tells which, ``details`` is its traceback."""

    def __init__(self, rank: int, size: int, error: str, details: str) -> None:
        super().__init__(f"rank {rank} of {size} failed: {error}\n{details}".rstrip())
        self.rank = rank
        self.details = details


class RankAborted(RuntimeError):
    """Raised in a rank that waits for another one that has failed, has returned, or does not come in time."""


class _Op:
    """One collective: what each member has handed in, and whether it is done."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.given: dict[int, Any] = {}
        self.done = False
        self.error: str | None = None


class _Channel:
    """The members of one group (by rank in the world) and their collectives in order."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.ops: dict[int, _Op] = {}


class _Run:
    """What the ranks of one ``run`` share. A rank that outlives its run keeps this one and disturbs no later run."""

    def __init__(self, size: int) -> None:
        self.channel = _Channel(tuple(range(size)))
        self.subgroups: dict[tuple[int, tuple[int, ...], int], _Channel] = {}
        self.returned: set[int] = set()
        self.failed: tuple[int, str] | None = None

    def raise_if_failed(self, comm: ThreadCommunicator, name: str, number: int) -> None:
        if self.failed is not None:
            rank, error = self.failed
            raise RankAborted(
                f"rank {comm.rank} of {comm.size} stopped in {name} (collective {number}): rank {rank} failed: {error}"
            )


class _ThreadWork:
    def __init__(self, comm: ThreadCommunicator, op: _Op, number: int) -> None:
        self._comm, self._op, self._number = comm, op, number

    def wait(self) -> None:
        self._comm._wait(self._op, self._number)

    def is_completed(self) -> bool:
        return self._op.done


class ThreadCommunicator:
    """One rank of a `ThreadWorld` (or of a subgroup of it). To be used from that rank's thread only."""

    def __init__(self, world: ThreadWorld, run: _Run, channel: _Channel, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = len(channel.members)
        self._begin(run, channel)

    def _begin(self, run: _Run, channel: _Channel) -> None:
        self._run_state = run
        self._channel = channel
        self._next = 0
        self._subgroups: dict[tuple[int, ...], int] = {}

    def __repr__(self) -> str:
        return f"ThreadCommunicator(rank={self.rank}, size={self.size})"

    def __deepcopy__(self, memo: dict[int, Any]) -> ThreadCommunicator:
        return self  # a group is an identity, not a value

    # -- the exchange that all collectives are made of --------------------------------------------------------------

    def _post(self, name: str, given: Any, complete: Callable[[list[Any]], None]) -> _ThreadWork:
        """Hand in this rank's part; the last rank to come does the whole collective, before anybody may return from
        ``wait`` and overwrite an input."""
        world, channel = self._world, self._channel
        with world._changed:
            number = self._next
            self._next += 1
            self._run_state.raise_if_failed(self, name, number)
            op = channel.ops.setdefault(number, _Op(name))
            if op.name != name and op.error is None:
                other = next(iter(op.given))
                op.error = (
                    f"collective {number}: rank {other} of {self.size} called {op.name}, "
                    f"rank {self.rank} called {name}; every rank must call the same collectives in the same order"
                )
            op.given[self.rank] = given
            if op.error is None and len(op.given) == self.size:
                try:
                    with torch.no_grad():
                        complete([op.given[r] for r in range(self.size)])
                except Exception as error:
                    op.error = str(error)
            if op.error is not None or len(op.given) == self.size:
                op.done = True
                op.given = dict.fromkeys(op.given)  # drop the tensors
                world._changed.notify_all()
            if len(op.given) == self.size:
                del channel.ops[number]
        return _ThreadWork(self, op, number)

    def _wait(self, op: _Op, number: int) -> None:
        world = self._world
        deadline = time.monotonic() + world.timeout_s
        with world._changed:
            while not op.done:
                self._run_state.raise_if_failed(self, op.name, number)
                missing = [r for r in range(self.size) if r not in op.given]
                returned = [r for r in missing if self._channel.members[r] in self._run_state.returned]
                if returned:
                    raise RankAborted(
                        f"rank {self.rank} of {self.size} waits in {op.name} (collective {number}), "
                        f"but rank {returned[0]} has returned without joining it"
                    )
                left = deadline - time.monotonic()
                if left <= 0:
                    raise RankAborted(
                        f"rank {self.rank} of {self.size} waited {world.timeout_s:g} s in {op.name} "
                        f"(collective {number}) for ranks {missing}"
                    )
                world._changed.wait(left)
            if op.error is not None:
                raise ValueError(op.error)

    def _run(self, name: str, given: Any, complete: Callable[[list[Any]], None], async_op: bool) -> Work:
        work = self._post(name, given, complete)
        if not async_op:
            work.wait()
        return work

    # -- Communicator -----------------------------------------------------------------------------------------------

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work:
        """See `Communicator.all_to_all_single`; what one rank sends is also checked against what the other expects."""
        out_counts, in_counts = check_all_to_all(
            self.rank, self.size, output, input, output_split_sizes, input_split_sizes
        )

        def complete(parts: list[tuple[Tensor, Tensor, list[int], list[int]]]) -> None:
            for r, (_, given, _, counts) in enumerate(parts):
                for d, (taken, _, expected, _) in enumerate(parts):
                    if counts[d] != expected[r]:
                        raise ValueError(
                            f"all_to_all_single: rank {r} sends input_split_sizes[{d}] = {counts[d]} rows to rank {d}, "
                            f"which expects output_split_sizes[{r}] = {expected[r]}"
                        )
                    if given.dtype != taken.dtype or given.shape[1:] != taken.shape[1:]:
                        raise ValueError(
                            f"all_to_all_single: rank {r} sends {given.dtype} rows of {tuple(given.shape[1:])}, "
                            f"rank {d} expects {taken.dtype} rows of {tuple(taken.shape[1:])}"
                        )
            pieces = [torch.split(given, counts) for _, given, _, counts in parts]
            for d, (taken, _, expected, _) in enumerate(parts):
                for r, piece in enumerate(torch.split(taken, expected)):
                    piece.copy_(pieces[r][d])

        return self._run("all_to_all_single", (output, input, out_counts, in_counts), complete, async_op)

    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False) -> Work:
        """See `Communicator.all_reduce`; low precision is summed in float32, in rank order."""
        check_reduce_op(self.rank, op)

        def complete(parts: list[Tensor]) -> None:
            if len({(t.shape, t.dtype) for t in parts}) != 1:
                raise ValueError(f"all_reduce: tensors differ over ranks: {[(tuple(t.shape), t.dtype) for t in parts]}")
            wide = torch.float32 if parts[0].dtype in (torch.float16, torch.bfloat16) else parts[0].dtype
            total = parts[0].to(wide, copy=True)
            for part in parts[1:]:
                if op in ("sum", "avg"):
                    total.add_(part.to(wide))
                else:
                    torch.maximum(total, part.to(wide), out=total) if op == "max" else torch.minimum(
                        total, part.to(wide), out=total
                    )
            if op == "avg":
                total = total / len(parts)
            for part in parts:
                part.copy_(total)

        return self._run(f"all_reduce({op})", tensor, complete, async_op)

    def all_gather(self, outputs: Sequence[Tensor], input: Tensor, async_op: bool = False) -> Work:
        """See `Communicator.all_gather`."""
        if len(outputs) != self.size or any(o.shape != input.shape or o.dtype != input.dtype for o in outputs):
            raise ValueError(
                f"rank {self.rank}: all_gather: outputs must be {self.size} tensors of the shape and dtype of input "
                f"{tuple(input.shape)} {input.dtype}, got {[(tuple(o.shape), o.dtype) for o in outputs]}"
            )

        def complete(parts: list[tuple[list[Tensor], Tensor]]) -> None:
            if len({(t.shape, t.dtype) for _, t in parts}) != 1:
                raise ValueError(
                    f"all_gather: inputs differ over ranks: {[(tuple(t.shape), t.dtype) for _, t in parts]}"
                )
            given = [t.clone() for _, t in parts]  # an output may be somebody's input
            for taken, _ in parts:
                for out, value in zip(taken, given, strict=True):
                    out.copy_(value)

        return self._run("all_gather", (list(outputs), input), complete, async_op)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """See `Communicator.all_gather_object`; every rank gets copies of its own."""
        objects: list[Any] = []

        def complete(parts: list[tuple[list[Any], Any]]) -> None:
            values = [value for _, value in parts]
            for taken, _ in parts:
                taken.extend(copy.deepcopy(values))

        self._run("all_gather_object", (objects, obj), complete, False)
        return objects

    def broadcast(self, tensor: Tensor, src: int = 0, async_op: bool = False) -> Work:
        """See `Communicator.broadcast`."""
        check_rank(self.rank, self.size, "broadcast: src", src)

        def complete(parts: list[Tensor]) -> None:
            for part in parts:
                if part.shape != parts[src].shape or part.dtype != parts[src].dtype:
                    raise ValueError(f"broadcast: tensors differ: {[(tuple(t.shape), t.dtype) for t in parts]}")
                if part is not parts[src]:
                    part.copy_(parts[src])

        return self._run(f"broadcast(src={src})", tensor, complete, async_op)

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self._run("barrier", None, lambda parts: None, False)

    def new_group(self, ranks: Sequence[int]) -> ThreadCommunicator | None:
        """The communicator of a subgroup (ranks of this group, in the order given), ``None`` for non-members.

        No communication; the n-th call with the same ranks meets the n-th call of the other members.
        """
        chosen = tuple(int(r) for r in ranks)
        for r in chosen:
            check_rank(self.rank, self.size, "new_group: ranks", r)
        if len(set(chosen)) != len(chosen):
            raise ValueError(f"rank {self.rank}: new_group: ranks must be distinct, got {list(chosen)}")
        if self.rank not in chosen:
            return None
        nth = self._subgroups.get(chosen, 0)
        self._subgroups[chosen] = nth + 1
        members = tuple(self._channel.members[r] for r in chosen)
        run = self._run_state
        with self._world._changed:
            channel = run.subgroups.setdefault((id(self._channel), members, nth), _Channel(members))
        return ThreadCommunicator(self._world, run, channel, chosen.index(self.rank))


class ThreadWorld:
    """``size`` ranks as threads: ``ThreadWorld(4).run(fn, *args)`` calls ``fn(comm, *args)`` in each.

    A rank that raises ends the others at their next wait; ``run`` then raises `RankFailure` with its rank and
    traceback. A rank that returns while another waits for it, or that does not come within ``timeout_s``, is reported
    in the same way. Communicators stay the same objects from one ``run`` to the next.

    Args:
        size: number of ranks, at least 1.
        timeout_s: longest wait inside one collective, in seconds.
    """

    def __init__(self, size: int, *, timeout_s: float = 120.0) -> None:
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"size must be a positive number of ranks, got {size!r}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s!r}")
        self.size = size
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._make_comms()

    def _make_comms(self) -> None:
        run = _Run(self.size)
        self.comms: tuple[ThreadCommunicator, ...] = tuple(
            ThreadCommunicator(self, run, run.channel, r) for r in range(self.size)
        )

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``fn(comm, *args, **kwargs)`` on every rank and return the results in rank order.

        Raises:
            RankFailure: from the exception of the rank that failed first.
        """
        run, comms = _Run(self.size), self.comms
        for comm in comms:
            comm._begin(run, run.channel)
        results: list[Any] = [None] * self.size
        errors: list[tuple[int, BaseException, str]] = []  # in order of time

        def main(rank: int) -> None:
            try:
                results[rank] = fn(comms[rank], *args, **kwargs)
            except BaseException as error:
                with self._changed:
                    errors.append((rank, error, traceback.format_exc()))
                    if run.failed is None:
                        run.failed = (rank, f"{type(error).__name__}: {error}")
                    self._changed.notify_all()
            else:
                with self._changed:
                    run.returned.add(rank)
                    self._changed.notify_all()

        threads = [threading.Thread(target=main, args=(r,), name=f"rank-{r}", daemon=True) for r in range(self.size)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.5)
                    if errors and thread.is_alive():
                        thread.join(self.timeout_s)  # others end at their next wait; one that computes may take long
                        break
            if any(thread.is_alive() for thread in threads):
                self._make_comms()  # a rank that never ends must not meet the next run
        except BaseException as error:  # an interrupt: let no rank wait on
            with self._changed:
                run.failed = (-1, f"interrupted by {type(error).__name__}")
                self._changed.notify_all()
            raise
        if errors:
            rank, first, details = next((e for e in errors if not isinstance(e[1], RankAborted)), errors[0])
            raise RankFailure(rank, self.size, f"{type(first).__name__}: {first}", details) from first
        return results
