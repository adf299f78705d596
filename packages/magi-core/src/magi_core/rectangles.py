"""Rectangles cut by diagonals, and dense masks, as users of the public API hold them; both are thin views of bands."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from .bands import Bands
from .errors import checked_int
from .mask import Mask
from .mask_type import AttnMaskType
from .ranges import AttnRange, AttnRanges

if TYPE_CHECKING:
    import torch


class AttnRectangle:
    """The cells of ``q_range x k_range`` whose ``k - q`` lies in ``[d_range.start, d_range.end]``, both ends included.

    The ranges are copied, then shrunk to the visible cells.

    Args:
        q_range, k_range: half-open ranges.
        d_range: inclusive range of diagonals; all when None.
        mask_type: AttnMaskType or 0..3, a further limit: causal and bi_causal bound ``k - q`` by
            ``k_range.end - q_range.end`` from above, inv_causal and bi_causal by ``k_range.start - q_range.start``
            from below.

    Raises:
        ValueError: no cell is left. TypeError: ``mask_type`` is neither an AttnMaskType nor an int.
    """

    __slots__ = ("d_range", "k_range", "q_range")

    q_range: AttnRange
    k_range: AttnRange
    d_range: AttnRange

    def __init__(
        self,
        q_range: AttnRange,
        k_range: AttnRange,
        d_range: AttnRange | None = None,
        mask_type: AttnMaskType | int = AttnMaskType.FULL,
    ) -> None:
        if isinstance(mask_type, bool) or not isinstance(mask_type, (AttnMaskType, int, np.integer)):
            raise TypeError(f"mask_type must be an AttnMaskType or an int, got {type(mask_type).__name__}")
        bits = AttnMaskType.from_any(mask_type).to_int_type()
        low, high = k_range.start - (q_range.end - 1), k_range.end - 1 - q_range.start
        if bits & 1:
            high = k_range.end - q_range.end
        if bits & 2:
            low = k_range.start - q_range.start
        if d_range is not None:
            low, high = max(low, d_range.start), min(high, d_range.end)
        bands = Bands([(q_range.start, q_range.end, k_range.start, k_range.end, low, high)])
        if len(bands) == 0:
            raise ValueError(
                f"a rectangle must have a visible cell, got q {q_range}, k {k_range}, diagonals {low}..{high}"
            )
        self._set(bands.data[0].tolist())

    def _set(self, band: list[int]) -> None:
        q0, q1, k0, k1, low, high = band
        self.q_range, self.k_range, self.d_range = AttnRange(q0, q1), AttnRange(k0, k1), AttnRange(low, high)

    @classmethod
    def _of(cls, band: list[int]) -> AttnRectangle:
        rectangle = object.__new__(cls)
        rectangle._set(band)
        return rectangle

    def to_bands(self) -> Bands:
        """The rectangle as a list of one band."""
        q, k, d = self.q_range, self.k_range, self.d_range
        return Bands([(q.start, q.end, k.start, k.end, d.start, d.end)])

    def _within(self, q: tuple[int, int] | None, k: tuple[int, int] | None) -> AttnRectangle | None:
        part = self.to_bands().clip(q, k)
        return AttnRectangle._of(part.data[0].tolist()) if len(part) else None

    def cut_q(self, cut_pos: int) -> tuple[AttnRectangle | None, AttnRectangle | None]:
        """The rows below ``cut_pos`` and the others; None where nothing is visible."""
        return self._within((-(2**31), cut_pos), None), self._within((cut_pos, 2**31 - 1), None)

    def cut_k(self, cut_pos: int) -> tuple[AttnRectangle | None, AttnRectangle | None]:
        """The columns below ``cut_pos`` and the others; None where nothing is visible."""
        return self._within(None, (-(2**31), cut_pos)), self._within(None, (cut_pos, 2**31 - 1))

    def get_rect_within_q_segment(self, start: int, end: int) -> AttnRectangle | None:
        """The part in rows ``[start, end)``, None when nothing is visible there."""
        return self._within((start, end), None)

    def get_rect_within_k_segment(self, start: int, end: int) -> AttnRectangle | None:
        """The part in columns ``[start, end)``, None when nothing is visible there."""
        return self._within(None, (start, end))

    def intersection_q_id_on_left_boundary(self) -> int:
        """Row in which the lower diagonal meets the first column."""
        return self.k_range.start - self.d_range.start

    def intersection_q_id_on_right_boundary(self) -> int:
        """Row in which the upper diagonal meets the last column."""
        return self.k_range.end - 1 - self.d_range.end

    def _is_open(self) -> tuple[bool, bool]:
        """Whether the lower and the upper diagonal bound nothing."""
        return (
            self.d_range.start == self.k_range.start - (self.q_range.end - 1),
            self.d_range.end == self.k_range.end - 1 - self.q_range.start,
        )

    def _is_type(self, bits: int) -> bool:
        low_open, high_open = self._is_open()
        low_fits = self.d_range.start == self.k_range.start - self.q_range.start if bits & 2 else low_open
        high_fits = self.d_range.end == self.k_range.end - self.q_range.end if bits & 1 else high_open
        return low_fits and high_fits

    def is_full(self) -> bool:
        """A full slice shows exactly these cells."""
        return self._is_type(0)

    def is_causal(self) -> bool:
        """A causal slice of these ranges shows exactly these cells."""
        return self._is_type(1)

    def is_inv_causal(self) -> bool:
        """An inverse causal slice of these ranges shows exactly these cells."""
        return self._is_type(2)

    def is_bi_causal(self) -> bool:
        """A bi-causal slice of these ranges shows exactly these cells."""
        return self._is_type(3)

    def to_qk_range_mask_type(self) -> list[tuple[AttnRange, AttnRange, int]]:
        """At most three slices ``(q_range, k_range, type)`` that together show exactly these cells."""
        q, k, types = self.to_bands().to_slices()
        return [
            (AttnRange(*rows), AttnRange(*columns), code)
            for rows, columns, code in zip(q.tolist(), k.tolist(), types.tolist())
        ]

    def area(self) -> int:
        """Number of visible cells."""
        return self.to_bands().area()

    def clone(self) -> AttnRectangle:
        return AttnRectangle(self.q_range, self.k_range, self.d_range)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AttnRectangle):
            return NotImplemented
        mine, theirs = (self.q_range, self.k_range, self.d_range), (other.q_range, other.k_range, other.d_range)
        return mine == theirs

    def __hash__(self) -> int:
        return hash((self.q_range, self.k_range, self.d_range))

    def __repr__(self) -> str:
        return f"{self.q_range} x {self.k_range}, diagonals {self.d_range.start}..{self.d_range.end}"


class AttnRectangles:
    """List of :class:`AttnRectangle`."""

    __slots__ = ("_rectangles",)

    def __init__(self, rectangles: Iterable[AttnRectangle] = ()) -> None:
        self._rectangles: list[AttnRectangle] = []
        self.extend(rectangles)

    @classmethod
    def from_ranges(cls, q_ranges: Any, k_ranges: Any, mask_types: Any = None) -> AttnRectangles:
        """One rectangle per slice that shows something. Arguments as for ``Bands.from_slices``."""
        return cls.from_bands(Bands.from_slices(q_ranges, k_ranges, mask_types))

    @classmethod
    def from_bands(cls, bands: Bands) -> AttnRectangles:
        return cls(AttnRectangle._of(row) for row in bands.data.tolist())

    def to_bands(self) -> Bands:
        """The rectangles as bands, in order."""
        return Bands(
            [(*r.q_range.to_naive_range(), *r.k_range.to_naive_range(), *r.d_range.to_naive_range()) for r in self]
        )

    def append(self, rectangle: AttnRectangle) -> None:
        if not isinstance(rectangle, AttnRectangle):
            raise TypeError(f"rectangle must be an AttnRectangle, got {type(rectangle).__name__}")
        self._rectangles.append(rectangle)

    def extend(self, rectangles: Iterable[AttnRectangle]) -> None:
        for rectangle in list(rectangles):
            self.append(rectangle)

    def get_qo_ranges_union(self) -> AttnRanges:
        """Rows that some rectangle shows, merged."""
        return AttnRanges(r.q_range for r in self).merge()

    def get_kv_ranges_union(self) -> AttnRanges:
        """Columns that some rectangle shows, merged."""
        return AttnRanges(r.k_range for r in self).merge()

    def total_seqlen_qo(self) -> int:
        """Number of different rows that some rectangle shows."""
        return self.get_qo_ranges_union().total_seqlen

    def total_seqlen_kv(self) -> int:
        """Number of different columns that some rectangle shows."""
        return self.get_kv_ranges_union().total_seqlen

    def cut_q(self, cut_pos: int) -> tuple[AttnRectangles, AttnRectangles]:
        """The parts in rows below ``cut_pos``, and the others."""
        return self.get_rects_within_q_segment(-(2**31), cut_pos), self.get_rects_within_q_segment(cut_pos, 2**31 - 1)

    def cut_k(self, cut_pos: int) -> tuple[AttnRectangles, AttnRectangles]:
        """The parts in columns below ``cut_pos``, and the others."""
        return self.get_rects_within_k_segment(-(2**31), cut_pos), self.get_rects_within_k_segment(cut_pos, 2**31 - 1)

    def get_rects_within_q_segment(self, start: int, end: int) -> AttnRectangles:
        """The parts in rows ``[start, end)`` that show something."""
        return AttnRectangles.from_bands(self.to_bands().clip(q=(start, end)))

    def get_rects_within_k_segment(self, start: int, end: int) -> AttnRectangles:
        """The parts in columns ``[start, end)`` that show something."""
        return AttnRectangles.from_bands(self.to_bands().clip(k=(start, end)))

    def area(self) -> int:
        """Sum of the areas."""
        return self.to_bands().area()

    @property
    def size(self) -> int:
        """Number of rectangles."""
        return len(self._rectangles)

    def is_empty(self) -> bool:
        return not self._rectangles

    def __len__(self) -> int:
        return len(self._rectangles)

    def __iter__(self) -> Iterator[AttnRectangle]:
        return iter(self._rectangles)

    @overload
    def __getitem__(self, idx: int) -> AttnRectangle: ...
    @overload
    def __getitem__(self, idx: slice) -> AttnRectangles: ...
    def __getitem__(self, idx: int | slice) -> AttnRectangle | AttnRectangles:
        if isinstance(idx, slice):
            return AttnRectangles(self._rectangles[idx])
        return self._rectangles[idx]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AttnRectangles):
            return NotImplemented
        return self._rectangles == other._rectangles

    def __hash__(self) -> int:
        return hash(tuple(self._rectangles))

    def __repr__(self) -> str:
        return f"AttnRectangles({self._rectangles})"


class AttnMask:
    """A mask under the public names of dense masks; built by :meth:`from_ranges` or :meth:`from_mask`.

    Wraps a :class:`magi_core.mask.Mask` (``.mask``), and accepts all four slice types and any boolean mask.
    """

    __slots__ = ("mask",)

    def __init__(self, mask: Mask) -> None:
        if not isinstance(mask, Mask):
            raise TypeError(f"mask must be a Mask (see AttnMask.from_ranges, from_mask), got {type(mask).__name__}")
        self.mask = mask

    @classmethod
    def from_ranges(
        cls,
        q_ranges: Any,
        k_ranges: Any,
        attn_mask_type: Any,
        total_seqlen_q: int | None = None,
        total_seqlen_k: int | None = None,
    ) -> AttnMask:
        """From slices; totals are the largest ends when None. Errors as for ``Mask.from_slices``."""
        return cls(Mask.from_slices(q_ranges, k_ranges, attn_mask_type, total_q=total_seqlen_q, total_k=total_seqlen_k))

    @classmethod
    def from_mask(cls, mask: Any) -> AttnMask:
        """From a ``(total_q, total_k)`` bool array or tensor, true where visible."""
        return cls(Mask.from_dense(mask))

    @staticmethod
    def make_causal_mask(
        seqlen_q: int, seqlen_k: int, align: str = "bottom-right", device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Dense ``(seqlen_q, seqlen_k)`` bool causal mask, aligned to the "bottom-right" or "top-left" corner."""
        import torch

        if align not in ("bottom-right", "top-left"):
            raise ValueError(f"align must be 'bottom-right' or 'top-left', got {align!r}")
        rows = checked_int(seqlen_q, "seqlen_q", minimum=0)
        columns = checked_int(seqlen_k, "seqlen_k", minimum=0)
        diagonal = columns - rows if align == "bottom-right" else 0
        return torch.ones(rows, columns, dtype=torch.bool, device=device).tril(diagonal)

    @property
    def total_seqlen_q(self) -> int:
        return self.mask.total_q

    @property
    def total_seqlen_k(self) -> int:
        return self.mask.total_k

    @property
    def mask_tensor(self) -> torch.Tensor:
        """Dense ``(total_seqlen_q, total_seqlen_k)`` bool tensor, true where visible."""
        import torch

        return torch.from_numpy(self.mask.to_dense())

    def tuples(self) -> list[tuple[AttnRange, AttnRange, AttnMaskType]]:
        """The slices ``(q_range, k_range, type)``."""
        q, k, types = self.mask.slices()
        return [
            (AttnRange(*rows), AttnRange(*columns), AttnMaskType.from_int_type(code))
            for rows, columns, code in zip(q.tolist(), k.tolist(), types.tolist())
        ]

    @property
    def area(self) -> int:
        """Number of visible cells."""
        return self.mask.area()

    def calc_sub_area(self, q_range: AttnRange, k_range: AttnRange) -> int:
        """Number of visible cells in ``q_range x k_range``."""
        return self.mask.bands.clip(q_range.to_naive_range(), k_range.to_naive_range()).area()

    def make_sub_mask(self, q_range: AttnRange, k_range: AttnRange) -> AttnMask:
        """The part in ``q_range x k_range``, counted from their starts. Raises ValueError outside the mask."""
        for name, part, total in (("q_range", q_range, self.total_seqlen_q), ("k_range", k_range, self.total_seqlen_k)):
            if part.start < 0 or part.end > total:
                raise ValueError(f"{name} must lie within the mask's {total} tokens, got {part}")
        bands = self.mask.bands.clip(q_range.to_naive_range(), k_range.to_naive_range())
        return AttnMask(Mask(bands.shift(-q_range.start, -k_range.start), q_range.seqlen, k_range.seqlen))

    def is_square(self) -> bool:
        return self.total_seqlen_q == self.total_seqlen_k

    def is_empty(self) -> bool:
        """Nothing is visible."""
        return len(self.mask.bands) == 0

    def is_pure_full(self) -> bool:
        """Everything is visible."""
        return self.mask == Mask.full(self.total_seqlen_q, self.total_seqlen_k)

    def is_pure_causal(self) -> bool:
        """One causal slice, aligned to the bottom-right corner, over everything."""
        return self.mask == Mask.causal(self.total_seqlen_q, self.total_seqlen_k)

    def is_varlen_full(self) -> bool:
        """Packed documents that see themselves, whole."""
        return self._is_varlen(causal=False)

    def is_varlen_causal(self) -> bool:
        """Packed causal documents (bottom-right aligned)."""
        return self._is_varlen(causal=True)

    def _is_varlen(self, causal: bool) -> bool:
        # The slices as written say where documents end; of a mask without slices, its bands do.
        q, k, _ = self.mask.slices()
        order = np.lexsort((k[:, 0], q[:, 0]))
        q, k = q[order], k[order]
        kept = (q[:, 0] < q[:, 1]) & (k[:, 0] < k[:, 1])
        q, k = q[kept], k[kept]
        for ranges, total in ((q, self.total_seqlen_q), (k, self.total_seqlen_k)):
            starts = [0, *ranges[:, 1].tolist()]
            if ranges[:, 0].tolist() != starts[:-1] or starts[-1] != total:
                return False
        return self.mask == Mask.from_slices(
            q, k, int(causal), total_q=self.total_seqlen_q, total_k=self.total_seqlen_k
        )

    def visualize(self, save_path: str | os.PathLike[str] | None = None) -> None:
        """Draws the mask: text on standard output, or a picture file."""
        self.mask.show(save_path)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AttnMask):
            return NotImplemented
        return self.mask == other.mask

    def __hash__(self) -> int:
        return hash(self.mask)

    def __repr__(self) -> str:
        return f"AttnMask({self.mask!r})"
