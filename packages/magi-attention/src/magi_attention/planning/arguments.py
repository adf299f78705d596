"""From what users pass to what the planner takes: masks, mask types, groups, names of roles.

Errors here are the caller's: they name the argument, what is expected and what came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch.distributed as dist
from magi_comm.groups import Communicator, GroupLike, as_communicator
from magi_core.mask import Mask
from magi_core.mask_type import AttnMaskType, mask_type_codes
from magi_core.ranges import AttnRange, AttnRanges, range_array
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

GeneralAttnMaskType: TypeAlias = "str | AttnMaskType | Sequence[str | AttnMaskType]"
"""What names mask types: one for all slices, or one per slice."""

RangesLike: TypeAlias = "AttnRanges | np.ndarray | Tensor | Sequence[Sequence[int]] | Sequence[AttnRange]"
"""What names a list of half-open ranges: ``AttnRanges``, an ``(N, 2)`` integer array or tensor, or a list of pairs."""

ROLES = ("q", "k")


def as_int_list(values: Any, name: str) -> list[int]:
    """A one-dimensional list, array or tensor of integers as Python ints."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must be one-dimensional and of integers, got shape {array.shape} of {array.dtype}")
    return [int(v) for v in array]


def mask_type_list(attn_mask_type: Any, num_slices: int, name: str = "attn_mask_type") -> list[AttnMaskType]:
    """One mask type per slice; a single one serves all."""
    return [AttnMaskType.from_int_type(int(code)) for code in mask_type_codes(attn_mask_type, num_slices, name)]


def as_mask(
    q_ranges: Any,
    k_ranges: Any,
    attn_mask_type: Any,
    total_q: int,
    total_k: int,
    *,
    allow_overlap: bool = False,
) -> Mask:
    """The mask that slices describe, checked: bounds, order and double cover.

    A ``Mask`` may stand in the place of ``q_ranges`` with ``k_ranges`` and ``attn_mask_type`` None.

    Raises:
        ValueError: a range outside its tensor, numbers of slices that differ, or (unless ``allow_overlap``) a pair that
            two slices cover, naming both. TypeError: ranges that are none.
    """
    if not isinstance(allow_overlap, bool):
        raise TypeError(f"allow_overlap must be a bool, got {allow_overlap!r} of {type(allow_overlap).__name__}")
    for name, total in (("total_seqlen_q", total_q), ("total_seqlen_k", total_k)):
        if isinstance(total, bool) or not isinstance(total, (int, np.integer)):
            raise TypeError(f"{name} must be an int, got {total!r} of {type(total).__name__}")
        if total < 0:
            raise ValueError(f"{name} must not be negative, got {total}")
    if isinstance(q_ranges, Mask):
        if k_ranges is not None or attn_mask_type is not None:
            raise ValueError("k_ranges and attn_mask_type must be None when q_ranges is a Mask: it names all slices")
        mask = q_ranges
        if (mask.total_q, mask.total_k) != (total_q, total_k):
            raise ValueError(
                f"total_seqlen_q and total_seqlen_k must be the mask's ({mask.total_q}, {mask.total_k}), "
                f"got ({total_q}, {total_k})"
            )
    else:
        q, k = range_array(q_ranges, "q_ranges"), range_array(k_ranges, "k_ranges")
        if len(q) != len(k):
            raise ValueError(f"q_ranges and k_ranges must have the same length, got {len(q)} and {len(k)}")
        codes = mask_type_codes(attn_mask_type, len(q), "attn_mask_type")
        for name, array, total in (("q_ranges", q, total_q), ("k_ranges", k, total_k)):
            wrong = np.flatnonzero((array[:, 0] < 0) | (array[:, 0] > array[:, 1]) | (array[:, 1] > total))
            if len(wrong):
                start, end = array[wrong[0]]
                raise ValueError(
                    f"{name}[{wrong[0]}] must be within [0, {total}) with start <= end, got [{start}, {end})"
                )
        mask = Mask.from_slices(q, k, codes, total_q=int(total_q), total_k=int(total_k))
    if not allow_overlap:
        mask.check()
    return mask


def as_group(cp_group_or_mesh: GroupLike) -> Communicator:
    """The communicator of a process group, a device mesh of one or two axes, or a communicator.

    A two-dimensional mesh (inter-node, intra-node) is one group of all its ranks; transfers cross between nodes once.

    Raises:
        TypeError: something else. ValueError: a mesh of more axes.
    """
    if isinstance(cp_group_or_mesh, DeviceMesh) and cp_group_or_mesh.ndim > 2:
        raise ValueError(
            f"cp_group_or_mesh must be a DeviceMesh of at most 2 axes (inter-node, intra-node), "
            f"got {cp_group_or_mesh.ndim}"
        )
    if not isinstance(cp_group_or_mesh, (dist.ProcessGroup, DeviceMesh, Communicator, type(None))):
        raise TypeError(
            f"cp_group_or_mesh must be a ProcessGroup, a DeviceMesh or a Communicator, "
            f"got {type(cp_group_or_mesh).__name__}"
        )
    return as_communicator(cp_group_or_mesh)


def check_role(role: str) -> None:
    """Refuse a role that is neither queries nor keys."""
    if role not in ROLES:
        raise ValueError(f"role must be 'q' (queries) or 'k' (keys and values), got {role!r}")


__all__ = [
    "GeneralAttnMaskType",
    "GroupLike",
    "RangesLike",
    "as_group",
    "as_int_list",
    "as_mask",
    "check_role",
    "mask_type_list",
]
