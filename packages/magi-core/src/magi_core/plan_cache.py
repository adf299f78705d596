"""Plans by content: repeated calls with the same ranges plan once."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .bands import Bands
from .checks import check_ranges_inside
from .mask_type import mask_type_codes
from .plan import FlexPlan
from .ranges import range_array

if TYPE_CHECKING:
    from .backends.arch import ArchLibrary

__all__ = ["DevicePlan", "clear_plan_cache", "plan_from_buffer", "plan_from_device_ranges", "plan_from_ranges"]

_PLANS_KEPT = 128
_DEVICE_BLOCKS = (128, 128, 64, 128)  # block_m, block_n, bwd_block_m, bwd_block_n: the defaults of FlexPlan.build

_plans: OrderedDict[Hashable, FlexPlan] = OrderedDict()
_lock = threading.Lock()


def clear_plan_cache() -> None:
    """Forget all plans."""
    with _lock:
        _plans.clear()


def _cached(key: Hashable, build: Callable[[], FlexPlan]) -> FlexPlan:
    with _lock:
        plan = _plans.get(key)
        if plan is not None:
            _plans.move_to_end(key)
            return plan
    plan = build()
    with _lock:
        _plans[key] = plan
        while len(_plans) > _PLANS_KEPT:
            _plans.popitem(last=False)
    return plan


def _digest(*arrays: npt.NDArray[Any]) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    for array in arrays:
        state.update(np.int64(array.size).tobytes())
        state.update(np.ascontiguousarray(array).data)
    return state.digest()


def plan_from_ranges(
    q_ranges: Any, k_ranges: Any, mask_types: Any, total_q: int, total_k: int, allow_overlap: bool
) -> FlexPlan:
    """The plan of a mask given as slices; device tensors are copied to the host.

    Raises:
        ValueError: ranges that do not fit the tensors or one another, or pairs covered twice without
            ``allow_overlap``. TypeError: no integers.
    """
    q, k = range_array(q_ranges, "q_ranges"), range_array(k_ranges, "k_ranges")
    if len(q) != len(k):
        raise ValueError(f"k_ranges must have as many ranges as q_ranges ({len(q)}), got {len(k)}")
    types = mask_type_codes(mask_types, len(q), "attn_type_map")
    key = ("ranges", _digest(q, k, types), total_q, total_k, allow_overlap)

    def build() -> FlexPlan:
        check_ranges_inside(q, total_q, "q_ranges", "q")
        check_ranges_inside(k, total_k, "k_ranges", "k")
        bands = Bands.from_slices(q, k, types)
        return FlexPlan.build(bands, total_q, total_k, allow_overlap=allow_overlap)

    return _cached(key, build)


def plan_from_buffer(buffer: Tensor) -> FlexPlan:
    """The plan that an int32 tensor holds, as operators receive it."""
    host = buffer.detach().cpu()
    return _cached(("buffer", _digest(host.numpy())), lambda: FlexPlan.from_tensor(host.clone()))


class DevicePlan:
    """A plan made on a device from ranges that lie there, without a synchronisation."""

    def __init__(self, buffer: Tensor, total_q: int, total_k: int) -> None:
        self.buffer = buffer
        self.total_q, self.total_k = total_q, total_k

    def tensor(self, device: torch.device) -> Tensor:
        """The buffer, int32."""
        assert device == self.buffer.device
        return self.buffer

    def check(self) -> None:
        """Copy the plan to the host and raise what is wrong with the mask; synchronises.

        Raises:
            ValueError: a range outside its tensor, a reversed range, a bad type, or a pair covered twice.
        """
        FlexPlan(self.buffer).check()

    def host(self) -> FlexPlan:
        """The same plan on the host; synchronises."""
        return FlexPlan(self.buffer)


def plan_from_device_ranges(
    library: ArchLibrary, q_ranges: Tensor, k_ranges: Tensor, mask_types: Tensor | None, total_q: int, total_k: int
) -> DevicePlan:
    """Plan ranges ``(n, 2)`` int32 that are device tensors, with the kernel of an arch wheel."""
    words = int(library.function("plan_capacity_words")(len(q_ranges), total_q, total_k, *_DEVICE_BLOCKS))
    buffer = torch.empty(words, dtype=torch.int32, device=q_ranges.device)
    library.function("plan_device")(buffer, q_ranges, k_ranges, mask_types, total_q, total_k, *_DEVICE_BLOCKS)
    return DevicePlan(buffer, total_q, total_k)
