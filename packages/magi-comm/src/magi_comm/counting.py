"""`CountingCommunicator`: what a rank sends and receives, counted where it happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .groups import GroupLike, Work, as_communicator

__all__ = ["CountingCommunicator", "Traffic"]


@dataclass
class Traffic:
    """What one rank exchanged with *other* ranks. Rows are tokens wherever dim 0 is tokens."""

    calls: int = 0
    tokens_sent: int = 0
    tokens_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    tokens_sent_to: list[int] = field(default_factory=list)
    tokens_received_from: list[int] = field(default_factory=list)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.calls + other.calls,
            self.tokens_sent + other.tokens_sent,
            self.tokens_received + other.tokens_received,
            self.bytes_sent + other.bytes_sent,
            self.bytes_received + other.bytes_received,
            _add(self.tokens_sent_to, other.tokens_sent_to),
            _add(self.tokens_received_from, other.tokens_received_from),
        )


def _add(a: list[int], b: list[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)] if a and b else list(a or b)


class CountingCommunicator:
    """Passes every collective on to ``group`` and counts it, by name, in ``traffic``.

    A row sent to n ranks counts n times; what stays on the rank does not count. ``all_reduce`` counts its tensor once
    each way, whatever the algorithm underneath; objects and barriers count as calls only.
    """

    def __init__(self, group: GroupLike) -> None:
        self.comm = as_communicator(group)
        self.rank, self.size = self.comm.rank, self.comm.size
        self.traffic: dict[str, Traffic] = {}

    def __repr__(self) -> str:
        return f"CountingCommunicator({self.comm!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> CountingCommunicator:
        return self

    @property
    def total(self) -> Traffic:
        """The sum over all collectives since the last ``reset``."""
        return sum(self.traffic.values(), Traffic())

    def reset(self) -> None:
        """Forget what was counted."""
        self.traffic.clear()

    def _count(self, name: str, sent: Sequence[int], received: Sequence[int], row_bytes: int) -> None:
        """Add a call that sends ``sent[r]`` rows to rank r and receives ``received[r]`` from it."""
        to = [0 if r == self.rank else int(n) for r, n in enumerate(sent)]
        of = [0 if r == self.rank else int(n) for r, n in enumerate(received)]
        now = Traffic(1, sum(to), sum(of), sum(to) * row_bytes, sum(of) * row_bytes, to, of)
        self.traffic[name] = self.traffic.get(name, Traffic()) + now

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work:
        """See `Communicator.all_to_all_single`."""
        work = self.comm.all_to_all_single(output, input, output_split_sizes, input_split_sizes, async_op)
        sent = input_split_sizes or [input.shape[0] // self.size] * self.size
        received = output_split_sizes or [output.shape[0] // self.size] * self.size
        self._count("all_to_all_single", sent, received, _row_bytes(input))
        return work

    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False) -> Work:
        """See `Communicator.all_reduce`."""
        work = self.comm.all_reduce(tensor, op, async_op)
        other = (self.rank + 1) % self.size  # one peer stands for all
        rows = [_rows(tensor) if r == other else 0 for r in range(self.size)]
        self._count("all_reduce", rows, rows, _row_bytes(tensor))
        return work

    def all_gather(self, outputs: Sequence[Tensor], input: Tensor, async_op: bool = False) -> Work:
        """See `Communicator.all_gather`."""
        work = self.comm.all_gather(outputs, input, async_op)
        rows = [_rows(input)] * self.size
        self._count("all_gather", rows, rows, _row_bytes(input))
        return work

    def all_gather_object(self, obj: Any) -> list[Any]:
        """See `Communicator.all_gather_object`."""
        objects = self.comm.all_gather_object(obj)
        self._count("all_gather_object", [0] * self.size, [0] * self.size, 0)
        return objects

    def broadcast(self, tensor: Tensor, src: int = 0, async_op: bool = False) -> Work:
        """See `Communicator.broadcast`."""
        work = self.comm.broadcast(tensor, src, async_op)
        rows = _rows(tensor)
        sent = [rows if self.rank == src else 0] * self.size
        received = [rows if r == src else 0 for r in range(self.size)]
        self._count("broadcast", sent, received, _row_bytes(tensor))
        return work

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self.comm.barrier()
        self._count("barrier", [0] * self.size, [0] * self.size, 0)


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _row_bytes(tensor: Tensor) -> int:
    return tensor.element_size() * (tensor.shape[1:].numel() if tensor.dim() else 1)
