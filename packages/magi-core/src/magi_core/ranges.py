"""Half-open intervals of tokens and ordered lists of them: how callers say which rows and columns a slice covers."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Union, overload

import numpy as np
import numpy.typing as npt

from .errors import checked_int, checked_int32_array

if TYPE_CHECKING:
    import torch

NaiveRange = tuple[int, int]
NaiveRanges = Sequence[NaiveRange]
RangeLike = Union["AttnRange", Sequence[int]]


class RangeError(ValueError):
    """A range whose start is greater than its end."""


class AttnRange:
    """Half-open interval ``[start, end)`` of integers; negative bounds are legal, ``start > end`` is not.

    Hashable and compared by value although it can be assigned to: do not change one that is a dict key.
    """

    __slots__ = ("end", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start = checked_int(start, "start", maximum=None)
        self.end = checked_int(end, "end", maximum=None)
        self.check_valid()

    @property
    def seqlen(self) -> int:
        """Number of tokens."""
        return self.end - self.start

    @classmethod
    def from_range(cls, attn_range: RangeLike, check: bool = False) -> AttnRange:
        """A new range from a pair or another range."""
        if isinstance(attn_range, AttnRange):
            start, end = attn_range.start, attn_range.end
        else:
            try:
                start, end = attn_range
            except (TypeError, ValueError):
                raise TypeError(f"a range must be an AttnRange or a pair of ints, got {attn_range!r}") from None
        result = cls(start, end)
        if check:
            result.check_valid()
        return result

    def to_naive_range(self) -> NaiveRange:
        return (self.start, self.end)

    def clone(self) -> AttnRange:
        return AttnRange(self.start, self.end)

    def offset(self, offset: int) -> AttnRange:
        """The range moved by ``offset``."""
        return AttnRange(self.start + offset, self.end + offset)

    def truncate(self, start: int | None = None, end: int | None = None) -> AttnRange:
        """The part inside the bounds; a zero-length range when nothing is inside."""
        low = self.start if start is None else max(self.start, start)
        high = self.end if end is None else min(self.end, end)
        return AttnRange(low, high) if low <= high else AttnRange(low, low)

    def intersect(self, other: AttnRange) -> AttnRange:
        """Common part; empty when disjoint."""
        return self.truncate(other.start, other.end)

    def intersect_size(self, other: AttnRange) -> int:
        return self.intersect(other).seqlen

    def union(self, other: AttnRange) -> list[AttnRange]:
        """One range when they overlap or nest; otherwise (also when they merely touch) both."""
        if self.is_overlap_with(other):
            return [AttnRange(min(self.start, other.start), max(self.end, other.end))]
        return [self.clone(), other.clone()]

    def union_size(self, other: AttnRange) -> int:
        return self.seqlen + other.seqlen - self.intersect_size(other)

    def diff_by(self, other: AttnRange) -> list[AttnRange]:
        """The parts of ``other`` outside this range, in order, without empty ones."""
        if other.is_empty():
            return []
        if not self.is_overlap_with(other):
            return [other.clone()]
        parts = [(other.start, self.start), (self.end, other.end)]
        return [AttnRange(start, end) for start, end in parts if start < end]

    def is_subrange_of(self, other: AttnRange) -> bool:
        return self.start >= other.start and self.end <= other.end

    def is_overlap_with(self, other: AttnRange) -> bool:
        """True when they share a token."""
        return max(self.start, other.start) < min(self.end, other.end)

    def is_empty(self) -> bool:
        return self.start == self.end

    def is_valid_close(self, start: int | None = None, end: int | None = None) -> bool:
        """``start <= end``, of this range where a bound is not given."""
        return (self.start if start is None else start) <= (self.end if end is None else end)

    def is_valid_open(self, start: int | None = None, end: int | None = None) -> bool:
        """``start < end``, of this range where a bound is not given."""
        return (self.start if start is None else start) < (self.end if end is None else end)

    def check_valid(self, start: int | None = None, end: int | None = None) -> None:
        """Raises RangeError when ``start > end``."""
        if not self.is_valid_close(start, end):
            low, high = self.start if start is None else start, self.end if end is None else end
            raise RangeError(f"a range needs start <= end, got [{low}, {high})")

    def __len__(self) -> int:
        return self.seqlen

    def __bool__(self) -> bool:
        # An empty range is still a range: `if attn_range` must not confuse it with None.
        return True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AttnRange):
            return NotImplemented
        return self.start == other.start and self.end == other.end

    def __hash__(self) -> int:
        return hash((self.start, self.end))

    def __repr__(self) -> str:
        return f"[{self.start}, {self.end})"


def is_valid_cu_seqlens(cu_seqlens: Sequence[int], seq_len: int) -> bool:
    """True for an empty list, else when it starts at 0, strictly increases and ends at ``seq_len``."""
    if len(cu_seqlens) == 0:
        return True
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != seq_len:
        return False
    return all(a < b for a, b in itertools.pairwise(cu_seqlens))


def check_valid_cu_seqlens(cu_seqlens: Sequence[int], seq_len: int) -> None:
    """Raises ValueError when :func:`is_valid_cu_seqlens` is false."""
    if not is_valid_cu_seqlens(cu_seqlens, seq_len):
        raise ValueError(
            f"cu_seqlens must start at 0, strictly increase and end at seq_len ({seq_len}), got {list(cu_seqlens)}"
        )


class AttnRanges:
    """Ordered list of :class:`AttnRange`. Set operations (merge, holes, overlaps) treat it as a set of tokens."""

    __slots__ = ("_ranges",)

    def __init__(self, ranges: Iterable[RangeLike] | None = None) -> None:
        self._ranges: list[AttnRange] = [AttnRange.from_range(r) for r in ranges] if ranges is not None else []

    # Conversions

    @classmethod
    def from_ranges(cls, ranges: AttnRanges | Iterable[RangeLike] | Any, check: bool = False) -> AttnRanges:
        """From a list of pairs or ranges, another AttnRanges (copied), or an ``(n, 2)`` integer array or tensor."""
        if isinstance(ranges, np.ndarray) or hasattr(ranges, "detach"):
            ranges = checked_int32_array(ranges, "ranges", (None, 2)).tolist()
        result = cls(ranges)
        if check:
            result.check_valid()
        return result

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Sequence[int], seq_len: int) -> AttnRanges:
        """One range per sequence. Raises ValueError unless strictly increasing from 0 to ``seq_len``."""
        cu_seqlens = [int(c) for c in cu_seqlens]
        check_valid_cu_seqlens(cu_seqlens, seq_len)
        return cls(itertools.pairwise(cu_seqlens))

    def to_naive_ranges(self) -> list[NaiveRange]:
        return [r.to_naive_range() for r in self._ranges]

    def to_cu_seqlens(self, seq_len: int) -> list[int]:
        """Boundaries. Raises ValueError unless the ranges tile ``[0, seq_len)`` in order."""
        if not self.is_cu_seqlens(seq_len):
            raise ValueError(f"ranges must tile [0, {seq_len}) in order to be cu_seqlens, got {self}")
        return [0, *(r.end for r in self._ranges)]

    def to_numpy(self) -> npt.NDArray[np.int32]:
        """``(n, 2)`` int32. Raises ValueError when a bound does not fit."""
        return checked_int32_array(self.to_naive_ranges(), "ranges", (None, 2))

    def to_tensor(self, device: torch.device | str | int = "cpu") -> torch.Tensor:
        """``(n, 2)`` int32 tensor."""
        import torch

        return torch.from_numpy(self.to_numpy()).to(device)

    def clone(self) -> AttnRanges:
        return AttnRanges(self._ranges)

    # List edits

    def append(self, attn_range: AttnRange, check: bool = False) -> None:
        self.insert(len(self._ranges), attn_range, check)

    def insert(self, idx: int, attn_range: AttnRange, check: bool = False) -> None:
        if not isinstance(attn_range, AttnRange):
            raise TypeError(f"attn_range must be an AttnRange, got {type(attn_range).__name__} {attn_range!r}")
        if check:
            attn_range.check_valid()
        self._ranges.insert(idx, attn_range)

    def extend(self, attn_ranges: AttnRanges | Iterable[AttnRange], check: bool = False) -> None:
        for attn_range in list(attn_ranges):
            self.append(attn_range, check)

    def pop(self, idx: int = -1, check: bool = False) -> AttnRange:
        """Removes and returns one range. Raises IndexError on an empty list."""
        popped = self._ranges.pop(idx)
        if check:
            self.check_valid()
        return popped

    def clear_empty(self) -> AttnRanges:
        """A new list without the empty ranges."""
        return AttnRanges(r for r in self._ranges if not r.is_empty())

    def sort(self) -> AttnRanges:
        """A new list, stably sorted by start."""
        result = AttnRanges(self._ranges)
        result._ranges.sort(key=lambda r: r.start)
        return result

    # Sets of tokens

    def _merged(self) -> list[NaiveRange]:
        merged: list[NaiveRange] = []
        for start, end in sorted(r.to_naive_range() for r in self._ranges if r.start < r.end):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((start, end))
        return merged

    def merge(self) -> AttnRanges:
        """The same tokens as sorted, disjoint ranges with gaps between; empty ranges vanish."""
        return AttnRanges(self._merged())

    def merge_with_split_alignment(self, split_alignment: int = 1) -> AttnRanges:
        """Rounds starts down and ends up to multiples of ``split_alignment``, then merges; empty ranges vanish."""
        n = checked_int(split_alignment, "split_alignment", minimum=1)
        return AttnRanges([(r.start // n * n, -(-r.end // n) * n) for r in self._ranges if not r.is_empty()]).merge()

    def chunk(self, chunk_size: int, check: bool = True) -> list[AttnRanges]:
        """Cuts the tokens, in list order, into pieces of exactly ``chunk_size`` (the last may be shorter).

        Raises ValueError when ``check`` and the ranges overlap.
        """
        chunk_size = checked_int(chunk_size, "chunk_size", minimum=1)
        if check and not self.is_non_overlap():
            raise ValueError(f"ranges must not overlap to be cut into chunks, got {self}")
        chunks: list[AttnRanges] = []
        room = 0
        for r in self._ranges:
            start = r.start
            while start < r.end:
                if room == 0:
                    chunks.append(AttnRanges())
                    room = chunk_size
                end = min(r.end, start + room)
                chunks[-1].append(AttnRange(start, end))
                room -= end - start
                start = end
        return chunks

    def truncate(self, start: int | None = None, end: int | None = None) -> AttnRanges:
        """Each range cut to the bounds; ranges left empty are dropped."""
        cut = (r.truncate(start, end) for r in self._ranges)
        return AttnRanges(r for r in cut if not r.is_empty())

    def find_hole_ranges(
        self, other_attn_ranges: AttnRanges, is_self_merged: bool = False, is_other_merged: bool = False
    ) -> AttnRanges:
        """Tokens of ``self`` that are not in the other, merged. Neither list is changed."""
        mine = self.to_naive_ranges() if is_self_merged else self._merged()
        other = other_attn_ranges.to_naive_ranges() if is_other_merged else other_attn_ranges._merged()
        holes: list[NaiveRange] = []
        j = 0
        for start, end in mine:
            while j < len(other) and other[j][1] <= start:
                j += 1
            i = j
            while start < end:
                if i == len(other) or other[i][0] >= end:
                    holes.append((start, end))
                    break
                if start < other[i][0]:
                    holes.append((start, other[i][0]))
                start = other[i][1]
                i += 1
        return AttnRanges(holes)

    def find_overlap_ranges(
        self, other_attn_ranges: AttnRanges, is_self_merged: bool = False, is_other_merged: bool = False
    ) -> AttnRanges:
        """Tokens in both, merged."""
        mine = self.to_naive_ranges() if is_self_merged else self._merged()
        other = other_attn_ranges.to_naive_ranges() if is_other_merged else other_attn_ranges._merged()
        common: list[NaiveRange] = []
        i = j = 0
        while i < len(mine) and j < len(other):
            start, end = max(mine[i][0], other[j][0]), min(mine[i][1], other[j][1])
            if start < end:
                common.append((start, end))
            if mine[i][1] < other[j][1]:
                i += 1
            else:
                j += 1
        return AttnRanges(common).merge()

    # Coordinates of the concatenation

    def make_range_local(
        self, other_attn_range: AttnRange, is_self_merged: bool = False, prefix_offset: list[int] | None = None
    ) -> tuple[AttnRange, AttnRange]:
        """Maps a range of global tokens to where it lies in the concatenation of the merged ranges of ``self``.

        Args:
            prefix_offset: start of each merged range in the concatenation; computed when None.

        Returns:
            the local range, and the merged range it lies in. Raises ValueError when no single one holds it.
        """
        merged = self if is_self_merged else self.merge()
        if prefix_offset is None:
            prefix_offset = merged._prefix_offset()
        return merged._localise(other_attn_range, prefix_offset)

    def make_ranges_local(self, other_attn_ranges: AttnRanges, is_self_merged: bool = False) -> AttnRanges:
        """:meth:`make_range_local` of each range."""
        merged = self if is_self_merged else self.merge()
        offsets = merged._prefix_offset()
        return AttnRanges(merged._localise(r, offsets)[0] for r in other_attn_ranges)

    def _prefix_offset(self) -> list[int]:
        return [0, *itertools.accumulate(r.seqlen for r in self._ranges)][:-1] if self._ranges else []

    def _localise(self, attn_range: AttnRange, offsets: list[int]) -> tuple[AttnRange, AttnRange]:
        i = bisect.bisect_right(self._ranges, attn_range.start, key=lambda r: r.start) - 1
        if i < 0 or not attn_range.is_subrange_of(self._ranges[i]):
            raise ValueError(f"{attn_range} must lie within one range of {self}")
        return attn_range.offset(offsets[i] - self._ranges[i].start), self._ranges[i]

    # Predicates

    def is_sorted(self) -> bool:
        """Starts do not decrease."""
        return all(a.start <= b.start for a, b in itertools.pairwise(self._ranges))

    def is_merged(self) -> bool:
        """Sorted with a gap between neighbours."""
        return all(a.end < b.start for a, b in itertools.pairwise(self._ranges))

    def is_non_overlap(self) -> bool:
        """No token lies in two ranges."""
        return self.total_seqlen == self.union_size()

    def is_cu_seqlens(self, seq_len: int) -> bool:
        """The ranges, none empty, tile ``[0, seq_len)`` in order."""
        if not self._ranges:
            return seq_len == 0
        ends = [0, *(r.end for r in self._ranges)]
        return all(r.start == e for r, e in zip(self._ranges, ends)) and is_valid_cu_seqlens(ends, seq_len)

    def is_valid(self) -> bool:
        return all(r.is_valid_close() for r in self._ranges)

    def check_valid(self) -> None:
        """Raises ValueError (RangeError) when some range has start > end, as assigning to one can bring about."""
        for r in self._ranges:
            r.check_valid()

    def is_empty(self) -> bool:
        """No ranges (a list of empty ranges is not empty)."""
        return not self._ranges

    # Measures

    @property
    def total_seqlen(self) -> int:
        """Sum of the lengths."""
        return sum(r.seqlen for r in self._ranges)

    @property
    def max_seqlen(self) -> int:
        """Longest length, 0 without ranges."""
        return max((r.seqlen for r in self._ranges), default=0)

    @property
    def start(self) -> int:
        """Smallest start. Raises ValueError without ranges."""
        if not self._ranges:
            raise ValueError("start needs at least one range, got none")
        return min(r.start for r in self._ranges)

    @property
    def end(self) -> int:
        """Largest end. Raises ValueError without ranges."""
        if not self._ranges:
            raise ValueError("end needs at least one range, got none")
        return max(r.end for r in self._ranges)

    @property
    def size(self) -> int:
        """Number of ranges."""
        return len(self._ranges)

    @property
    def last(self) -> AttnRange:
        """The last range. Raises IndexError without ranges."""
        return self._ranges[-1]

    @property
    def points(self) -> list[int]:
        """All starts and ends, sorted, each once."""
        return sorted({p for r in self._ranges for p in (r.start, r.end)})

    def union_size(self) -> int:
        """Number of different tokens."""
        return sum(end - start for start, end in self._merged())

    def intersect_size(self) -> int:
        """Sum over tokens of (number of ranges that hold it, less one)."""
        return self.total_seqlen - self.union_size()

    def intersect_size_with(self, other: AttnRanges) -> int:
        """Number of different tokens in both."""
        return self.find_overlap_ranges(other).total_seqlen

    def union_size_with(self, other: AttnRanges) -> int:
        """Number of different tokens in either."""
        return self.union_size() + other.union_size() - self.intersect_size_with(other)

    # Sequence protocol

    def __len__(self) -> int:
        return len(self._ranges)

    def __iter__(self) -> Iterator[AttnRange]:
        return iter(self._ranges)

    @overload
    def __getitem__(self, idx: int) -> AttnRange: ...
    @overload
    def __getitem__(self, idx: slice) -> AttnRanges: ...
    def __getitem__(self, idx: int | slice) -> AttnRange | AttnRanges:
        if isinstance(idx, slice):
            return AttnRanges(self._ranges[idx])
        return self._ranges[idx]

    def __setitem__(self, idx: int, value: AttnRange) -> None:
        if not isinstance(value, AttnRange):
            raise TypeError(f"a range must be an AttnRange, got {type(value).__name__} {value!r}")
        self._ranges[idx] = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AttnRanges):
            return NotImplemented
        return self._ranges == other._ranges

    def __hash__(self) -> int:
        return hash(tuple(self._ranges))

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self._ranges))}]"


def range_array(ranges: Any, name: str) -> npt.NDArray[np.int32]:
    """``(n, 2)`` int32 of AttnRanges, a sequence of ranges or pairs, an array or a tensor.

    Raises TypeError for something else, ValueError for a wrong shape or a bound that does not fit int32.
    """
    if isinstance(ranges, AttnRanges):
        ranges = ranges.to_naive_ranges()
    elif isinstance(ranges, (list, tuple)) and any(isinstance(r, AttnRange) for r in ranges):
        ranges = [AttnRange.from_range(r).to_naive_range() for r in ranges]
    elif not (isinstance(ranges, (list, tuple, np.ndarray)) or hasattr(ranges, "detach")):
        raise TypeError(f"{name} must be AttnRanges, pairs, an (n, 2) array or a tensor, got {type(ranges).__name__}")
    return checked_int32_array(ranges, name, (None, 2))
