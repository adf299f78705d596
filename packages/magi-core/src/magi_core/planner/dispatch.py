"""Which rank computes which chunk of query rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _host
from ..errors import INT32_MAX, checked_int
from ._arrays import Int32Array, Int64Array, band_array, frozen, int64_array

#: Name of every algorithm -> code of the host library (csrc/host/dispatch.h). Names are those of the public
#: ``DispatchAlgType``, ``balanced`` is ours.
DISPATCH_ALGORITHMS: dict[str, int] = {
    "balanced": 0,
    "min_heap": 1,
    "sequential_select": 2,
    "lower_bound": 3,
    "dynamic_programming": 4,
    "binary_search": 5,
    "backtracing_pruning": 6,
    "backtracking_pruning": 6,
    "topp_heap": 7,
    "batch_topp_heap": 8,
    "random_select": 9,
    "sorted_sequential_select": 10,
}
_NEEDS_BANDS = {"topp_heap", "batch_topp_heap", "sorted_sequential_select"}


def _fraction(value: Any, name: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {value}")
    return float(value)


def chunk_areas(mask_or_bands: Any, chunk_size: int, total_q: int) -> Int64Array:
    """Visible pairs of every chunk of query rows.

    Args:
        mask_or_bands: Mask, Bands, or ``(n, 6)`` int rows. A pair that two bands show counts twice.
        chunk_size: rows of a chunk, at least 1; the last chunk may be short.
        total_q: number of query rows.

    Returns:
        ``(ceil(total_q / chunk_size),)`` int64, exact. Closed forms: the cost is the number of (band, chunk) pairs
        that touch, not of rows.

    Raises:
        ValueError: a band reaches past ``total_q``, or a size is out of bounds. TypeError: no integers.
    """
    return _host.array(
        _host.lib().planner_chunk_areas(
            band_array(mask_or_bands),
            checked_int(chunk_size, "chunk_size", minimum=1),
            checked_int(total_q, "total_q", minimum=0),
        )
    )


def suggest_chunk_size(mask_or_bands: Any, total_q: int, world_size: int, limit: int | None = None) -> int:
    """Rows of a chunk for this mask and number of ranks.

    ``ceil(total_q / (8 * world_size))``, at most ``limit``, and halved while the largest chunk holds more than
    four fifths of a rank's mean area, because such chunks cannot be balanced (a long document among short ones); never
    below 64 rows or 64 chunks a rank for that reason.
    """
    return int(
        _host.lib().planner_suggest_chunk_size(
            band_array(mask_or_bands),
            checked_int(total_q, "total_q", minimum=0),
            checked_int(world_size, "world_size", minimum=1),
            INT32_MAX if limit is None else checked_int(limit, "limit", minimum=1),
        )
    )


def dispatch_lower_bound(areas: Any, world_size: int) -> int:
    """No dispatch of these chunks has a smaller largest area per rank."""
    return int(
        _host.lib().planner_dispatch_lower_bound(
            int64_array(areas, "areas"), checked_int(world_size, "world_size", minimum=1)
        )
    )


def dispatch_chunks(
    areas: Any,
    world_size: int,
    alg: Any = "balanced",
    *,
    bands: Any = None,
    chunk_size: int | None = None,
    total_q: int | None = None,
    top_p: float = 0.0,
    num_of_select_chunk: int = 1,
    allocation_ratio: float = 1.0,
    seed: int = 0,
    node_limit: int = 20_000_000,
    balance_ppm: int = 10_000,
    pair_cost_fs: int = 50_000,
    token_cost_fs: int = 15_000_000,
) -> list[Int64Array]:
    """Shares chunks out over ranks.

    Every algorithm gives each rank ``floor`` or ``ceil`` of ``num_chunks / world_size`` chunks (ranks without one are
    legal when there are fewer chunks than ranks), except ``dynamic_programming`` and ``binary_search``, which look at
    areas alone. All are deterministic functions of their arguments: ranks that call with equal ones agree.

    Args:
        areas: ``(num_chunks,)`` integers, visible pairs of each chunk (``chunk_areas``).
        world_size: number of ranks.
        alg: a name in ``DISPATCH_ALGORITHMS``, or an enum member whose value is one:

            - ``balanced`` (default): balance and locality at once; with ``bands`` it prices the keys a rank must
              receive, without it takes neighbouring chunks to share keys;
            - ``min_heap``: largest chunk first, to the rank with the least area that is not full;
            - ``sequential_select``: contiguous blocks;
            - ``lower_bound``: min-heap, then swaps until the lower bound is met or none helps;
            - ``dynamic_programming``: the least largest area over any counts: exact up to 12 chunks, beyond that by
              the bounded search of ``binary_search``;
            - ``binary_search``: binary search on the largest area, first fit with backtracking, any counts;
            - ``backtracing_pruning``: the same search at equal counts. Both stop at ``node_limit`` steps with the best
              so far, never worse than ``min_heap``;
            - ``topp_heap``: among the ``ceil(top_p * world_size)`` lightest ranks, the one that already reads most of
              the chunk's keys; ``batch_topp_heap`` picks the best of ``num_of_select_chunk`` chunks as well;
            - ``sorted_sequential_select``: slice by slice, largest first, poured into the lightest rank in runs of at
              most ``allocation_ratio`` of the slice;
            - ``random_select``: a shuffle drawn from ``seed``.
        bands, chunk_size, total_q: the mask the areas come from; the three algorithms that look at keys need them.
        balance_ppm, pair_cost_fs, token_cost_fs: of ``balanced``: slack of the balance in parts per million, price of
            a pair and of a received token in femtoseconds.

    Returns:
        Per rank its chunk ids, int64, ascending.

    Raises:
        ValueError: unknown algorithm, negative area, missing mask, sizes that do not fit. TypeError: wrong types.
    """
    name = getattr(alg, "value", alg)
    if name not in DISPATCH_ALGORITHMS:
        raise ValueError(f"alg must be one of {', '.join(DISPATCH_ALGORITHMS)}, got {alg!r}")
    weights = int64_array(areas, "areas")
    world = checked_int(world_size, "world_size", minimum=1)
    if bands is None:
        if name in _NEEDS_BANDS:
            raise ValueError(f"alg {name!r} looks at keys: bands, chunk_size and total_q must be given")
        rows = np.zeros((0, 6), np.int32)
        size, total = 1, 0
    else:
        rows = band_array(bands)
        if chunk_size is None or total_q is None:
            raise ValueError("bands need chunk_size and total_q as well")
        size = checked_int(chunk_size, "chunk_size", minimum=1)
        total = checked_int(total_q, "total_q", minimum=0)
    options = int64_array(
        [
            DISPATCH_ALGORITHMS[name],
            max(1, math.ceil(world * _fraction(top_p, "top_p", 0.0, 1.0))),
            checked_int(num_of_select_chunk, "num_of_select_chunk", minimum=1),
            max(1, round(1_000_000 * _fraction(allocation_ratio, "allocation_ratio", 0.0, 1.0))),
            checked_int(seed, "seed", minimum=0, maximum=2**63 - 1),
            checked_int(node_limit, "node_limit", minimum=0, maximum=2**62),
            checked_int(balance_ppm, "balance_ppm", minimum=0),
            checked_int(pair_cost_fs, "pair_cost_fs", minimum=0, maximum=2**62),
            checked_int(token_cost_fs, "token_cost_fs", minimum=0, maximum=2**62),
        ],
        "options",
    )
    ranks = _host.array(_host.lib().planner_dispatch_chunks(weights, world, rows, size, total, options))
    return split_by_rank(ranks, world)


def split_by_rank(ranks: Any, world_size: int) -> list[Int64Array]:
    """Rank of each chunk -> ascending chunk ids of each rank."""
    order = frozen(np.argsort(ranks, kind="stable").astype(np.int64))
    ends = np.cumsum(np.bincount(ranks, minlength=world_size)).tolist()
    return [order[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def rank_of_chunks(chunks: Sequence[Any], num_chunks: int) -> Int32Array:
    """The inverse of ``split_by_rank``, int32; ValueError when some chunk has no rank or two."""
    lists = [ids if isinstance(ids, np.ndarray) else int64_array(ids, f"chunks[{r}]") for r, ids in enumerate(chunks)]
    for rank, ids in enumerate(lists):
        if ids.dtype != np.int64 or ids.ndim != 1:
            lists[rank] = int64_array(ids, f"chunks[{rank}]")
    listed = np.concatenate([np.zeros(0, np.int64), *lists])
    owner = np.repeat(np.arange(len(lists), dtype=np.int32), [len(ids) for ids in lists])
    outside = (listed < 0) | (listed >= num_chunks)
    if np.any(outside):
        first = int(np.argmax(outside))
        raise ValueError(f"chunks[{owner[first]}] must hold ids in [0, {num_chunks}), got {listed[first]}")
    times = np.bincount(listed, minlength=num_chunks)
    if np.any(times > 1):
        twice = int(np.argmax(times > 1))
        rank = int(owner[np.flatnonzero(listed == twice)[1]])
        raise ValueError(f"chunks[{rank}] holds chunk {twice}, which is given twice")
    if np.any(times == 0):
        raise ValueError(f"chunk {int(np.argmin(times))} is given to no rank")
    ranks = np.empty(num_chunks, np.int32)
    ranks[listed] = owner
    return ranks
