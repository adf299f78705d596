"""Pictures of masks: text, and matplotlib where it is installed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import _host
from .errors import checked_int, checked_int32_array

if TYPE_CHECKING:
    from .mask import Mask

_SHADES = "·░▒▓█"  # nothing, up to a third, up to two thirds, less than all, all
_PIXELS = 512  # most rows and columns of a drawn picture
_COLOURS = "tab10", "tab20"


def coverage(mask: Mask, rows: int, columns: int) -> npt.NDArray[np.float64]:
    """``(rows, columns)`` share of the pairs under each cell of a grid that are visible, 0 to 1."""
    if mask.total_q == 0 or mask.total_k == 0:
        return np.zeros((rows, columns))
    count = _host.array(_host.lib().bands_density(mask.bands._data, mask.total_q, mask.total_k, rows, columns))
    heights = np.diff(np.arange(rows + 1, dtype=np.int64) * mask.total_q // rows)
    widths = np.diff(np.arange(columns + 1, dtype=np.int64) * mask.total_k // columns)
    pairs = np.multiply.outer(heights, widths)
    return np.minimum(count / np.maximum(pairs, 1), 1.0)


def picture(mask: Mask, width: int = 64, height: int | None = None) -> str:
    """The mask as text. A line per group of queries; exact when it has at most ``width`` tokens a side."""
    width = checked_int(width, "width", minimum=1, maximum=4096)
    if height is None:  # characters are about twice as high as wide
        height = max(1, min(mask.total_q, width // 2 if mask.total_q > width else width))
    height = checked_int(height, "height", minimum=1, maximum=4096)
    if mask.total_q == 0 or mask.total_k == 0:
        return f"(empty: {mask.total_q} x {mask.total_k})"
    share = coverage(mask, min(height, mask.total_q), min(width, mask.total_k))
    level = np.where(share == 0, 0, np.where(share >= 1, 4, 1 + np.minimum(2, np.floor(share * 3)))).astype(int)
    return "\n".join("".join(_SHADES[i] for i in line) for line in level.tolist())


def draw(
    mask: Mask,
    path: str | os.PathLike[str] | None = None,
    *,
    ranks: npt.ArrayLike | None = None,
    ax: Any = None,
    title: str | None = None,
) -> None:
    """Draws with matplotlib into ``ax``, or into a file. Raises ImportError naming the extra without matplotlib."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("drawing a mask needs matplotlib: pip install 'magi-core[draw]'") from error

    rows, columns = max(1, min(_PIXELS, mask.total_q)), max(1, min(_PIXELS, mask.total_k))
    share = coverage(mask, rows, columns)
    owner = np.zeros(rows, np.int64)
    num_ranks = 1
    if ranks is not None:
        of_row = checked_int32_array(ranks, "ranks", (None,))
        if len(of_row) != mask.total_q:
            raise ValueError(f"ranks must have one entry per query ({mask.total_q}), got {len(of_row)}")
        if len(of_row):
            if of_row.min() < 0:
                raise ValueError(f"ranks must not be negative, got {of_row.min()}")
            num_ranks = int(of_row.max()) + 1
            middles = (np.arange(rows, dtype=np.int64) * 2 + 1) * mask.total_q // (2 * rows)
            owner = of_row[middles].astype(np.int64)
    if ranks is None:
        palette = np.array([[0.15, 0.35, 0.65]])
    elif num_ranks <= 20:
        palette = np.array(colormaps[_COLOURS[num_ranks > 10]].colors)[:num_ranks]  # type: ignore[attr-defined]
    else:
        palette = colormaps["turbo"](np.linspace(0.05, 0.95, num_ranks))[:, :3]
    # A cell of which little is visible would vanish on white: half of the colour at least.
    strength = np.where(share > 0, 0.5 + 0.5 * share, 0.0)[:, :, None]
    image = 1.0 - strength * (1.0 - palette[owner][:, None, :])

    figure = None
    if ax is None:
        figure = Figure(figsize=(6.4, 6.0), layout="constrained")
        ax = figure.add_subplot()
    ax.imshow(
        image,
        extent=(0, max(mask.total_k, 1), max(mask.total_q, 1), 0),
        interpolation="nearest",
        aspect="auto" if mask.total_q > 8 * mask.total_k or mask.total_k > 8 * mask.total_q else "equal",
    )
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    if title:
        ax.set_title(title)
    if ranks is not None and num_ranks <= 20:
        patches = [Patch(color=tuple(palette[r]), label=f"rank {r}") for r in range(num_ranks)]
        ax.legend(handles=patches, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    if figure is not None and path is not None:
        figure.savefig(os.fspath(path), dpi=120)
