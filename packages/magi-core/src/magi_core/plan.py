"""FlexPlan: what every attention backend reads. Built once per mask by the host library, reused by layers and steps.

The plan is one flat int32 buffer, the same on host and device; csrc/include/magi/plan_format.h is its definition, and
field positions come from there through the library.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import _host
from .bands import Bands
from .errors import checked_int, checked_int32_array

if TYPE_CHECKING:
    import torch

    from .mask import Mask

Int32Array = npt.NDArray[np.int32]


class _Format(NamedTuple):
    header: dict[str, int]  # word of each field
    constants: dict[str, int]


@functools.lru_cache(maxsize=1)
def plan_format() -> _Format:
    """Positions and constants of the buffer, as compiled into the host library."""
    header: dict[str, int] = {}
    constants: dict[str, int] = {}
    for entry in str(_host.lib().plan_format()).split():
        name, value = entry.split("=")
        if name.startswith("header."):
            header[name.removeprefix("header.")] = int(value)
        else:
            constants[name] = int(value)
    return _Format(header, constants)


class FlexPlan:
    """A plan; see :meth:`build`. Immutable; compare ``digest`` to compare plans."""

    __slots__ = ("_buffer", "_header", "_tensors", "source")

    _buffer: Int32Array
    _header: dict[str, int]
    _tensors: dict[str, Any]
    source: Bands | None

    def __init__(self, buffer: Any) -> None:
        """Wraps a buffer. Raises ValueError when it is no FlexPlan of this version."""
        self._set(checked_int32_array(buffer, "buffer", (None,)), None)

    def _set(self, buffer: Int32Array, source: Bands | None) -> None:
        header, constants = plan_format()
        if len(buffer) < constants["header_words"] or buffer[header["magic"]] != constants["magic"]:
            raise ValueError(f"buffer must start with a FlexPlan header, got {len(buffer)} words without its magic")
        if buffer[header["version"]] != constants["version"]:
            raise ValueError(
                f"buffer must have FlexPlan version {constants['version']}, got {int(buffer[header['version']])}"
            )
        self._header = {name: int(buffer[word]) for name, word in header.items()}
        if not constants["header_words"] <= self._header["num_words"] <= len(buffer):
            raise ValueError(f"buffer must hold the {self._header['num_words']} words of its plan, got {len(buffer)}")
        self._buffer = buffer
        self._tensors = {}
        self.source = source
        for name, (offset, count, words) in self._sections().items():
            if count < 0 or offset < constants["header_words"] or offset + count * words > self._header["num_words"]:
                raise ValueError(f"buffer must hold its {name}, got {count} records at word {offset}")

    @classmethod
    def build(
        cls,
        mask_or_bands: Mask | Bands,
        total_q: int | None = None,
        total_k: int | None = None,
        *,
        num_heads_q: int = 0,
        num_heads_kv: int = 0,
        block_m: int = 128,
        block_n: int = 128,
        bwd_block_m: int = 64,
        bwd_block_n: int = 128,
        q_tile_starts: npt.ArrayLike | None = None,
        stage: int = 0,
        num_stages: int = 1,
        tile_flags: npt.ArrayLike | None = None,
        allow_overlap: bool = False,
        num_sms: int = 132,
    ) -> FlexPlan:
        """Plans forward and backward attention over a mask.

        Args:
            mask_or_bands: a Mask, or Bands with both totals.
            total_q, total_k: tokens of q and of k; those of the mask when None.
            num_heads_q, num_heads_kv: head counts that the plan is for. Both 0: any, and nothing is split.
            block_m, block_n: most rows of a forward tile; columns of a forward step.
            bwd_block_m, bwd_block_n: rows of a backward step; columns of a backward tile.
            q_tile_starts: ``(num_tiles + 1,)`` ascending boundaries of forward tiles, shared by all stages; every
                ``block_m`` rows when None.
            stage, num_stages: position among the stages of one distributed attention.
            tile_flags: per forward tile FIRST (1) + LAST (2): whether this stage is the first, the last that touches
                it; both when None. Of several stages, a plan holds the tiles it touches; a tile that none touches
                has both flags in stage 0.
            allow_overlap: a pair covered twice counts twice instead of raising.
            num_sms: processors to balance for. Splits depend on the arguments alone.

        Raises:
            ValueError: a band outside the totals, a doubly covered pair (names two slices), a bad option.
        """
        bands: Any = getattr(mask_or_bands, "bands", mask_or_bands)
        if not isinstance(bands, Bands):
            raise TypeError(f"mask_or_bands must be a Mask or Bands, got {type(mask_or_bands).__name__}")
        totals = []
        for name, total in (("total_q", total_q), ("total_k", total_k)):
            if total is None:
                total = getattr(mask_or_bands, name, None)
            if total is None:
                raise ValueError(f"{name} must be given when planning Bands, got None")
            totals.append(checked_int(total, name, minimum=0))
        _check_inside(bands, *totals)
        if not allow_overlap:
            bands.check_disjoint()
        starts = _or_empty(q_tile_starts, "q_tile_starts")
        flags = _or_empty(tile_flags, "tile_flags")
        if q_tile_starts is not None and len(starts) == 0:
            raise ValueError("q_tile_starts must have at least one entry, got none")
        if len(starts) == 1 and totals[0] == 0:
            flags = flags[:0]
        sizes = {
            "num_heads_q": (num_heads_q, 0),
            "num_heads_kv": (num_heads_kv, 0),
            "block_m": (block_m, 1),
            "block_n": (block_n, 1),
            "bwd_block_m": (bwd_block_m, 1),
            "bwd_block_n": (bwd_block_n, 1),
        }
        checked = [checked_int(value, name, minimum=least) for name, (value, least) in sizes.items()]
        buffer = _host.lib().plan_build(
            bands.canonical()._data,
            *totals,
            *checked,
            starts,
            flags,
            checked_int(stage, "stage", minimum=0),
            checked_int(num_stages, "num_stages", minimum=1),
            bool(allow_overlap),
            checked_int(num_sms, "num_sms", minimum=1),
        )
        plan = object.__new__(cls)
        plan._set(_host.array(buffer), bands)
        return plan

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> FlexPlan:
        """Wraps the buffer of a plan. A CUDA tensor is copied to the host, which synchronises."""
        plan = cls(tensor)
        plan._tensors[str(tensor.device)] = tensor
        return plan

    @property
    def buffer(self) -> Int32Array:
        """``(num_words,)`` int32, read-only."""
        view: Int32Array = self._buffer.view()
        view.setflags(write=False)
        return view

    def tensor(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """The buffer as an int32 tensor; copied to each device once. Do not write to it."""
        import torch

        where = torch.device(device)
        if where.type != "cpu" and ":" not in str(where):  # the current device, by its number
            where = torch.empty(0, device=where).device
        key = str(where)
        if key not in self._tensors:
            self._tensors[key] = torch.from_numpy(self._buffer).to(where)
        result: torch.Tensor = self._tensors[key]
        return result

    @property
    def header(self) -> dict[str, int]:
        """Header fields by name, in the order of the format."""
        return dict(self._header)

    @property
    def total_q(self) -> int:
        return self._header["total_q"]

    @property
    def total_k(self) -> int:
        return self._header["total_k"]

    @property
    def digest(self) -> int:
        """64-bit digest of everything the plan was built from: equal digests, equal plans."""
        return (self._header["digest_hi"] & 0xFFFFFFFF) << 32 | (self._header["digest_lo"] & 0xFFFFFFFF)

    def area(self) -> int:
        """Visible pairs; doubly covered ones count twice."""
        return self._header["area_hi"] << 32 | (self._header["area_lo"] & 0xFFFFFFFF)

    @property
    def may_overlap(self) -> bool:
        """The plan was built with ``allow_overlap``, or on a device, where double cover is not looked for."""
        constants = plan_format().constants
        return bool(self._header["flags"] & (constants["allow_overlap"] | constants["device_made"]))

    def _sections(self) -> dict[str, tuple[int, int, int]]:
        h, c = self._header, plan_format().constants
        sections = {"bands": (h["bands"], h["num_bands"], c["band_words"])}
        for direction in ("fwd", "bwd"):
            for record in ("tile", "job", "item"):
                name = f"{direction}_{record}s"
                sections[name] = (h[name], h[f"num_{name}"], c[f"{record}_words"])
        sections["masks"] = (h["masks"], h["num_masks"], c["mask_words"])
        return sections

    def _section(self, name: str) -> Int32Array:
        offset, count, words = self._sections()[name]
        return self.buffer[offset : offset + count * words].reshape(count, words)

    @property
    def bands(self) -> Int32Array:
        """``(n, 6)``: q0, q1, k0, k1, lo, hi; canonical."""
        return self._section("bands")

    @property
    def fwd_tiles(self) -> Int32Array:
        """``(n, 8)``: begin, end, job_begin, job_end, flags, num_splits, split_slot, cost. Tiles of queries."""
        return self._section("fwd_tiles")

    @property
    def fwd_jobs(self) -> Int32Array:
        """``(n, 4)``: begin, end, class (0 full, 1 one band, 2 bit mask), index. Intervals of keys."""
        return self._section("fwd_jobs")

    @property
    def fwd_items(self) -> Int32Array:
        """``(n, 8)``: tile, job_begin, job_end, clip_begin, clip_end, head_begin, head_end, split; queue order."""
        return self._section("fwd_items")

    @property
    def bwd_tiles(self) -> Int32Array:
        """As ``fwd_tiles``, tiles of keys."""
        return self._section("bwd_tiles")

    @property
    def bwd_jobs(self) -> Int32Array:
        """As ``fwd_jobs``, intervals of queries."""
        return self._section("bwd_jobs")

    @property
    def bwd_items(self) -> Int32Array:
        """As ``fwd_items``; ``[head_begin, head_end)`` are query heads inside the group of one kv head (0, 0: all)."""
        return self._section("bwd_items")

    @property
    def masks(self) -> Int32Array:
        """``(n, 512)``: 128 x 128 bits; bit (row r, column c) is word ``4 * r + c // 32``, bit ``c % 32``."""
        return self._section("masks")

    def check(self) -> None:
        """Raises ValueError for what a device-made plan recorded, and for a pair covered twice where not allowed.

        Host plans were checked when built. A plan that was made on a device is read back, which synchronises.
        """
        c = plan_format().constants
        for tensor in self._tensors.values():
            if tensor.device.type != "cpu":  # status words are written by the kernels that made the plan
                fresh = tensor.cpu().numpy()
                self._header = {name: int(fresh[word]) for name, word in plan_format().header.items()}
        status, index = self._header["status"], self._header["status_slice"]
        messages = {
            "range_outside": f"must lie within total_q ({self.total_q}) and total_k ({self.total_k})",
            "range_reversed": "must satisfy start <= end",
            "bad_type": "must have a mask type 0, 1, 2 or 3",
        }
        for name, message in messages.items():
            if status & c[name]:
                raise ValueError(f"slice {index} of q_ranges, k_ranges, attn_type_map {message}, got another")
        if not self._header["flags"] & c["allow_overlap"]:
            (self.source if self.source is not None else Bands(self.bands)).check_disjoint()

    def __repr__(self) -> str:
        h = self._header
        return (
            f"FlexPlan(total_q={h['total_q']}, total_k={h['total_k']}, area={self.area()}, bands={h['num_bands']}, "
            f"fwd {h['num_fwd_tiles']} tiles {h['num_fwd_jobs']} jobs {h['num_fwd_items']} items, "
            f"bwd {h['num_bwd_tiles']} tiles {h['num_bwd_jobs']} jobs {h['num_bwd_items']} items)"
        )


def _or_empty(values: Any, name: str) -> Int32Array:
    return np.zeros(0, np.int32) if values is None else checked_int32_array(values, name, (None,))


def _check_inside(bands: Bands, total_q: int, total_k: int) -> None:
    data = bands.data
    outside = (data[:, 0] < 0) | (data[:, 1] > total_q) | (data[:, 2] < 0) | (data[:, 3] > total_k)
    if outside.any():
        i = int(np.flatnonzero(outside)[0])
        what = f"band {i}" if bands.source is None else f"slice {bands.source[i]}"
        q0, q1, k0, k1 = data[i, :4].tolist()
        raise ValueError(
            f"{what} must lie within total_q ({total_q}) and total_k ({total_k}), got q [{q0}, {q1}), k [{k0}, {k1})"
        )
