"""Which rank holds which tokens, and what moving between the global and the local order takes.

Every rank knows the whole placement, so nothing here communicates. A rank's local order is its global ranges,
ascending, back to back; padding, where shards are even, comes after the last true token and belongs to no sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from magi_comm.rows import expand


def _fused(ranges: np.ndarray) -> np.ndarray:
    """Non-empty ranges, ascending, touching ones fused."""
    ranges = ranges[ranges[:, 1] > ranges[:, 0]]
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    if len(ranges) == 0:
        return ranges
    opens = np.concatenate([[True], ranges[1:, 0] != ranges[:-1, 1]])
    closes = np.concatenate([opens[1:], [True]])
    return np.stack([ranges[opens, 0], ranges[closes, 1]], axis=1)


@dataclass(frozen=True)
class Exchange:
    """One rank's part of a permutation of tokens over ranks: local copies, and rows for an all-to-all.

    Attributes:
        copy_from, copy_to: local rows that stay on the rank, int64.
        send_index: local rows to send, destination after destination; ``send_splits`` rows each.
        recv_index: local rows where received ones belong, source after source; ``recv_splits`` rows each.
    """

    copy_from: np.ndarray
    copy_to: np.ndarray
    send_index: np.ndarray
    send_splits: tuple[int, ...]
    recv_index: np.ndarray
    recv_splits: tuple[int, ...]


class TokenPlacement:
    """A partition of the tokens ``[0, total)`` over ranks.

    Args:
        total: number of tokens, without padding.
        ranges: per rank its ``(n, 2)`` global ranges.
        shard_lens: per rank the length of its local shard, padding included; None is "no padding".
    """

    def __init__(self, total: int, ranges: Sequence[np.ndarray], shard_lens: Sequence[int] | None = None) -> None:
        self.total = int(total)
        self.ranges = tuple(_fused(np.asarray(r, np.int64).reshape(-1, 2)) for r in ranges)
        self.num_tokens = tuple(int((r[:, 1] - r[:, 0]).sum()) for r in self.ranges)
        self.shard_lens = self.num_tokens if shard_lens is None else tuple(int(n) for n in shard_lens)
        assert sum(self.num_tokens) == self.total, "every token has exactly one owner"
        assert all(s >= n for s, n in zip(self.shard_lens, self.num_tokens, strict=True)), "a shard holds its tokens"

    @classmethod
    def from_chunks(
        cls, total: int, chunk_size: int, chunks: Sequence[Sequence[int]], *, even: bool = False
    ) -> TokenPlacement:
        """Chunk ``i`` is the tokens ``[i * chunk_size, (i + 1) * chunk_size)``, cut at ``total``.

        With ``even`` every shard is as long as the longest list of chunks, padding included.
        """
        ranges = []
        for ids in chunks:
            starts = np.asarray(ids, np.int64) * chunk_size
            ranges.append(np.minimum(np.stack([starts, starts + chunk_size], axis=1), total))
        longest = max((len(ids) for ids in chunks), default=0) * chunk_size
        return cls(total, ranges, [longest] * len(ranges) if even else None)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranges)

    @cached_property
    def digest(self) -> int:
        """64 bits that tell placements apart; the same in every process."""
        state = hashlib.blake2b(digest_size=8)
        state.update(np.array([self.total, self.world_size, *self.shard_lens], np.int64).tobytes())
        for r in self.ranges:
            state.update(np.int64(len(r)).tobytes())
            state.update(r.tobytes())
        return int.from_bytes(state.digest(), "little", signed=True)

    def tokens(self, rank: int) -> np.ndarray:
        """Global ids of a rank's tokens in local order, int64, without padding."""
        ranges = self.ranges[rank]
        return expand(ranges[:, 0], ranges[:, 1] - ranges[:, 0])

    def positions(self, rank: int) -> np.ndarray:
        """Global ids of a rank's whole shard: padding repeats the last token of the sequence (0 when there is none)."""
        tokens = self.tokens(rank)
        pad = np.full(self.shard_lens[rank] - len(tokens), max(self.total - 1, 0), np.int64)
        return np.concatenate([tokens, pad])

    def rank_order(self) -> np.ndarray:
        """Global ids of rank 0's tokens, then rank 1's, …: int64 ``(total,)``."""
        return (
            np.concatenate([self.tokens(r) for r in range(self.world_size)])
            if self.world_size
            else np.zeros(0, np.int64)
        )

    def gathered_index(self, stride: int) -> np.ndarray:
        """Where each global token lies when every rank's shard starts at ``rank * stride``: int64 ``(total,)``."""
        index = np.empty(self.total, np.int64)
        for rank in range(self.world_size):
            tokens = self.tokens(rank)
            index[tokens] = rank * stride + np.arange(len(tokens), dtype=np.int64)
        return index

    def _overlap(self, wanted: np.ndarray, owned: np.ndarray, owned_local: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Common tokens of ``wanted`` rows (begin, end, local) and a rank's ranges: local rows wanted and owned.

        ``wanted`` is ascending and disjoint; so is the result, by global token.
        """
        if len(owned) == 0 or len(wanted) == 0:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        first = np.searchsorted(owned[:, 1], wanted[:, 0], side="right")
        last = np.searchsorted(owned[:, 0], wanted[:, 1], side="left")
        counts = np.maximum(last - first, 0)
        pairs = expand(first, counts)
        which = np.repeat(np.arange(len(wanted)), counts)
        begin = np.maximum(wanted[which, 0], owned[pairs, 0])
        end = np.minimum(wanted[which, 1], owned[pairs, 1])
        to = wanted[which, 2] + begin - wanted[which, 0]
        source = owned_local[pairs] + begin - owned[pairs, 0]
        length = end - begin
        return expand(to, length), expand(source, length)

    def roll_exchange(self, rank: int, shift: int) -> Exchange:
        """What ``rank`` does so that its token ``g`` becomes the old token ``(g - shift) mod total``.

        Both sides walk the pairs of a transfer by ascending global id of the old token, so no metadata travels.
        """
        local = [np.cumsum(r[:, 1] - r[:, 0]) - (r[:, 1] - r[:, 0]) for r in self.ranges]
        shift %= max(self.total, 1)

        def wanted(of: int) -> np.ndarray:
            """(begin, end, local row) of old tokens that rank ``of`` will hold, ascending."""
            ranges, start = self.ranges[of], local[of]
            old = ranges - shift
            wraps = np.minimum(np.maximum(-old[:, 0], 0), ranges[:, 1] - ranges[:, 0])  # leading tokens that wrap
            before = np.stack([old[:, 0] + self.total, old[:, 0] + wraps + self.total, start], 1)
            after = np.stack([old[:, 0] + wraps, old[:, 1], start + wraps], 1)
            rows = np.concatenate([before, after])
            rows = rows[rows[:, 1] > rows[:, 0]]
            return rows[np.argsort(rows[:, 0], kind="stable")]

        mine = wanted(rank)
        empty = np.zeros(0, np.int64)
        copies, sends, recvs = (empty, empty), [], []
        for peer in range(self.world_size):
            to, source = self._overlap(mine, self.ranges[peer], local[peer])
            if peer == rank:
                copies = (source, to)
                sends.append(empty)
                recvs.append(empty)
                continue
            recvs.append(to)
            sends.append(self._overlap(wanted(peer), self.ranges[rank], local[rank])[1])
        return Exchange(
            copy_from=copies[0],
            copy_to=copies[1],
            send_index=np.concatenate(sends),
            send_splits=tuple(len(s) for s in sends),
            recv_index=np.concatenate(recvs),
            recv_splits=tuple(len(r) for r in recvs),
        )


__all__ = ["Exchange", "TokenPlacement"]
