"""Pictures of a mask coloured by the rank that computes each row: text for a terminal, or a PNG. Needs only NumPy."""

import colorsys
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from magi_core.bands import Bands

IntArray = npt.NDArray[np.int32]

HIDDEN = -1
_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def rank_grid(
    bands: "Bands", total_q: int, total_k: int, ranges_per_rank: Sequence[npt.ArrayLike], height: int, width: int
) -> IntArray:
    """The mask in ``height x width`` cells: the rank that computes a cell's rows, ``HIDDEN`` where nothing is visible.

    A cell counts as visible when a single one of its pairs is; where rows of several ranks share a cell, the rank of
    its middle row names it.

    Args:
        bands: the mask.
        total_q, total_k: tokens.
        ranges_per_rank: per rank ``(n, 2)`` half-open global ranges of its queries.
        height, width: cells, at most one per token are used.

    Returns:
        int32 ``(min(height, total_q), min(width, total_k))``.
    """
    if height < 1 or width < 1:
        raise ValueError(f"height and width must be at least 1, got {height} and {width}")
    height, width = min(height, total_q), min(width, total_k)
    grid = np.full((height, width), HIDDEN, np.int32)
    if height == 0 or width == 0:
        return grid
    owner = np.full(total_q, HIDDEN, np.int32)
    for rank, ranges in enumerate(ranges_per_rank):
        for start, end in np.asarray(ranges, np.int64).reshape(-1, 2).tolist():
            owner[start:end] = rank
    rows = np.asarray(bands.data, np.int64)
    q0, q1, k0, k1, lo, hi = rows.T
    edges = np.arange(height + 1, dtype=np.int64) * total_q // height
    for row in range(height):
        begin, end = np.maximum(q0, edges[row]), np.minimum(q1, edges[row + 1])
        first = np.maximum(k0, begin + lo)
        last = np.minimum(k1 - 1, end - 1 + hi)  # rows of a band overlap or touch: their union is one interval
        seen = (begin < end) & (first <= last)
        cells = np.zeros(width + 1, np.int32)
        np.add.at(cells, _cell(first[seen], width, total_k), 1)
        np.add.at(cells, _cell(last[seen], width, total_k) + 1, -1)
        grid[row, cells[:-1].cumsum() > 0] = owner[(edges[row] + edges[row + 1] - 1) // 2]
    return grid


def _cell(token: npt.NDArray[np.int64], width: int, total: int) -> npt.NDArray[np.int64]:
    """The cell of a token: cell ``c`` begins at ``c * total // width``."""
    return ((token + 1) * width - 1) // total


def colours(world_size: int) -> list[tuple[int, int, int]]:
    """One colour (red, green, blue; 0 to 255) per rank, neighbours far apart."""
    hues = [rank * 0.61803398875 % 1.0 for rank in range(world_size)]  # the golden ratio spreads any number of hues
    rgb = [colorsys.hsv_to_rgb(hue, 0.65, 0.85) for hue in hues]
    return [(round(255 * r), round(255 * g), round(255 * b)) for r, g, b in rgb]


def to_text(grid: IntArray, *, colour: bool = False) -> str:
    """One line per row of cells: a symbol per rank (0-9, a-z, A-Z, again from 0), ``.`` where nothing is visible.

    Args:
        grid: of ``rank_grid``.
        colour: 24-bit terminal colours behind the symbols.
    """
    palette = colours(int(grid.max(initial=0)) + 1)
    lines = []
    for row in grid.tolist():
        line = ""
        for rank in row:
            symbol = "." if rank == HIDDEN else _SYMBOLS[rank % len(_SYMBOLS)]
            if colour and rank != HIDDEN:
                r, g, b = palette[rank]
                symbol = f"\x1b[48;2;{r};{g};{b}m\x1b[30m{symbol}\x1b[0m"
            line += symbol
        lines.append(line)
    return "\n".join(lines)


def write_png(path: str | os.PathLike[str], grid: IntArray, *, scale: int = 1) -> None:
    """Write a grid as a PNG: white where nothing is visible, one colour per rank, rows of queries downwards.

    Args:
        path: the file, replaced when it exists.
        grid: of ``rank_grid``, not empty.
        scale: pixels per cell along each axis.

    Source: PNG specification (W3C), colour type 2 (RGB), 8 bits, no filter.
    """
    if grid.size == 0 or scale < 1:
        raise ValueError(f"grid must not be empty and scale at least 1, got shape {grid.shape} and {scale}")
    palette = np.array([(255, 255, 255), *colours(int(grid.max(initial=0)) + 1)], np.uint8)
    pixels = palette[grid + 1].repeat(scale, axis=0).repeat(scale, axis=1)
    height, width, _ = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines.tobytes(), 6)) + chunk(b"IEND", b"")
    Path(path).write_bytes(b"\x89PNG\r\n\x1a\n" + content)
