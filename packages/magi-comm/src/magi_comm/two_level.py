"""Two levels of links: each row crosses between nodes once per destination node, then spreads inside it.

Ranks form a grid (node, local rank). A row for several ranks of another node goes once to the *relay*, the rank there
with the sender's local rank, and from it to each of them; partial results are summed by the relay before they go back.
Without the relay a row crosses as often as there are ranks that need it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .groups import Communicator, GroupLike, Work, as_communicator
from .range_exchange import RangeExchange
from .rows import IntArray, RowRuns, wide_dtype

__all__ = ["TwoLevelCommunicator", "TwoLevelExchange", "make_exchange"]


class TwoLevelCommunicator:
    """A group with its grid. Collectives run on the whole group; `TwoLevelExchange` uses the two levels.

    Args:
        flat: the whole group; its rank is ``inter.rank * intra.size + intra.rank``.
        inter: ranks with this local rank, in order of nodes.
        intra: ranks of this node, in order of local ranks.
    """

    def __init__(self, flat: GroupLike, inter: GroupLike, intra: GroupLike) -> None:
        self.flat, self.inter, self.intra = as_communicator(flat), as_communicator(inter), as_communicator(intra)
        self.rank, self.size = self.flat.rank, self.flat.size
        expected = self.inter.rank * self.intra.size + self.intra.rank
        if self.size != self.inter.size * self.intra.size or self.rank != expected:
            raise ValueError(
                f"flat must be the grid of inter x intra ({self.inter.size} x {self.intra.size}, this rank {expected})"
                f", got rank {self.rank} of {self.size}"
            )

    def __repr__(self) -> str:
        return f"TwoLevelCommunicator(rank={self.rank}, nodes={self.inter.size}, node_size={self.intra.size})"

    def __deepcopy__(self, memo: dict[int, Any]) -> TwoLevelCommunicator:
        return self

    @staticmethod
    def from_mesh(mesh: DeviceMesh) -> TwoLevelCommunicator:
        """The communicator of a mesh with axes (inter-node, intra-node); the same one for the same groups.

        Collective over the ranks of the mesh (and of the mesh that it is a slice of) the first time, unless it is the
        default group in order.
        """
        if mesh.ndim != 2:
            raise ValueError(f"mesh must have two axes (inter-node, intra-node), got {mesh.ndim}")
        inter, intra = as_communicator(mesh.get_group(0)), as_communicator(mesh.get_group(1))
        key = (id(inter), id(intra))
        found = _of_mesh.get(key)
        if found is None:
            flat: Any = dist.group.WORLD
            if [int(r) for r in mesh.mesh.flatten()] != list(range(dist.get_world_size())):
                if not mesh.mesh_dim_names:
                    raise ValueError(
                        "mesh must have mesh_dim_names where it is not the default group in order, so that a group "
                        f"of all its ranks can be made; got none on {mesh}"
                    )
                # Not new_group(use_local_synchronization=True): ranks that are in different numbers of groups derive
                # different names from it, and wait for each other for ever.
                flat = mesh._flatten().get_group()
            found = _of_mesh[key] = TwoLevelCommunicator(flat, inter, intra)
        return found

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work:
        """See `Communicator.all_to_all_single`."""
        return self.flat.all_to_all_single(output, input, output_split_sizes, input_split_sizes, async_op)

    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False) -> Work:
        """See `Communicator.all_reduce`."""
        return self.flat.all_reduce(tensor, op, async_op)

    def all_gather(self, outputs: Sequence[Tensor], input: Tensor, async_op: bool = False) -> Work:
        """See `Communicator.all_gather`."""
        return self.flat.all_gather(outputs, input, async_op)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """See `Communicator.all_gather_object`."""
        return self.flat.all_gather_object(obj)

    def broadcast(self, tensor: Tensor, src: int = 0, async_op: bool = False) -> Work:
        """See `Communicator.broadcast`."""
        return self.flat.broadcast(tensor, src, async_op)

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self.flat.barrier()


# Values hold their communicators, so an id cannot be reused while its entry lives.
_of_mesh: weakref.WeakValueDictionary[tuple[int, int], TwoLevelCommunicator] = weakref.WeakValueDictionary()


class TwoLevelExchange(RangeExchange):
    """A `RangeExchange` over two levels of links: same results of ``cast``, fewer rows between nodes.

    ``reduce`` sums in fixed order too, but in another: own rows, then ranks of the own node, then the other nodes'
    sums. These are formed by their relays in float32 and travel in the wire dtype: one rounding more where that is
    narrower. With ``async_op`` the second hop starts in ``wait``: ranks must wait for their works in the same order.

    Args:
        group: a `TwoLevelCommunicator`, or a mesh with axes (inter-node, intra-node).
        recv, send, num_local: as `RangeExchange`.
        sends: the ``send`` of every rank in rank order, where the caller knows them; gathered (a collective) when None.
    """

    def __init__(
        self,
        group: GroupLike,
        recv: npt.ArrayLike,
        send: npt.ArrayLike,
        *,
        num_local: int | None = None,
        sends: Sequence[npt.ArrayLike] | None = None,
    ) -> None:
        comm = as_communicator(group)
        if not isinstance(comm, TwoLevelCommunicator):
            raise TypeError(
                f"group must be a TwoLevelCommunicator or a mesh (inter-node, intra-node), got {type(comm).__name__}"
            )
        super().__init__(comm, recv, send, num_local=num_local)
        own_recv, own_send = self._parse("recv", recv), self._parse("send", send)
        if sends is None:
            everyone = comm.all_gather_object(own_send)
        else:
            everyone = [self._parse(f"sends[{r}]", rows) for r, rows in enumerate(sends)]
            if len(everyone) != comm.size or not np.array_equal(everyone[comm.rank], own_send):
                raise ValueError(
                    f"{self._where}: sends must hold the rows of each of the {comm.size} ranks, send at this rank's "
                    f"place, got {len(everyone)}"
                )
        self._plan(comm, own_recv, everyone)

    def _plan(self, comm: TwoLevelCommunicator, recv: IntArray, sends: list[IntArray]) -> None:
        width, node, local = comm.intra.size, comm.inter.rank, comm.intra.rank
        others = [a for a in range(comm.inter.size) if a != node]

        def stream(source: int, target: int) -> IntArray:
            """Ranges of the source's rows for the target, (n, 2), in order."""
            rows = sends[source]
            return rows[rows[:, 0] == target, 1:]

        def union(source: int, to_node: int) -> IntArray:
            """What the source sends to a node: every row once, ascending, (n, 2)."""
            rows = sends[source]
            return _merge(rows[rows[:, 0] // width == to_node, 1:])

        # Inside the node, directly.
        near = np.array([(t % width, a, b) for t in range(node * width, (node + 1) * width)
                         for a, b in stream(comm.rank, t)], np.int64).reshape(-1, 3)  # fmt: skip
        is_near = recv[:, 0] // width == node
        near_recv = recv[is_near].copy()
        near_recv[:, 0] %= width
        self._near = RangeExchange(comm.intra, near_recv, near)
        # To the relay of each other node, and what comes here as a relay: by node, ascending.
        far = [(b, *r) for b in others for r in union(comm.rank, b).tolist()]
        relayed = [(a, *r) for a in others for r in union(a * width + local, node).tolist()]
        self._far = RangeExchange(comm.inter, relayed, far)
        # From the relay to the ranks of this node, rows of the relay's buffer.
        bases, base = {}, 0
        for a in others:
            bases[a] = base
            base += _size(union(a * width + local, node))
        spread = []
        for j in range(width):
            for a in others:
                source = a * width + local
                offsets = _locate(stream(source, node * width + j), union(source, node), bases[a])
                spread += [(j, first, first + n) for first, n in offsets]
        taken = [(i, 0, _size(stream(a * width + i, comm.rank))) for i in range(width) for a in others]
        self._spread = RangeExchange(comm.intra, taken, spread)
        # Where received rows lie: those of the own node in order, then by relay, node, and order of the source.
        next_row: dict[int, int] = {}
        base = self._near.num_recv
        for i in range(width):
            for a in others:
                next_row[a * width + i] = base
                base += _size(stream(a * width + i, comm.rank))
        near_row = 0
        arrived, lengths = [], recv[:, 2] - recv[:, 1]
        for (source, _, _), length in zip(recv.tolist(), lengths.tolist(), strict=True):
            if source // width == node:
                arrived.append(near_row)
                near_row += length
            else:
                arrived.append(next_row[source])
                next_row[source] += length
        starts = np.array(arrived, np.int64)
        ends = np.cumsum(lengths)
        is_far = ~is_near
        self._place_near = RowRuns(starts[is_near], (ends - lengths)[is_near], lengths[is_near])
        self._place_far = RowRuns(
            starts[is_far] - self._near.num_recv, (ends - lengths)[is_far], lengths[is_far]
        )  # fmt: skip
        for name, got, expected in (
            ("of its node", self._near.num_recv + self._spread.num_recv, self.num_recv),
            ("by relays", sum(_size(stream(s, comm.rank)) for s in range(comm.size)), self.num_recv),
        ):
            if got != expected:
                raise ValueError(f"{self._where}: recv expects {expected} rows, the sends {name} give {got}")

    def start_cast(
        self, inputs: list[Tensor], async_op: bool
    ) -> tuple[Work, Callable[[list[Tensor] | None], list[Tensor]]]:
        """See `RangeExchange.start_cast`."""
        far, unpack_far = self._far.start_cast(inputs, True)
        near, unpack_near = self._near.start_cast(inputs, True)

        def unpack(outs: list[Tensor] | None) -> list[Tensor]:
            far.wait()
            spread, unpack_spread = self._spread.start_cast(unpack_far(None), False)
            spread.wait()
            near.wait()
            results = []
            for i, (a, b) in enumerate(zip(unpack_near(None), unpack_spread(None), strict=True)):
                with torch.no_grad():
                    shape = (self.num_recv, *a.shape[1:])
                    out = torch.empty(shape, dtype=a.dtype, device=a.device) if outs is None else outs[i]
                    self._place_near.copy(out, a)
                    self._place_far.copy(out, b)
                results.append(out[: self.num_recv])
            return results

        return _both(far, near, async_op), unpack

    def start_reduce(
        self, inputs: list[Tensor], op: str, wire_dtype: torch.dtype | None, async_op: bool
    ) -> tuple[Work, Callable[[list[Tensor], torch.dtype | None, bool], None]]:
        """See `RangeExchange.start_reduce`."""
        merges = op == "lse"
        with torch.no_grad():
            near_parts = [_take(self._place_near, t, self._near.num_recv) for t in inputs]
            far_parts = [_take(self._place_far, t, self._spread.num_recv) for t in inputs]
        inner = "sum" if op == "avg" else op
        gathered, fold_gathered = self._spread.start_reduce(far_parts, inner, wire_dtype, True)
        near, fold_near = self._near.start_reduce(near_parts, inner, wire_dtype, True)

        def fold(targets: list[Tensor], wide: torch.dtype | None, count_own: bool) -> None:
            gathered.wait()
            with torch.no_grad():
                travel = [t.dtype if wire_dtype is None or (merges and i == 1) else wire_dtype
                          for i, t in enumerate(inputs)]  # fmt: skip
                sums = [
                    t.new_full(
                        (self._far.num_recv, *t.shape[1:]),
                        float("-inf") if merges and i == 1 else 0.0,
                        dtype=wide_dtype(t.dtype, *([] if wide is None else [wide])),
                    )
                    for i, t in enumerate(inputs)
                ]
                fold_gathered(sums, wide, True)
                sums = [s.to(dtype) for s, dtype in zip(sums, travel, strict=True)]
                far, fold_far = self._far.start_reduce(sums, inner, None, False)
                far.wait()
                near.wait()
                accumulators = [
                    target.to(wide_dtype(t.dtype, target.dtype, *([] if wide is None else [wide])))
                    for t, target in zip(inputs, targets, strict=True)
                ]
                fold_near(accumulators, wide, True)
                fold_far(accumulators, wide, True)
                for accumulator, target in zip(accumulators, targets, strict=True):
                    if op == "avg":
                        counts = self._fold.counts(target.shape[0], target.device)
                        divisors = (counts + 1 if count_own else counts.clamp(min=1)).to(accumulator.dtype)
                        accumulator.div_(divisors.reshape(-1, *([1] * (target.dim() - 1))))
                    if accumulator is not target:
                        target.copy_(accumulator)

        return _both(gathered, near, async_op), fold


class _Both:
    def __init__(self, *works: Work) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _both(a: Work, b: Work, async_op: bool) -> Work:
    both = _Both(a, b)
    if not async_op:
        both.wait()
    return both


def _take(runs: RowRuns, tensor: Tensor, rows: int) -> Tensor:
    """Rows of the result, back in the order in which they arrived."""
    out = torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    RowRuns(runs.dst, runs.src, runs.lengths).copy(out, tensor)
    return out


def _size(ranges: IntArray) -> int:
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def _merge(ranges: IntArray) -> IntArray:
    """The same rows, each once: sorted, with touching and overlapping ranges fused."""
    ranges = ranges[ranges[:, 1] > ranges[:, 0]]
    if len(ranges) == 0:
        return ranges
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    ends = np.maximum.accumulate(ranges[:, 1])
    heads = np.flatnonzero(np.concatenate([[True], ranges[1:, 0] > ends[:-1]]))
    lasts = np.append(heads[1:], len(ranges)) - 1
    merged: IntArray = np.stack([ranges[heads, 0], ends[lasts]], axis=1)
    return merged


def _locate(ranges: IntArray, merged: IntArray, base: int) -> list[tuple[int, int]]:
    """(first row, length) of each range in the concatenation of ``merged``, which starts at ``base``."""
    ranges = ranges[ranges[:, 1] > ranges[:, 0]]
    if len(ranges) == 0:
        return []
    lengths = merged[:, 1] - merged[:, 0]
    firsts = np.cumsum(lengths) - lengths
    inside = np.searchsorted(merged[:, 0], ranges[:, 0], side="right") - 1
    first = base + firsts[inside] + ranges[:, 0] - merged[inside, 0]
    return [(int(a), int(n)) for a, n in zip(first, ranges[:, 1] - ranges[:, 0], strict=True)]


def make_exchange(
    group: GroupLike,
    recv: npt.ArrayLike,
    send: npt.ArrayLike,
    *,
    num_local: int | None = None,
    sends: Sequence[npt.ArrayLike] | None = None,
) -> RangeExchange:
    """The exchange that fits the group: `TwoLevelExchange` on two levels of more than one rank, else `RangeExchange`.

    Args: as `TwoLevelExchange`; on two levels without ``sends`` this is a collective.
    """
    comm: Communicator = as_communicator(group)
    if isinstance(comm, TwoLevelCommunicator) and comm.inter.size > 1 and comm.intra.size > 1:
        return TwoLevelExchange(comm, recv, send, num_local=num_local, sends=sends)
    return RangeExchange(comm, recv, send, num_local=num_local)
