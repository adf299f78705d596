"""Bands: the one internal form of every mask.

A band is a rectangle cut by two diagonals: cells ``(q, k)`` with ``q0 <= q < q1``, ``k0 <= k < k1`` and
``lo <= k - q <= hi``. Every public slice type is one band, so is a sliding window, and so is any part of a band inside
a rectangle. The algebra lives in the host library (csrc/host/band.h).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _host
from .errors import checked_int, checked_int32_array
from .mask_type import mask_type_codes
from .ranges import range_array

Int32Array = npt.NDArray[np.int32]


class Slices(NamedTuple):
    """Masks as callers write them: ``(n, 2)``, ``(n, 2)`` and ``(n,)`` int32."""

    q_ranges: Int32Array
    k_ranges: Int32Array
    mask_types: Int32Array


class Bands:
    """An immutable list of non-empty bands, each shrunk to its visible cells.

    Args:
        data: ``(n, 6)`` integers, columns ``q0, q1, k0, k1, lo, hi``. Rows are shrunk; those that show nothing are
            dropped.
    """

    __slots__ = ("_canonical", "_data", "_digest", "source")

    _data: Int32Array  # writeable, because read-only memory cannot cross DLPack; never handed out
    source: Int32Array | None
    _canonical: Bands | None
    _digest: int | None

    def __init__(self, data: Any = ()) -> None:
        self._set(_host.array(_host.lib().bands_shrink(checked_int32_array(data, "data", (None, 6)))))

    def _set(self, data: Int32Array, source: Int32Array | None = None) -> None:
        self._data = data
        self.source = source
        self._canonical = None
        self._digest = None

    @classmethod
    def _of(cls, data: Int32Array, source: Int32Array | None = None) -> Bands:
        bands = object.__new__(cls)
        bands._set(data, source)
        return bands

    @classmethod
    def from_slices(
        cls,
        q_ranges: Any,
        k_ranges: Any,
        mask_types: Any = None,
        *,
        total_q: int | None = None,
        total_k: int | None = None,
    ) -> Bands:
        """One band per slice that shows something, in the order of the slices; ``source`` holds their indices.

        Args:
            q_ranges, k_ranges: AttnRanges, pairs, ``(n, 2)`` arrays or tensors; ``0 <= start <= end < 2**31``.
            mask_types: one type for all or one each (enum, str or int 0..3); full when None.
            total_q, total_k: tokens that the ranges, empty ones too, must not reach past; unchecked when None.

        Raises:
            ValueError: a range or a type out of bounds, or lengths that differ. TypeError: no integers.
        """
        q = range_array(q_ranges, "q_ranges")
        k = range_array(k_ranges, "k_ranges")
        if len(q) != len(k):
            raise ValueError(f"k_ranges must have as many ranges as q_ranges ({len(q)}), got {len(k)}")
        for name, ranges, total_name, total in (
            ("q_ranges", q, "total_q", total_q),
            ("k_ranges", k, "total_k", total_k),
        ):
            if total is not None and len(ranges) and ranges[:, 1].max() > checked_int(total, total_name, minimum=0):
                i = int(np.flatnonzero(ranges[:, 1] > total)[0])
                raise ValueError(
                    f"{name}[{i}] must lie within {total_name} ({total}), got [{ranges[i, 0]}, {ranges[i, 1]})"
                )
        rows = _host.array(_host.lib().bands_from_slices(q, k, mask_type_codes(mask_types, len(q))))
        source = np.ascontiguousarray(rows[:, 6])
        source.setflags(write=False)
        return cls._of(np.ascontiguousarray(rows[:, :6]), source)

    @property
    def data(self) -> Int32Array:
        """``(n, 6)`` int32, C-contiguous, read-only."""
        view: Int32Array = self._data.view()
        view.setflags(write=False)
        return view

    def canonical(self) -> Bands:
        """The same cells with bands fused where the union of two is a band, sorted by ``(q0, k0)``."""
        if self._canonical is None:
            result = Bands._of(_host.array(_host.lib().bands_canonical(self._data)))
            result._canonical = result
            self._canonical = result
        return self._canonical

    @property
    def digest(self) -> int:
        """64-bit digest of the canonical form: equal masks have equal digests."""
        if self._digest is None:
            self._digest = int(_host.lib().bands_digest(self.canonical()._data)) & (2**64 - 1)
        return self._digest

    def area(self) -> int:
        """Number of visible cells; a cell that two bands show counts twice."""
        return sum(self.areas().tolist())

    def areas(self) -> npt.NDArray[np.int64]:
        """``(n,)`` visible cells of each band."""
        return _host.array(_host.lib().bands_areas(self._data))

    def overlaps(self, limit: int = 1) -> Int32Array:
        """``(n, 2)`` indices of up to ``limit`` pairs of bands that show a cell in common."""
        return _host.array(_host.lib().bands_overlaps(self._data, checked_int(limit, "limit", minimum=0)))

    def check_disjoint(self) -> None:
        """Raises ValueError naming two slices (or bands) that show a pair in common."""
        pairs = self.overlaps()
        if not len(pairs):
            return
        names = []
        for i in pairs[0].tolist():
            q0, q1, k0, k1, _, _ = self._data[i].tolist()
            what = f"band {i}" if self.source is None else f"slice {self.source[i]}"
            names.append(f"{what} (visible in q [{q0}, {q1}), k [{k0}, {k1}))")
        i, j = pairs[0].tolist()
        both = Bands(
            [[*(int(f(a, b)) for f, a, b in zip((max, min, max, min, max, min), self._data[i], self._data[j]))]]
        )
        q, k = int(both._data[0, 0]), int(max(both._data[0, 2], both._data[0, 0] + both._data[0, 4]))
        raise ValueError(
            f"slices must not cover a pair twice, got {names[0]} and {names[1]} both covering q {q}, k {k}; "
            "pass allow_overlap=True to count such pairs twice"
        )

    def clip(self, q: tuple[int, int] | None = None, k: tuple[int, int] | None = None) -> Bands:
        """The parts inside rows ``[q[0], q[1])`` and columns ``[k[0], k[1])``; None keeps all."""
        limits: list[int] = []
        for name, interval in (("q", q), ("k", k)):
            low, high = (-(2**31), 2**31 - 1) if interval is None else interval
            limits.append(checked_int(low, f"{name} start", maximum=None))
            limits.append(checked_int(high, f"{name} end", maximum=None))
        wide = 2**62
        return Bands._of(
            _host.array(_host.lib().bands_clip(self._data, *(max(-wide, min(wide, limit)) for limit in limits)))
        )

    def shift(self, dq: int = 0, dk: int = 0) -> Bands:
        """The bands moved by ``dq`` rows and ``dk`` columns. Raises ValueError when one leaves ``[0, 2**31 - 1]``."""
        dq = checked_int(dq, "dq", minimum=1 - 2**31)
        dk = checked_int(dk, "dk", minimum=1 - 2**31)
        return Bands._of(_host.array(_host.lib().bands_shift(self._data, dq, dk)), self.source)

    def to_slices(self) -> Slices:
        """Public slices that show exactly these cells: at most three per band, in the order of the bands."""
        rows = _host.array(_host.lib().bands_to_slices(self._data))
        return Slices(*(np.ascontiguousarray(part) for part in (rows[:, 0:2], rows[:, 2:4], rows[:, 4])))

    def to_counts(self, total_q: int, total_k: int) -> Int32Array:
        """``(total_q, total_k)`` int32: how many bands show each cell."""
        shape = (checked_int(total_q, "total_q", minimum=0), checked_int(total_k, "total_k", minimum=0))
        counts = np.zeros(shape, np.int32)
        _host.lib().bands_count(self._data, counts)
        return counts

    def to_dense(self, total_q: int, total_k: int) -> npt.NDArray[np.bool_]:
        """``(total_q, total_k)`` bool: cells that some band shows."""
        return self.to_counts(total_q, total_k) > 0

    def __len__(self) -> int:
        return len(self._data)

    def __eq__(self, other: object) -> bool:
        """Equal lists of bands; compare digests, or canonical forms, for equal masks."""
        if not isinstance(other, Bands):
            return NotImplemented
        return bool(np.array_equal(self._data, other._data))

    def __hash__(self) -> int:
        return hash(self._data.tobytes())

    def __repr__(self) -> str:
        rows = ", ".join(f"[{a}:{b}, {c}:{d}] {lo}..{hi}" for a, b, c, d, lo, hi in self._data[:4].tolist())
        return f"Bands({len(self)}: {rows}{', ...' if len(self) > 4 else ''})"
