"""Grouping of slices that share a range."""

import torch
from torch import Tensor

__all__ = ["merge_ranges"]


def merge_ranges(
    outer_ranges: Tensor, inner_ranges: Tensor, attn_type_map: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Group slices of the same outer range. Does not synchronise; runs on the device of its arguments.

    Slices are sorted stably by the start of their outer range, then its end, so that equal ranges are neighbours.

    Args:
        outer_ranges, inner_ranges: ``(N, 2)`` integers; queries and keys for a forward, the other way for a backward.
        attn_type_map: ``(N,)`` integers; None is all full (0).

    Returns:
        ``(merge_outer_ranges, sorted_outer, sorted_inner, sorted_type_map, range_map, unique_count)``:
        the distinct outer ranges ``(N, 2)``, of which the first ``unique_count`` count and the rest are (0, 0); the
        slices in order; the group ``g`` is the slices ``range_map[g]`` up to ``range_map[g + 1]``, ``range_map``
        ``(N + 1,)`` int32 with N in every entry from ``unique_count`` on; ``unique_count`` 0-d int32.

    Raises:
        ValueError: shapes that are not those. TypeError: ranges that are not integers.

    Source: the public helper, whose map beyond ``unique_count`` is undefined and here is N.
    """
    num_slices = outer_ranges.shape[0]
    for name, ranges in (("outer_ranges", outer_ranges), ("inner_ranges", inner_ranges)):
        if ranges.dim() != 2 or ranges.shape != (num_slices, 2):
            raise ValueError(f"{name} must be ({num_slices}, 2), got shape {tuple(ranges.shape)}")
        if ranges.is_floating_point() or ranges.dtype == torch.bool:
            raise TypeError(f"{name} must be integers, got {ranges.dtype}")
    if attn_type_map is None:
        attn_type_map = torch.zeros(num_slices, dtype=torch.int32, device=outer_ranges.device)
    if attn_type_map.shape != (num_slices,):
        raise ValueError(f"attn_type_map must be ({num_slices},), got shape {tuple(attn_type_map.shape)}")
    by_end = outer_ranges[:, 1].argsort(stable=True)
    order = by_end[outer_ranges[by_end, 0].argsort(stable=True)]
    sorted_outer, sorted_inner, sorted_types = outer_ranges[order], inner_ranges[order], attn_type_map[order]

    is_first = torch.ones(num_slices, dtype=torch.bool, device=outer_ranges.device)
    is_first[1:] = (sorted_outer[1:] != sorted_outer[:-1]).any(1)
    group = is_first.cumsum(0) - 1
    merged = torch.zeros_like(sorted_outer).index_copy_(0, group, sorted_outer)  # members of a group write the same
    range_map = torch.full((num_slices + 1,), num_slices, dtype=torch.int32, device=outer_ranges.device)
    places = torch.arange(num_slices, dtype=torch.int32, device=outer_ranges.device)
    range_map.scatter_reduce_(0, group, places, "amin")
    return merged, sorted_outer, sorted_inner, sorted_types, range_map, is_first.sum(dtype=torch.int32)
