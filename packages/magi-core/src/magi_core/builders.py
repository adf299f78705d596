"""Bands of the masks people ask for by name; ``Mask`` wraps each of them. Lengths are tokens.

Every function gives bands ``(q0, q1, k0, k1, lo, hi)`` (see :mod:`magi_core.bands`) of which no two show the same cell.
Diagonals that do not matter are left open with ``+-OPEN``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import _host
from .bands import Bands
from .errors import INT32_MAX, checked_int, checked_int32_array

if TYPE_CHECKING:
    import torch

OPEN = INT32_MAX

BandRow = tuple[int, int, int, int, int, int]


def rectangle(q0: int, q1: int, k0: int, k1: int) -> BandRow:
    """Rows ``[q0, q1)`` see columns ``[k0, k1)``."""
    return (q0, q1, k0, k1, -OPEN, OPEN)


def causal_rectangle(q0: int, q1: int, k0: int, k1: int) -> BandRow:
    """A causal slice, aligned to the bottom-right corner."""
    return (q0, q1, k0, k1, -OPEN, k1 - q1)


def checked_window(window: int | Sequence[int], name: str = "window") -> tuple[int, int]:
    """``(left, right)`` with -1 for no limit.

    An int W is a causal window of exactly W keys, the row's own position included: ``(W - 1, 0)``.
    Raises ValueError for a side below -1 or W below 1, TypeError for something else.
    """
    if isinstance(window, (str, bytes)) or not (hasattr(window, "__len__") or hasattr(window, "__index__")):
        raise TypeError(f"{name} must be an int or a pair of ints, got {window!r}")
    if not hasattr(window, "__len__"):
        return checked_int(window, name, minimum=1, maximum=None) - 1, 0
    sides: list[Any] = list(window)  # type: ignore[arg-type]
    if len(sides) != 2:
        raise ValueError(f"{name} must have two sides (left, right), got {len(sides)}")
    left, right = (checked_int(side, f"{name} {which}", maximum=None) for side, which in zip(sides, ("left", "right")))
    if left < -1 or right < -1:
        raise ValueError(f"{name} must have sides of at least 0, or -1 for no limit, got ({left}, {right})")
    return left, right


def windowed(q0: int, q1: int, k0: int, k1: int, window: tuple[int, int]) -> BandRow:
    """A sliding window over a rectangle, aligned to its bottom-right corner: one band.

    With ``p = i + sk - sq``, row i sees columns ``p - left .. p + right``; -1 is no limit on that side. Rows above the
    bottom-right square (``p < 0``) see nothing, whatever the window: the public semantics
    (reference/kernel-and-api.md 3.6).
    """
    left, right = window
    diagonal = k1 - q1
    # A limit beyond the rectangle is none; clamped, so that the diagonals fit int32.
    length = (k1 - k0) + (q1 - q0)
    lo = -OPEN if left == -1 else diagonal - min(left, length)
    hi = OPEN if right == -1 else diagonal + min(right, length)
    return (max(q0, q1 - (k1 - k0)), q1, k0, k1, max(lo, -OPEN), min(hi, OPEN))


def checked_cu_seqlens(cu_seqlens: Any, name: str) -> list[int]:
    """Boundaries as ints. Raises ValueError unless they start at 0 and never fall."""
    array = checked_int32_array(cu_seqlens, name, (None,))
    if len(array) == 0 or array[0] != 0 or (np.diff(array.astype(np.int64)) < 0).any():
        raise ValueError(f"{name} must start at 0 and never fall, got {array.tolist()}")
    boundaries: list[int] = array.tolist()
    return boundaries


def checked_lengths(lengths: Any, name: str) -> list[int]:
    """Lengths of packed documents; an int is one document."""
    if hasattr(lengths, "__index__") and not isinstance(lengths, np.ndarray) and not hasattr(lengths, "detach"):
        lengths = [lengths]
    array = checked_int32_array(lengths, name, (None,))
    if (array < 0).any():
        raise ValueError(f"{name} must not be negative, got {array.tolist()}")
    if int(array.sum(dtype=np.int64)) > INT32_MAX:
        raise ValueError(f"{name} must sum to less than 2**31, got {int(array.sum(dtype=np.int64))}")
    result: list[int] = array.tolist()
    return result


def boundaries(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def documents(cu_q: Sequence[int], cu_k: Sequence[int], is_causal: bool) -> Iterator[BandRow]:
    """Document n's rows see document n's columns."""
    shape = causal_rectangle if is_causal else rectangle
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k), strict=True):
        yield shape(q0, q1, k0, k1)


def windowed_documents(cu_q: Sequence[int], cu_k: Sequence[int], window: tuple[int, int]) -> Iterator[BandRow]:
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k), strict=True):
        yield windowed(q0, q1, k0, k1, window)


def prefix_lm(lengths: Sequence[int], prefixes: Sequence[int]) -> Iterator[BandRow]:
    """In each document, every row sees the prefix, and the tokens up to itself."""
    for (begin, end), prefix in zip(itertools.pairwise(boundaries(lengths)), prefixes, strict=True):
        middle = begin + min(prefix, end - begin)
        yield rectangle(begin, middle, begin, middle)
        yield (middle, end, begin, end, -OPEN, 0)


def block_causal(lengths: Sequence[int], block_size: int) -> Iterator[BandRow]:
    """In each document, blocks of rows see their own block and those before (video frames, for instance)."""
    for begin, end in itertools.pairwise(boundaries(lengths)):
        for block in range(begin, end, block_size):
            stop = min(block + block_size, end)
            yield rectangle(block, stop, begin, stop)


def prefix_tree(parents: Sequence[int], lengths: Sequence[int]) -> Iterator[BandRow]:
    """Node n's tokens see those of all its ancestors, and causally those of n. Nodes lie in order, parents first."""
    starts = boundaries(lengths)
    for node, (begin, end) in enumerate(itertools.pairwise(starts)):
        yield causal_rectangle(begin, end, begin, end)
        ancestor = parents[node]
        while ancestor >= 0:
            yield rectangle(begin, end, starts[ancestor], starts[ancestor + 1])
            ancestor = parents[ancestor]


# Masks given as booleans

_STRIP_CELLS = 1 << 24  # cells of a dense strip looked at in one go


def bands_of_runs(runs: list[npt.NDArray[np.int32]]) -> Bands:
    """Bands of ``(n, 3)`` runs (row, begin, end), ascending, maximal within their row."""
    joined = np.concatenate(runs) if runs else np.zeros((0, 3), np.int32)
    return Bands._of(_host.array(_host.lib().bands_from_runs(np.ascontiguousarray(joined))))


def runs_of_dense(dense: npt.NDArray[Any], first_row: int = 0) -> npt.NDArray[np.int32]:
    """Maximal runs of true cells of each row of ``dense`` (rows, columns)."""
    cells = np.ascontiguousarray(dense, dtype=np.bool_).view(np.int8)
    if not cells.flags.writeable:  # read-only memory cannot cross DLPack
        cells = cells.copy()
    return _host.array(_host.lib().dense_runs(cells, first_row))


def from_dense(dense: Any) -> tuple[Bands, int, int]:
    """The bands of a 2-d boolean array or tensor, exactly."""
    if hasattr(dense, "detach"):
        dense = dense.detach().cpu().numpy()
    dense = np.asarray(dense)
    if dense.dtype != np.bool_:
        raise TypeError(f"dense must be bool, got {dense.dtype}")
    if dense.ndim != 2:
        raise ValueError(f"dense must have shape (total_q, total_k), got {dense.shape}")
    total_q, total_k = dense.shape
    step = max(1, _STRIP_CELLS // max(1, total_k))
    runs = [runs_of_dense(dense[row : row + step], row) for row in range(0, total_q, step)]
    return bands_of_runs(runs), total_q, total_k


def from_block_mask(block_mask: Any, batch: int | None, head: int | None) -> tuple[Bands, int, int]:
    """The bands of a FlexAttention ``BlockMask``, exactly: its ``mask_mod`` is asked inside partial blocks.

    Blocks are visited row by row, so memory is one row of blocks.
    """
    import torch

    if type(block_mask).__name__ != "BlockMask" or not hasattr(block_mask, "kv_num_blocks"):
        raise TypeError(f"block_mask must be a torch FlexAttention BlockMask, got {type(block_mask).__name__}")
    sizes = {"batch": int(block_mask.kv_num_blocks.shape[0]), "head": int(block_mask.kv_num_blocks.shape[1])}
    chosen = {}
    for name, index in (("batch", batch), ("head", head)):
        if index is None:
            if sizes[name] != 1:
                raise ValueError(f"{name} must say which of the {sizes[name]} masks of block_mask to take, got None")
            index = 0
        chosen[name] = checked_int(index, name, minimum=0, maximum=sizes[name] - 1)
    b, h = chosen["batch"], chosen["head"]
    total_q, total_k = (int(n) for n in block_mask.seq_lengths)
    block_q, block_k = (int(n) for n in block_mask.BLOCK_SIZE)

    def blocks_of(counts: torch.Tensor | None, indices: torch.Tensor | None) -> Callable[[int], list[int]]:
        if counts is None or indices is None:
            return lambda row: []
        num, which = counts[b, h].cpu(), indices[b, h].cpu()
        return lambda row: which[row, : int(num[row])].tolist()

    partial = blocks_of(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = blocks_of(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    device = block_mask.kv_indices.device
    at = [torch.tensor(i, device=device) for i in (b, h)]
    mod = torch.vmap(torch.vmap(block_mask.mask_mod, in_dims=(None, None, None, 0)), in_dims=(None, None, 0, None))
    runs = []
    for row in range(min(int(block_mask.kv_num_blocks.shape[2]), -(-total_q // block_q))):
        begin, end = row * block_q, min((row + 1) * block_q, total_q)
        strip = np.zeros((end - begin, total_k), np.bool_)
        for block in full(row):
            strip[:, block * block_k : (block + 1) * block_k] = True
        columns = [np.arange(n * block_k, min((n + 1) * block_k, total_k)) for n in partial(row)]
        wanted = np.concatenate(columns) if columns else np.zeros(0, np.int64)
        if len(wanted):
            rows = torch.arange(begin, end, device=device)
            visible = mod(*at, rows, torch.from_numpy(wanted).to(device))
            strip[:, wanted] = visible.expand(end - begin, len(wanted)).cpu().numpy().astype(np.bool_)
        runs.append(runs_of_dense(strip, begin))
    return bands_of_runs(runs), total_q, total_k
