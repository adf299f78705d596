"""What the blockwise torch backend walks: tiles of one axis, and for each the rectangles of the other axis it meets.

A :class:`Schedule` is cut from bands. Torch pays some microseconds for every operation, so blocks are larger than a
GPU's, and many small pieces of a mask (documents of two tokens) are gathered into one dense block with a mask made
from row intervals. Tile sizes come from a cost model: a narrow window wants narrow tiles, a large rectangle wide ones.

``stationary`` is the tiled axis (queries forward, keys backward), ``moving`` the other one. Every moving index of a job
is visible to some stationary index of it, so nothing that no slice covers is ever read as a moving operand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Job", "Schedule", "Tile", "build_tiles"]

Int = npt.NDArray[np.int64]

FIRST, LAST = 1, 2

# Visible pairs per head that cost as much as the fixed part of one job, times heads (about 100 us at 2.5 ns a pair).
_JOB_OVERHEAD = 40_000
_TILE_SIZES = (64, 128, 256, 512)
_BLOCK_ELEMENTS = 1 << 20  # scores of one job over all heads: 4 MB in float32
_STEPS = (512, 4096)  # fewest and most moving indices of a job of a large piece
_EMPTY_TILE = 4096  # rows of a tile that meets nothing


@dataclass(frozen=True)
class Job:
    """A rectangle ``[s0, s1) x [m0, m1)``; visible where ``lo <= m - s <= hi`` (everywhere when ``is_full``).

    A gathered job instead has ``index`` (the moving indices, ascending) and ``entries``: rows ``(s - s0, begin, end)``,
    stationary index s sees positions ``[begin, end)`` of ``index``. An s may have several entries, or none.
    """

    s0: int
    s1: int
    m0: int
    m1: int
    lo: int
    hi: int
    is_full: bool
    index: Int | None = None
    entries: Int | None = None

    @property
    def num_moving(self) -> int:
        return self.m1 - self.m0 if self.index is None else int(self.index.shape[0])


@dataclass(frozen=True)
class Tile:
    """Interval ``[begin, end)`` of the stationary axis, its stage flags, and its jobs."""

    begin: int
    end: int
    flags: int
    jobs: tuple[Job, ...]


@dataclass(frozen=True)
class Schedule:
    """Tiles of both directions. ``may_overlap`` says that a pair can be covered twice."""

    total_q: int
    total_k: int
    forward: tuple[Tile, ...]
    backward: tuple[Tile, ...]
    may_overlap: bool

    @staticmethod
    def build(
        bands: npt.NDArray[np.int32],
        total_q: int,
        total_k: int,
        segments: npt.NDArray[Any],
        num_heads: int,
        may_overlap: bool,
    ) -> Schedule:
        """Cut canonical bands ``(n, 6)`` into tiles.

        Args:
            segments: ``(m, 3)`` ascending ``(begin, end, flags)``: rows that this stage owns, by their stage flags.
            num_heads: query heads, for the cost model.
        """
        wide = bands.astype(np.int64)
        q0, q1, k0, k1, lo, hi = (wide[:, i] for i in range(6))
        transposed = np.stack([k0, k1, q0, q1, -hi, -lo], 1)
        keys = np.array([[0, total_k, FIRST | LAST]], dtype=np.int64)
        return Schedule(
            total_q,
            total_k,
            build_tiles(wide, segments.astype(np.int64), num_heads),
            build_tiles(transposed, keys, num_heads),
            may_overlap,
        )


def _pieces(bands: Int, t0: Int, t1: Int) -> tuple[Int, Int]:
    """Parts of bands inside tiles: ``(n, 6)`` shrunk bands, and the tile of each, ascending."""
    first = np.searchsorted(t1, bands[:, 0], "right")
    last = np.searchsorted(t0, bands[:, 1], "left")
    count = np.maximum(last - first, 0)
    band = np.repeat(np.arange(len(bands)), count)
    tile = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    s0, s1, m0, m1, lo, hi = (bands[band, i] for i in range(6))
    s0, s1 = np.maximum(s0, t0[tile]), np.minimum(s1, t1[tile])
    m0, m1 = np.maximum(m0, s0 + lo), np.minimum(m1, s1 + hi)
    s0, s1 = np.maximum(s0, m0 - hi), np.minimum(s1, m1 - lo)
    keep = (s0 < s1) & (m0 < m1)
    pieces = np.stack([s0, s1, m0, m1, lo, hi], 1)[keep]
    tile = tile[keep]
    order = np.lexsort((pieces[:, 2], tile))
    return pieces[order], tile[order]


def _cut_segments(segments: Int, size: int) -> tuple[Int, Int, Int]:
    """Tiles of about equal length, at most ``size``, inside each segment: begin, end, flags."""
    begins, ends, flags = [], [], []
    for begin, end, flag in segments.tolist():
        if begin >= end:
            continue
        edges = np.arange(begin, end, size)
        begins.append(edges)
        ends.append(np.minimum(edges + size, end))
        flags.append(np.full(len(edges), flag))
    if not begins:
        return (np.empty(0, np.int64),) * 3
    return np.concatenate(begins), np.concatenate(ends), np.concatenate(flags)


def _step(size: int, num_heads: int) -> int:
    """Moving indices of a job: as many as fill a block of scores."""
    return min(max(_BLOCK_ELEMENTS // (size * max(1, num_heads)), _STEPS[0]), _STEPS[1])


def _estimate(pieces: Int, tile: Int, size: int, num_heads: int) -> float:
    """Cost of a cut, in pairs of one head."""
    if len(pieces) == 0:
        return 0.0
    rows, moving = pieces[:, 1] - pieces[:, 0], pieces[:, 3] - pieces[:, 2]
    is_small = rows * moving * num_heads <= _JOB_OVERHEAD
    large, small = ~is_small, is_small
    jobs = float((-(-moving[large] // _step(size, num_heads))).sum())
    computed = float((rows[large] * moving[large]).sum())
    if small.any():
        # Small pieces of a tile share jobs, each about as tall as the tile, unless they would cost less alone.
        columns = np.bincount(tile[small], weights=moving[small])
        count = np.bincount(tile[small])
        area = np.bincount(tile[small], weights=(rows * moving)[small])
        shared = size * columns * num_heads + _JOB_OVERHEAD * (count > 0)
        alone = area * num_heads + _JOB_OVERHEAD * count
        return (
            (jobs + len(np.unique(tile))) * _JOB_OVERHEAD
            + computed * num_heads
            + float(np.minimum(shared, alone).sum())
        )
    return (jobs + len(np.unique(tile))) * _JOB_OVERHEAD + computed * num_heads


def build_tiles(bands: Int, segments: Int, num_heads: int) -> tuple[Tile, ...]:
    """Cut bands ``(s0, s1, m0, m1, lo, hi)`` along the stationary axis; see :class:`Schedule`."""
    best = None
    for size in _TILE_SIZES:
        t0, t1, flags = _cut_segments(segments, size)
        pieces, tile = _pieces(bands, t0, t1)
        cost = _estimate(pieces, tile, size, num_heads)
        if best is None or cost < best[0]:
            best = cost, t0, t1, flags, pieces, tile, _step(size, num_heads)
    assert best is not None
    _, t0, t1, flags, pieces, tile, step = best
    edges = np.searchsorted(tile, np.arange(len(t0) + 1)).tolist()
    overhead = max(1, _JOB_OVERHEAD // max(1, num_heads))
    tiles: list[Tile] = []
    for i, (begin, end, flag) in enumerate(zip(t0.tolist(), t1.tolist(), flags.tolist(), strict=True)):
        jobs = _jobs(pieces[edges[i] : edges[i + 1]].tolist(), overhead, step)
        last = tiles[-1] if tiles else None
        if not jobs and last and not last.jobs and last.flags == flag and last.end == begin:
            if end - last.begin <= _EMPTY_TILE:
                tiles[-1] = Tile(last.begin, end, flag, ())
                continue
        tiles.append(Tile(begin, end, flag, jobs))
    return tuple(tiles)


def _jobs(pieces: list[list[int]], overhead: int, step: int) -> tuple[Job, ...]:
    """Jobs of one tile, from its pieces sorted by ``m0``."""
    jobs: list[Job] = []
    group: list[list[int]] = []
    low = high = end = columns = 0  # rows of the group, end of its last interval, length of its union
    for piece in pieces:
        s0, s1, m0, m1, _, _ = piece
        area = (s1 - s0) * (m1 - m0)
        if area > overhead:
            jobs += _split(piece, step)
            continue
        if group:
            new_low, new_high = min(low, s0), max(high, s1)
            new_columns = columns + max(0, m1 - max(m0, end))
            grown = (new_high - new_low) * new_columns - (high - low) * columns
            if grown <= overhead + area and new_columns <= step:
                group.append(piece)
                low, high, end, columns = new_low, new_high, max(end, m1), new_columns
                continue
            jobs += _gather(group, step)
        group, low, high, end, columns = [piece], s0, s1, m1, m1 - m0
    if group:
        jobs += _gather(group, step)
    return tuple(jobs)


def _split(piece: list[int], step: int) -> list[Job]:
    """One band's part of a tile, in steps of the moving axis, each shrunk to its visible rows."""
    s0, s1, m0, m1, lo, hi = piece
    steps = -(-(m1 - m0) // step)
    jobs = []
    for i in range(steps):
        a, b = m0 + (m1 - m0) * i // steps, m0 + (m1 - m0) * (i + 1) // steps
        r0, r1 = max(s0, a - hi), min(s1, b - lo)
        if r0 >= r1:
            continue
        a, b = max(a, r0 + lo), min(b, r1 + hi)
        is_full = lo <= a - (r1 - 1) and b - 1 - r0 <= hi
        jobs.append(Job(r0, r1, a, b, lo, hi, is_full))
    return jobs


def _gather(group: list[list[int]], step: int) -> list[Job]:
    """Small pieces as one job over the union of their moving intervals."""
    if len(group) == 1:
        return _split(group[0], step)
    pieces = np.asarray(group, dtype=np.int64)
    s0, s1, m0, m1, lo, hi = (pieces[:, i] for i in range(6))
    reached = np.maximum.accumulate(m1)  # pieces are sorted by m0
    added = np.concatenate([m0[:1], np.maximum(m0[1:], reached[:-1])])
    lengths = np.maximum(m1 - added, 0)
    offsets = np.cumsum(lengths) - lengths
    index = np.arange(int(lengths.sum())) - np.repeat(offsets, lengths) + np.repeat(added, lengths)
    rows = s1 - s0
    piece = np.repeat(np.arange(len(pieces)), rows)
    row = np.arange(int(rows.sum())) - np.repeat(np.cumsum(rows) - rows, rows) + s0[piece]
    begin = np.maximum(m0[piece], row + lo[piece])
    end = np.minimum(m1[piece], row + hi[piece] + 1)
    keep = begin < end
    low, high = int(s0.min()), int(s1.max())
    # The columns of one piece are consecutive in the union, so an interval stays an interval.
    begin_at = np.searchsorted(index, begin[keep])
    entries = np.stack([row[keep] - low, begin_at, begin_at + (end - begin)[keep]], 1)
    contiguous = int(index[-1] - index[0]) + 1 == len(index)
    first, last = int(index[0]), int(index[-1]) + 1
    return [Job(low, high, first, last, 0, 0, False, None if contiguous else index, entries)]
