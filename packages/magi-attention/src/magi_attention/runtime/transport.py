"""Between the global order and a rank's shard: dispatch, undispatch, roll, and their gradients.

``dispatch`` takes a tensor that every rank holds whole and keeps the rank's tokens; its gradient gathers the ranks'
gradients, so that every rank has the whole one. ``undispatch`` gathers; its gradient takes the rank's tokens of a
gradient that every rank holds whole, or, with ``is_partial_grad``, first sums the ranks' different gradients.
``roll`` is a permutation of the true global sequence: its gradient rolls back. Padding is filled with ``pad_value`` on
the way in and has no gradient. Every rank takes part in each collective, with empty parts too.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from magi_comm.groups import Communicator
from torch import Tensor

from .placement import Exchange, TokenPlacement

_T = TypeVar("_T")

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# What torch copies by index.
_INDEXED = frozenset(
    (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
) | frozenset((*_INTEGERS.values(), torch.int8))


class IndexCache:
    """Index tensors of one placement, made once per device; the least recently used of many shifts go.

    Args:
        max_size: tensors kept.
    """

    def __init__(self, max_size: int = 64) -> None:
        self._max_size = max_size
        self._lock = threading.Lock()
        self._values: OrderedDict[Any, Any] = OrderedDict()

    def get(self, name: Any, make: Callable[[], _T]) -> _T:
        """The value of ``name``, made by ``make`` the first time."""
        with self._lock:
            if name in self._values:
                self._values.move_to_end(name)
                return self._values[name]  # type: ignore[no-any-return]
        value = make()
        with self._lock:
            self._values[name] = value
            while len(self._values) > self._max_size:
                self._values.popitem(last=False)
        return value


def _on(indices: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(indices)).to(device, non_blocking=True)


class Transport:
    """One rank's side of a placement: what moves its shard in and out.

    All methods take and return plain tensors with tokens along dim 0 and know nothing of autograd.
    """

    def __init__(self, placement: TokenPlacement, comm: Communicator) -> None:
        self.placement = placement
        self.comm = comm
        self.num_tokens = placement.num_tokens[comm.rank]
        self.shard_len = placement.shard_lens[comm.rank]
        self._cache = IndexCache()

    def _index(self, name: str, make: Callable[[], np.ndarray], device: torch.device) -> Tensor:
        return self._cache.get((name, device), lambda: _on(make(), device))

    def _padded(self, x: Tensor, pad_value: float) -> Tensor:
        if self.shard_len == x.shape[0]:
            return x
        pad = x.new_full((self.shard_len - x.shape[0], *x.shape[1:]), pad_value)
        return torch.cat([x, pad])

    def scatter(self, x: Tensor, pad_value: float = 0.0) -> Tensor:
        """``(total, ...)`` held by every rank to this rank's ``(shard_len, ...)``."""
        index = self._index("tokens", lambda: self.placement.tokens(self.comm.rank), x.device)
        return self._padded(x.index_select(0, index), pad_value)

    def gather(self, local: Tensor) -> Tensor:
        """This rank's ``(shard_len, ...)`` to ``(total, ...)`` on every rank; padding is dropped."""
        local = local[: self.num_tokens]
        if self.comm.size == 1:
            index = self._index("restore", lambda: self.placement.gathered_index(self.num_tokens), local.device)
            return local.index_select(0, index)
        stride = max(self.placement.num_tokens)
        rows = local.contiguous()
        if rows.shape[0] < stride:
            rows = torch.cat([rows, rows.new_zeros((stride - rows.shape[0], *rows.shape[1:]))])
        gathered = rows.new_empty((self.comm.size * stride, *rows.shape[1:]))
        if gathered.numel():
            parts = [_as_bytes(part) for part in gathered.chunk(self.comm.size)]
            self.comm.all_gather(parts, _as_bytes(rows))
        index = self._index("gathered", lambda: self.placement.gathered_index(stride), local.device)
        return gathered.index_select(0, index)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum of every rank's ``(total, ...)`` at this rank's tokens: ``(shard_len, ...)``, zeros at padding.

        Summed in rank order, in float32 or wider.
        """
        if self.comm.size == 1:
            return self.scatter(x)
        order = self._index("rank_order", self.placement.rank_order, x.device)
        send = x.index_select(0, order)
        received = x.new_empty((self.comm.size * self.num_tokens, *x.shape[1:]))
        self.comm.all_to_all_single(
            received, send, [self.num_tokens] * self.comm.size, list(self.placement.num_tokens)
        ).wait()
        wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        parts = received.view(self.comm.size, self.num_tokens, *x.shape[1:])
        total = parts[0].to(wide, copy=True)
        for part in parts[1:]:
            total += part
        return self._padded(total.to(x.dtype), 0.0)

    def _exchange(self, shift: int, device: torch.device) -> tuple[Exchange, tuple[Tensor, ...]]:
        def make() -> tuple[Exchange, tuple[Tensor, ...]]:
            plan = self.placement.roll_exchange(self.comm.rank, shift)
            indices = (plan.copy_from, plan.copy_to, plan.send_index, plan.recv_index)
            return plan, tuple(_on(i, device) for i in indices)

        return self._cache.get(("roll", shift, device), make)

    def roll(self, local: Tensor, shift: int, pad_value: float = 0.0) -> Tensor:
        """The shard of ``torch.roll(whole, shift, 0)``; only tokens that change rank travel."""
        shift %= max(self.placement.total, 1)
        plan, (copy_from, copy_to, send_index, recv_index) = self._exchange(shift, local.device)
        rows = local.contiguous()
        if rows.dtype not in _INDEXED:  # float8 and wide unsigned types move as integers of their size
            rows = rows.view(_INTEGERS[rows.itemsize])
        result = rows.new_empty((self.num_tokens, *rows.shape[1:]))
        received = rows.new_empty((sum(plan.recv_splits), *rows.shape[1:]))
        work = None
        if self.comm.size > 1 and shift != 0:
            work = self.comm.all_to_all_single(
                received, rows.index_select(0, send_index), plan.recv_splits, plan.send_splits, async_op=True
            )
        result.index_copy_(0, copy_to, rows.index_select(0, copy_from))
        if work is not None:
            work.wait()
            result.index_copy_(0, recv_index, received)
        return self._padded(result.view(local.dtype), pad_value)

    def positions(self, device: torch.device) -> Tensor:
        """Global position of every token of the shard, int64; padding repeats the last token's."""
        return self._index("positions", lambda: self.placement.positions(self.comm.rank), device)


def _as_bytes(x: Tensor) -> Tensor:
    """A view as uint8: gloo does not gather every dtype."""
    return x.reshape(-1).view(torch.uint8)


class Dispatch(torch.autograd.Function):
    """``Transport.scatter``; gradient ``gather``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transport: Transport, pad_value: float) -> Tensor:
        ctx.transport = transport
        return transport.scatter(x, pad_value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transport.gather(grad), None, None


class Undispatch(torch.autograd.Function):
    """``Transport.gather``; gradient ``scatter``, or ``reduce_scatter`` of partial gradients."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, transport: Transport, is_partial_grad: bool) -> Tensor:
        ctx.transport, ctx.is_partial_grad = transport, is_partial_grad
        return transport.gather(local)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        transport = ctx.transport
        return (transport.reduce_scatter(grad) if ctx.is_partial_grad else transport.scatter(grad)), None, None


class Roll(torch.autograd.Function):
    """``Transport.roll`` along a dim; gradient rolls back."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, transport: Transport, shift: int, dim: int, pad_value: float) -> Tensor:
        ctx.transport, ctx.shift, ctx.dim = transport, shift, dim
        return roll_along(transport, local, shift, dim, pad_value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return roll_along(ctx.transport, grad, -ctx.shift, ctx.dim, 0.0), None, None, None, None


def roll_along(transport: Transport, x: Tensor, shift: int, dim: int, pad_value: float) -> Tensor:
    """``Transport.roll`` with tokens along ``dim``."""
    return transport.roll(x.movedim(dim, 0), shift, pad_value).movedim(0, dim)


__all__ = ["Dispatch", "IndexCache", "Roll", "Transport", "Undispatch", "roll_along"]
