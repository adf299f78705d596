"""Which rank holds which tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from .. import _host
from ..errors import checked_int, checked_int32_array
from ._arrays import Int32Array, Int64Array, frozen, int64_array
from .dispatch import rank_of_chunks


class Owners:
    """A partition of the global tokens ``[0, total)`` over ranks; ranks with no token are legal.

    A rank's local order is its global ranges ascending, back to back. Immutable; equal partitions are equal objects.

    Args:
        ranges: per rank its ranges: AttnRanges, pairs or ``(n, 2)`` arrays, in any order.
        total: number of tokens.

    Raises:
        ValueError: a token that no rank or that two ranks own, a range outside ``[0, total)``.
    """

    __slots__ = ("__dict__", "_offsets", "_rows", "total", "world_size")

    _rows: Int32Array
    _offsets: Int64Array
    total: int
    world_size: int

    def __init__(self, ranges: Sequence[Any], total: int) -> None:
        rows = []
        for rank, mine in enumerate(ranges):
            pairs = [(r.start, r.end) for r in mine] if hasattr(mine, "to_naive_ranges") else mine
            part = checked_int32_array(pairs, f"ranges[{rank}]", (None, 2))
            rows.append(np.concatenate([np.full((len(part), 1), rank, np.int32), part], axis=1))
        table = np.concatenate(rows) if rows else np.zeros((0, 3), np.int32)
        self._set(np.ascontiguousarray(table), len(rows), checked_int(total, "total", minimum=0))

    def _set(self, table: Int32Array, world_size: int, total: int) -> None:
        rows = _host.array(_host.lib().planner_make_owners(table, world_size, total))
        self._rows = frozen(rows)
        self.total = total
        self.world_size = world_size
        self._offsets = frozen(np.concatenate([[0], np.cumsum(np.bincount(rows[:, 0], minlength=world_size))]))

    @classmethod
    def from_chunks(cls, chunks: Sequence[Any], chunk_size: int, total: int) -> Owners:
        """Chunk ``i`` is the tokens ``[i * chunk_size, (i + 1) * chunk_size)``, cut at ``total``.

        Args:
            chunks: per rank its chunk ids, as ``dispatch_chunks`` returns them.
        """
        size = checked_int(chunk_size, "chunk_size", minimum=1)
        tokens = checked_int(total, "total", minimum=0)
        ranks = rank_of_chunks(chunks, -(-tokens // size))
        owners = object.__new__(cls)
        owners._set(_host.array(_host.lib().planner_rows_of_chunks(ranks, size, tokens)), len(chunks), tokens)
        return owners

    @classmethod
    def from_table(cls, rows: Any, world_size: int, total: int) -> Owners:
        """Of ``(n, 3)`` integer rows (rank, begin, end), in any order.

        Raises:
            ValueError: as for the constructor, or a rank outside ``[0, world_size)``.
        """
        owners = object.__new__(cls)
        table = checked_int32_array(rows, "rows", (None, 3))
        owners._set(table, checked_int(world_size, "world_size", minimum=0), checked_int(total, "total", minimum=0))
        return owners

    @classmethod
    def contiguous(cls, total: int, world_size: int) -> Owners:
        """Equal contiguous blocks; the first ``total % world_size`` ranks hold one token more."""
        tokens = checked_int(total, "total", minimum=0)
        world = checked_int(world_size, "world_size", minimum=1)
        cuts = [rank * (tokens // world) + min(rank, tokens % world) for rank in range(world + 1)]
        return cls([[pair] for pair in itertools.pairwise(cuts)], tokens)

    @property
    def table(self) -> Int32Array:
        """``(n, 4)`` int32 rows (rank, begin, end, local begin), sorted by (rank, begin), touching ranges fused."""
        return self._rows

    def _table3(self) -> Int32Array:
        rows: Int32Array = self._rows[:, :3].copy()
        return rows

    def _rank(self, rank: int) -> int:
        return checked_int(rank, "rank", minimum=0, maximum=self.world_size - 1)

    def ranges(self, rank: int) -> Int32Array:
        """``(n, 2)`` global ranges of a rank, ascending, disjoint, touching ones fused."""
        first = self._offsets[self._rank(rank)]
        return self._rows[first : self._offsets[rank + 1], 1:3]

    @cached_property
    def num_tokens(self) -> Int64Array:
        """``(world_size,)`` int64, tokens of each rank."""
        counts = np.zeros(self.world_size, np.int64)
        np.add.at(counts, self._rows[:, 0], (self._rows[:, 2] - self._rows[:, 1]).astype(np.int64))
        return frozen(counts)

    def num_local(self, rank: int) -> int:
        """Tokens of one rank."""
        return int(self.num_tokens[self._rank(rank)])

    def local_tokens(self, rank: int) -> Int64Array:
        """Global id of each local token: ``(num_local,)`` int64, ascending."""
        mine = self.ranges(rank).astype(np.int64)
        lengths = mine[:, 1] - mine[:, 0]
        starts = np.cumsum(lengths) - lengths
        return np.repeat(mine[:, 0] - starts, lengths) + np.arange(int(lengths.sum()), dtype=np.int64)

    @cached_property
    def _by_begin(self) -> Int32Array:
        return frozen(self._rows[np.argsort(self._rows[:, 1])])

    def to_local(self, tokens: Any) -> tuple[Int64Array, Int64Array]:
        """Global ids -> (rank, local id), int64 arrays of the same length. ValueError outside ``[0, total)``."""
        ids = int64_array(tokens, "tokens")
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self.total):
            raise ValueError(f"tokens must be in [0, {self.total}), got {int(ids.min())} to {int(ids.max())}")
        table = self._by_begin.astype(np.int64)
        at = np.searchsorted(table[:, 1], ids, side="right") - 1
        return table[at, 0], ids - table[at, 1] + table[at, 3]

    def to_global(self, rank: int, local: Any) -> Int64Array:
        """Local ids of one rank -> global ids, int64. ValueError outside ``[0, num_local)``."""
        ids = int64_array(local, "local")
        count = self.num_local(rank)
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= count):
            raise ValueError(f"local must be in [0, {count}), got {int(ids.min())} to {int(ids.max())}")
        first, last = self._offsets[rank], self._offsets[rank + 1]
        mine = self._rows[first:last].astype(np.int64)
        at = np.searchsorted(mine[:, 3], ids, side="right") - 1
        return ids - mine[at, 3] + mine[at, 1] if ids.size else ids

    @cached_property
    def rank_of_token(self) -> Int64Array:
        """``(total,)`` int64: rank of each global token."""
        return frozen(self.to_local(np.arange(self.total))[0])

    @cached_property
    def permutation(self) -> Int64Array:
        """``(total,)`` int64: global ids of rank 0's tokens, then rank 1's, and so on."""
        parts: Iterable[Int64Array] = (self.local_tokens(rank) for rank in range(self.world_size))
        return frozen(np.concatenate([np.zeros(0, np.int64), *parts]))

    @cached_property
    def inverse_permutation(self) -> Int64Array:
        """``(total,)`` int64: where each global token lies in ``permutation``."""
        inverse = np.empty(self.total, np.int64)
        inverse[self.permutation] = np.arange(self.total)
        return frozen(inverse)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Owners):
            return NotImplemented
        return (self.total, self.world_size) == (other.total, other.world_size) and np.array_equal(
            self._rows, other._rows
        )

    def __hash__(self) -> int:
        return hash((self.total, self.world_size, self._rows.tobytes()))

    def __repr__(self) -> str:
        return f"Owners(total={self.total}, world_size={self.world_size}, num_runs={len(self._rows)})"
