"""Runs of rows: the maps between packed buffers and tensors that all exchanges and range operators are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .states import merge_states

__all__ = ["RowRuns", "accumulate", "expand", "wide_dtype"]

IntArray: TypeAlias = npt.NDArray[np.int64]
Selector: TypeAlias = "slice | Tensor"

# From this mean length on, one slice copy per run beats one gather over all rows (CPU: a gather costs about as much
# per row as 16 rows of a contiguous copy; a slice on a GPU is a launch).
_LONG_RUN = {"cpu": 16, "other": 4096}
_MAX_SLICES = 4096


def expand(starts: IntArray, lengths: IntArray) -> IntArray:
    """``concat(arange(s, s + n))`` over all (s, n)."""
    total = int(lengths.sum())
    if total == 0:
        return np.zeros(0, np.int64)
    first = np.cumsum(lengths) - lengths
    rows: IntArray = np.arange(total, dtype=np.int64) + np.repeat(starts - first, lengths)
    return rows


def wide_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype to accumulate in: float32, or float64 when one of ``dtypes`` is."""
    wide = torch.float32
    for dtype in dtypes:
        wide = torch.promote_types(wide, dtype)
    return wide


class RowRuns:
    """Row ``src[i] + t`` of one tensor belongs to row ``dst[i] + t`` of another, for ``t < lengths[i]``, in order i."""

    def __init__(self, src: IntArray, dst: IntArray, lengths: IntArray) -> None:
        some = lengths > 0
        src, dst, lengths = src[some], dst[some], lengths[some]
        if len(src) > 1:  # fuse runs that continue one another on both sides
            goes_on = (src[1:] == src[:-1] + lengths[:-1]) & (dst[1:] == dst[:-1] + lengths[:-1])
            heads = np.flatnonzero(np.concatenate([[True], ~goes_on]))
            lengths = np.add.reduceat(lengths, heads)
            src, dst = src[heads], dst[heads]
        self.src, self.dst, self.lengths = src, dst, lengths
        self.num_rows = int(lengths.sum())
        runs = np.stack([src, dst, lengths], axis=1).tolist()
        self._slices = [(slice(a, a + n), slice(b, b + n)) for a, b, n in runs]
        self._indices: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._levels: dict[torch.device, list[tuple[Selector, Selector]]] = {}
        self._counts: dict[tuple[torch.device, int], Tensor] = {}

    def is_identity(self, num_src: int) -> bool:
        """Whether rows 0 to ``num_src`` map to themselves, all of them."""
        if self.num_rows != num_src:
            return False
        return num_src == 0 or (len(self.src) == 1 and self.src[0] == 0 and self.dst[0] == 0)

    def _is_long(self, device: torch.device) -> bool:
        least = _LONG_RUN["cpu" if device.type == "cpu" else "other"]
        return len(self._slices) <= _MAX_SLICES and self.num_rows >= least * len(self._slices)

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Both sides as int64 index tensors ``(num_rows,)`` on ``device``, cached."""
        found = self._indices.get(device)
        if found is None:
            src, dst = expand(self.src, self.lengths), expand(self.dst, self.lengths)
            found = self._indices[device] = (_to_device(src, device), _to_device(dst, device))
        return found

    def copy(self, out: Tensor, input: Tensor) -> None:
        """``out[dst] = input[src]``."""
        if self.num_rows == 0 or out.numel() == 0:
            return
        if self._is_long(out.device):
            for a, b in self._slices:
                out[b].copy_(input[a])
        else:
            src, dst = self.indices(out.device)
            out.index_copy_(0, dst, input.index_select(0, src).to(out.dtype))

    def steps(self, device: torch.device) -> Iterator[tuple[Selector, Selector]]:
        """Pairs (rows of the source, rows of the target), to be folded one after the other. The targets of one step
        are distinct and every target row meets its sources in run order, so a fold is the same on every device."""
        if self._is_long(device):
            yield from self._slices
            return
        levels = self._levels.get(device)
        if levels is None:
            src, dst = expand(self.src, self.lengths), expand(self.dst, self.lengths)
            order = np.argsort(dst, kind="stable")
            ordered = dst[order]
            heads = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(dst) else order
            nth = np.arange(len(dst)) - np.repeat(heads, np.diff(np.append(heads, len(dst))))
            level = np.empty_like(order)
            level[order] = nth
            levels = self._levels[device] = [
                (_to_device(src[level == n], device), _to_device(dst[level == n], device))
                for n in range(int(nth.max()) + 1 if len(nth) else 0)
            ]
        yield from levels

    def counts(self, num_dst: int, device: torch.device) -> Tensor:
        """How many source rows meet each of the ``num_dst`` target rows, int64 on ``device``, cached."""
        key = (device, num_dst)
        found = self._counts.get(key)
        if found is None:
            counted = np.bincount(expand(self.dst, self.lengths), minlength=num_dst).astype(np.int64)
            found = self._counts[key] = _to_device(counted, device)
        return found


def _to_device(array: IntArray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def accumulate(
    runs: RowRuns,
    op: str,
    input: Tensor,
    into: Tensor,
    *,
    input_lse: Tensor | None = None,
    into_lse: Tensor | None = None,
    wide: torch.dtype | None = None,
    count_own: bool = True,
) -> None:
    """Fold ``input[src]`` into ``into[dst]`` in run order, in place; what ``into`` holds comes first.

    Args:
        op: ``"sum"``; ``"avg"``: ``(own + sum) / (1 + count)``, without the 1 when ``count_own`` is false (rows that
            nothing reaches keep their value); ``"lse"``: merge of (input, input_lse) states.
        wide: dtype to accumulate in; the widest of both tensors and float32 when None.
    """
    wide = wide or wide_dtype(input.dtype, into.dtype)
    acc = into if into.dtype == wide else into.to(wide)
    if op == "lse":
        assert input_lse is not None
        assert into_lse is not None
        acc_lse = into_lse.to(wide_dtype(into_lse.dtype))
        for a, b in runs.steps(into.device):
            acc[b], acc_lse[b] = merge_states(acc[b], acc_lse[b], input[a].to(wide), input_lse[a].to(acc_lse.dtype))
        if acc_lse is not into_lse:
            into_lse.copy_(acc_lse)
    else:
        for a, b in runs.steps(into.device):
            if isinstance(b, slice):
                acc[b].add_(input[a].to(wide))
            else:
                acc.index_add_(0, b, input[a].to(wide))
        if op == "avg":
            counts = runs.counts(into.shape[0], into.device)
            divisors = (counts + 1 if count_own else counts.clamp(min=1)).to(wide)
            acc.div_(divisors.reshape(-1, *([1] * (acc.dim() - 1))))
    if acc is not into:
        into.copy_(acc)
