"""From a plan's name to the plan: what torch operators, which can only receive tensors, look it up by.

A handle is a 0-d int64 CPU tensor. Names are never reused within a process, and hold nothing alive: whoever made the
plan does.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor

from .attention import DistAttnRuntime
from .transport import Transport


class LivePlan(Protocol):
    """What a handle names."""

    runtime: DistAttnRuntime

    def transport(self, role: str) -> Transport:
        """The placement of queries or keys."""

    def transport_of_whole(self, x: Tensor, role: str) -> Transport:
        """``transport``, once ``x`` is seen to be the whole of it."""

    def transport_of_shard(self, x: Tensor, dim: int, role: str) -> Transport:
        """``transport``, once ``x`` is seen to be a shard of it."""


class Handles:
    """Table of live plans by handle. Thread-safe: each step is one dictionary operation."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._plans: weakref.WeakValueDictionary[int, LivePlan] = weakref.WeakValueDictionary()

    def new(self) -> Tensor:
        """A name that no plan of this process has had."""
        return torch.tensor(next(self._numbers), dtype=torch.int64)

    def set(self, handle: Tensor, plan: LivePlan) -> None:
        """Let ``handle`` name ``plan`` as long as that lives."""
        self._plans[int(handle)] = plan

    def drop(self, handle: Tensor) -> None:
        """Let ``handle`` name nothing."""
        self._plans.pop(int(handle), None)

    def get(self, handle: Tensor) -> LivePlan:
        """The plan that ``handle`` names.

        Raises:
            ValueError: none does.
        """
        plan = self._plans.get(int(handle))
        if plan is None:
            raise gone(f"handle {int(handle)}")
        return plan


def gone(what: str) -> ValueError:
    """The error of a key or handle whose plan was forgotten."""
    return ValueError(
        f"{what} names no plan of this process: it was cleared, or evicted by more than "
        "MAGI_ATTENTION_DIST_ATTN_RUNTIME_DICT_SIZE newer ones of its group; make the key again"
    )


handles = Handles()
"""The plans of this process."""

__all__ = ["Handles", "LivePlan", "gone", "handles"]
