"""Communicators: one small interface over every group of ranks that the collectives of this package run on.

A communicator is a rank's view of a group. ``as_communicator`` makes one of a ``torch.distributed`` process group or a
one-dimensional ``DeviceMesh``; ``magi_comm.testing.ThreadWorld`` makes them of threads. Ranks are always ranks *in the
group*, never global ones. Collectives are called by every rank of the group in the same order; a rank with nothing to
send or receive joins with zero splits.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "Communicator",
    "CompletedWork",
    "GroupCommunicator",
    "GroupLike",
    "SingleCommunicator",
    "Work",
    "as_communicator",
    "check_all_to_all",
]


class Work(Protocol):
    """Handle of a collective in flight."""

    def wait(self) -> Any:
        """Block until done (on CUDA: make the current stream wait). Inputs may be overwritten afterwards."""

    def is_completed(self) -> bool:
        """Whether ``wait`` would return at once."""


@runtime_checkable
class Communicator(Protocol):
    """A rank's view of a group of ranks. Hashable by identity; ``as_communicator`` returns the same one per group."""

    @property
    def rank(self) -> int:
        """This rank in the group."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work:
        """Send ``input_split_sizes[r]`` rows to rank ``r``; rows from rank 0, 1, … land in ``output`` in that order.

        Args:
            output, input: contiguous, same dtype, same shape but for dim 0. Any dtype; bytes travel unchanged.
            output_split_sizes, input_split_sizes: one count of rows per rank, zeros allowed; ``None`` is even.
        """

    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False) -> Work:
        """Replace ``tensor`` by its ``"sum"``, ``"avg"``, ``"max"`` or ``"min"`` over ranks."""

    def all_gather(self, outputs: Sequence[Tensor], input: Tensor, async_op: bool = False) -> Work:
        """Fill ``outputs[r]`` with rank ``r``'s ``input``; all of one shape and dtype."""

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's ``obj`` (picklable), in rank order. Synchronises; for set-up, not for the hot path."""

    def broadcast(self, tensor: Tensor, src: int = 0, async_op: bool = False) -> Work:
        """Overwrite ``tensor`` with that of rank ``src`` of the group."""

    def barrier(self) -> None:
        """Return when every rank has called it."""


GroupLike: TypeAlias = "dist.ProcessGroup | DeviceMesh | Communicator | None"

REDUCE_OPS = ("sum", "avg", "max", "min")


class CompletedWork:
    """Work that was done when it was made."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """True."""
        return True


def check_all_to_all(
    rank: int,
    size: int,
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
) -> tuple[list[int], list[int]]:
    """Validate one rank's ``all_to_all_single`` arguments and return both split lists as lists of ints.

    Everything that one rank can know alone is refused here, before a peer could wait for it.

    Raises:
        ValueError, TypeError: naming the rank and the argument.
    """
    where = f"rank {rank} of {size}: all_to_all_single"
    for name, tensor in (("output", output), ("input", input)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{where}: {name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() == 0 or not tensor.is_contiguous():
            raise ValueError(
                f"{where}: {name} must be contiguous with at least one dim, got shape {tuple(tensor.shape)} "
                f"and strides {tensor.stride()}"
            )
    if output.dtype != input.dtype or output.shape[1:] != input.shape[1:] or output.device != input.device:
        raise ValueError(
            f"{where}: output must have the dtype, row shape and device of input ({input.dtype}, "
            f"{tuple(input.shape[1:])}, {input.device}), got {output.dtype}, {tuple(output.shape[1:])}, {output.device}"
        )
    result = []
    for name, tensor, splits in (("output", output, output_split_sizes), ("input", input, input_split_sizes)):
        rows = tensor.shape[0]
        if splits is None:
            if rows % size:
                raise ValueError(f"{where}: {name} has {rows} rows, not divisible by {size}; give {name}_split_sizes")
            splits = [rows // size] * size
        counts = [int(s) for s in splits]
        if len(counts) != size or min(counts) < 0 or sum(counts) != rows:
            raise ValueError(
                f"{where}: {name}_split_sizes must be {size} non-negative counts that sum to the {rows} rows of "
                f"{name}, got {counts}"
            )
        result.append(counts)
    out_counts, in_counts = result
    if out_counts[rank] != in_counts[rank]:
        raise ValueError(
            f"{where}: sends itself input_split_sizes[{rank}] = {in_counts[rank]} rows but expects "
            f"output_split_sizes[{rank}] = {out_counts[rank]}"
        )
    return out_counts, in_counts


def check_reduce_op(rank: int, op: str) -> None:
    """Refuse an unknown name of a reduction."""
    if op not in REDUCE_OPS:
        raise ValueError(f"rank {rank}: all_reduce: op must be one of {', '.join(REDUCE_OPS)}, got {op!r}")


def check_rank(rank: int, size: int, name: str, value: int) -> None:
    """Refuse a rank outside the group."""
    if not 0 <= value < size:
        raise ValueError(f"rank {rank}: {name} must be a rank of the group, 0 to {size - 1}, got {value}")


def _as_bytes(tensor: Tensor) -> Tensor:
    """``(rows, row_bytes)`` uint8 view: every backend moves bytes, not every backend moves every dtype."""
    rows = tensor.shape[0]
    row_bytes = tensor.element_size()
    for extent in tensor.shape[1:]:
        row_bytes *= extent
    if tensor.numel() == 0:
        return torch.empty((rows, row_bytes), dtype=torch.uint8, device=tensor.device)
    return tensor.detach().reshape(rows, -1).view(torch.uint8)


class SingleCommunicator:
    """The group of one rank: every collective is a copy. Used where ``torch.distributed`` is not initialised."""

    rank = 0
    size = 1

    def __repr__(self) -> str:
        return "SingleCommunicator()"

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work:
        """Copy ``input`` to ``output``."""
        check_all_to_all(0, 1, output, input, output_split_sizes, input_split_sizes)
        with torch.no_grad():
            output.copy_(input)
        return CompletedWork()

    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False) -> Work:
        """Leave ``tensor`` as it is."""
        check_reduce_op(0, op)
        return CompletedWork()

    def all_gather(self, outputs: Sequence[Tensor], input: Tensor, async_op: bool = False) -> Work:
        """Copy ``input`` to ``outputs[0]``."""
        if len(outputs) != 1:
            raise ValueError(f"rank 0: all_gather: outputs must have one tensor per rank (1), got {len(outputs)}")
        with torch.no_grad():
            outputs[0].copy_(input)
        return CompletedWork()

    def all_gather_object(self, obj: Any) -> list[Any]:
        """``[obj]``."""
        return [obj]

    def broadcast(self, tensor: Tensor, src: int = 0, async_op: bool = False) -> Work:
        """Leave ``tensor`` as it is."""
        check_rank(0, 1, "broadcast: src", src)
        return CompletedWork()

    def barrier(self) -> None:
        """Return at once."""


class GroupCommunicator:
    """A ``torch.distributed`` process group of any backend. Make it with ``as_communicator``, which caches it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(f"group must contain the calling process (global rank {dist.get_rank()}); it does not")
        self.group = group
        self.rank = rank
        self.size = dist.get_world_size(group)
        self.backend = dist.get_backend(group)

    def __repr__(self) -> str:
        return f"GroupCommunicator(rank={self.rank}, size={self.size}, backend={self.backend!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupCommunicator:
        return self  # a group is an identity, not a value

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work:
        """See `Communicator.all_to_all_single`."""
        out_counts, in_counts = check_all_to_all(
            self.rank, self.size, output, input, output_split_sizes, input_split_sizes
        )
        work = dist.all_to_all_single(
            _as_bytes(output), _as_bytes(input), out_counts, in_counts, group=self.group, async_op=async_op
        )
        return work if work is not None else CompletedWork()

    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False) -> Work:
        """See `Communicator.all_reduce`; gloo has no average of its own, so the sum is divided when waited for."""
        check_reduce_op(self.rank, op)
        native = {
            "sum": dist.ReduceOp.SUM,
            "avg": dist.ReduceOp.SUM,
            "max": dist.ReduceOp.MAX,
            "min": dist.ReduceOp.MIN,
        }
        work = dist.all_reduce(tensor.detach(), op=native[op], group=self.group, async_op=async_op)
        work = work if work is not None else CompletedWork()
        if op != "avg":
            return work
        divided = _DividedWork(work, tensor, self.size)
        if not async_op:
            divided.wait()
        return divided

    def all_gather(self, outputs: Sequence[Tensor], input: Tensor, async_op: bool = False) -> Work:
        """See `Communicator.all_gather`."""
        if len(outputs) != self.size or any(o.shape != input.shape or o.dtype != input.dtype for o in outputs):
            raise ValueError(
                f"rank {self.rank}: all_gather: outputs must be {self.size} tensors of the shape and dtype of input "
                f"{tuple(input.shape)} {input.dtype}, got {[(tuple(o.shape), o.dtype) for o in outputs]}"
            )
        work = dist.all_gather([o.detach() for o in outputs], input.detach(), group=self.group, async_op=async_op)
        return work if work is not None else CompletedWork()

    def all_gather_object(self, obj: Any) -> list[Any]:
        """See `Communicator.all_gather_object`."""
        objects: list[Any] = [None] * self.size
        dist.all_gather_object(objects, obj, group=self.group)
        return objects

    def broadcast(self, tensor: Tensor, src: int = 0, async_op: bool = False) -> Work:
        """See `Communicator.broadcast`."""
        check_rank(self.rank, self.size, "broadcast: src", src)
        work = dist.broadcast(tensor.detach(), group=self.group, async_op=async_op, group_src=src)
        return work if work is not None else CompletedWork()

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        dist.barrier(group=self.group)


class _DividedWork:
    """A sum in flight that becomes an average when it is waited for."""

    def __init__(self, work: Work, tensor: Tensor, divisor: int) -> None:
        self._work, self._tensor, self._divisor = work, tensor, divisor

    def wait(self) -> None:
        self._work.wait()
        if self._divisor:
            with torch.no_grad():
                self._tensor.div_(self._divisor)
            self._divisor = 0

    def is_completed(self) -> bool:
        return self._work.is_completed()


# By identity of the group. Values are weak and hold their group, so an id cannot be reused while its entry lives.
_communicators: weakref.WeakValueDictionary[int, GroupCommunicator] = weakref.WeakValueDictionary()
_single = SingleCommunicator()


def as_communicator(group: GroupLike = None) -> Communicator:
    """The communicator of ``group``; the same object each time for the same group while somebody holds it.

    Args:
        group: a process group, a one-dimensional ``DeviceMesh``, a two-dimensional one with axes (inter-node,
            intra-node), a communicator (returned as it is), or ``None`` for the default process group, and for the
            group of this one rank where ``torch.distributed`` is not initialised. The first call for a
            two-dimensional mesh that is not the whole world is a collective.

    Raises:
        TypeError: ``group`` is something else. ValueError: the mesh has more than two axes, or the calling process is
        no member of the group.
    """
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return _single
        group = dist.group.WORLD
    if isinstance(group, DeviceMesh):
        if group.ndim == 2:
            from .two_level import TwoLevelCommunicator

            return TwoLevelCommunicator.from_mesh(group)
        if group.ndim != 1:
            raise ValueError(f"group must be a DeviceMesh of one or two mesh axes, got {group.ndim}")
        group = group.get_group()
    if isinstance(group, dist.ProcessGroup):
        found = _communicators.get(id(group))
        if found is None:
            found = _communicators[id(group)] = GroupCommunicator(group)
        return found
    not_a_member: Any = dist.GroupMember.NON_GROUP_MEMBER
    if group is not_a_member:
        raise ValueError("group must contain the calling process; this is what new_group gives to the others")
    if isinstance(group, Communicator):
        return group
    raise TypeError(
        "group must be a ProcessGroup, a DeviceMesh of one or two axes, a Communicator or None, "
        f"got {type(group).__name__}"
    )
