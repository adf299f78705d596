"""Live plans: one least-recently-used dictionary per group.

Groups have dictionaries of their own, so that what one group plans never evicts what another uses. A plan that is
evicted or cleared is forgotten: its key then raises ``ValueError`` until it is made again. A backward pass in eager
mode holds its plan by itself.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch.distributed as dist
from magi_comm.groups import Communicator, GroupCommunicator
from magi_comm.two_level import TwoLevelCommunicator

from .. import env
from ..runtime.handles import gone, handles
from .key import DistAttnRuntimeKey

if TYPE_CHECKING:
    from .manager import DistAttnRuntimeMgr


class DistAttnRuntimeDict(OrderedDict[DistAttnRuntimeKey, "DistAttnRuntimeMgr"]):
    """Plans of one group, least recently used first, and the key last made or used."""

    most_recent: DistAttnRuntimeKey | None = None


def _is_alive(group: Communicator) -> bool:
    """Whether the process group behind a communicator still exists; other communicators live while referenced."""
    group = group.flat if isinstance(group, TwoLevelCommunicator) else group
    if not isinstance(group, GroupCommunicator):
        return False  # nothing to keep: its plans hang on the object itself
    try:
        return dist.is_initialized() and bool(dist.get_process_group_ranks(group.group))
    except (ValueError, RuntimeError, KeyError):
        return False


class DistAttnRuntimeDictManager:
    """All live plans of the process, by group. Thread-safe.

    A group's plans hang on its communicator, so they go when nothing refers to that any more; communicators of process
    groups are kept until the group is destroyed, because their users hold the group, not the communicator.

    Args:
        max_size: plans kept per group; None asks the environment snapshot. 0 or less keeps only the newest.
    """

    def __init__(self, max_size: int | None = None) -> None:
        self._max_size = max_size
        self._lock = threading.RLock()
        self._kept: set[Communicator] = set()
        self._live: weakref.WeakSet[DistAttnRuntimeMgr] = weakref.WeakSet()
        self._attribute = f"_magi_attention_plans_{id(self)}"

    def _of(self, group: Communicator) -> DistAttnRuntimeDict | None:
        return getattr(group, self._attribute, None)

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return isinstance(key, DistAttnRuntimeKey) and key in (self._of(key.cp_group) or ())

    def __len__(self) -> int:
        with self._lock:
            return len(self._live)

    def keys(self, cp_group: Communicator) -> Iterator[DistAttnRuntimeKey]:
        """Keys of a group, least recently used first."""
        with self._lock:
            return iter(list(self._of(cp_group) or ()))

    def get(self, key: DistAttnRuntimeKey) -> DistAttnRuntimeMgr:
        """The plan of ``key``, now the most recent of its group.

        Raises:
            TypeError: not a key. ValueError: the plan was cleared or evicted.
        """
        if not isinstance(key, DistAttnRuntimeKey):
            raise TypeError(f"key must be a DistAttnRuntimeKey, got {type(key).__name__}")
        with self._lock:
            plans = self._of(key.cp_group)
            manager = None if plans is None else plans.get(key)
            if plans is None or manager is None:
                raise gone("key")
            plans.move_to_end(key)
            plans.most_recent = manager.key
            return manager

    def get_or_make(self, key: DistAttnRuntimeKey, make: Callable[[], DistAttnRuntimeMgr]) -> DistAttnRuntimeMgr:
        """The plan equal to ``key``, or a new one; now the most recent of its group.

        The key to hand out is ``.key`` of what comes back: the one under which the plan was made first.
        """
        with self._lock:
            if key in self:
                return self.get(key)
        manager = make()  # planning takes long: outside the lock, groups do not wait for others
        with self._lock:
            if key in self:  # another thread was faster: its key and handle are out already
                return self.get(key)
            for group in [group for group in self._kept if not _is_alive(group)]:
                self.clear(group)
            plans = self._of(key.cp_group)
            if plans is None:
                plans = DistAttnRuntimeDict()
                setattr(key.cp_group, self._attribute, plans)
            if _is_alive(key.cp_group):
                self._kept.add(key.cp_group)
            plans[key] = manager
            plans.most_recent = key
            self._live.add(manager)
            handles.set(key.handle, manager)
            max_size = env.snapshot().dist_attn_runtime_dict_size if self._max_size is None else self._max_size
            while len(plans) > max(max_size, 1):
                self._forget(plans.popitem(last=False)[1])
        return manager

    def _forget(self, manager: DistAttnRuntimeMgr) -> None:
        self._live.discard(manager)
        handles.drop(manager.key.handle)

    def most_recent(self, cp_group: Communicator) -> DistAttnRuntimeKey:
        """The key last made or used on a group.

        Raises:
            ValueError: there is none.
        """
        with self._lock:
            plans = self._of(cp_group)
            if plans is None or plans.most_recent is None:
                raise ValueError("cp_group has no key yet: make one with magi_attn_flex_key or magi_attn_varlen_key")
            return plans.most_recent

    def clear(self, cp_group: Communicator | None = None) -> None:
        """Forget the plans of one group, or of all."""
        with self._lock:
            if cp_group is None:
                for group in {manager.key.cp_group for manager in list(self._live)}:
                    self.clear(group)
                return
            plans = self._of(cp_group)
            if plans is not None:
                for manager in plans.values():
                    self._forget(manager)
                plans.clear()
                plans.most_recent = None
            self._kept.discard(cp_group)


dist_attn_runtime_dict_mgr = DistAttnRuntimeDictManager()
"""The plans of this process."""

__all__ = ["DistAttnRuntimeDict", "DistAttnRuntimeDictManager", "dist_attn_runtime_dict_mgr"]
