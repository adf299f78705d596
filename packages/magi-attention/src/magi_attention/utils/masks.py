"""Dense boolean masks from slices, and pictures of matrices."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from magi_core.mask_type import AttnMaskType
    from magi_core.ranges import AttnRanges


def _type_code(mask_type: Any) -> int:
    if hasattr(mask_type, "to_int_type"):
        return int(mask_type.to_int_type())
    if isinstance(mask_type, str):
        from magi_core.mask_type import AttnMaskType

        return int(AttnMaskType(mask_type).to_int_type())
    code = int(mask_type)
    if not 0 <= code <= 3:
        raise ValueError(f"a mask type must be within 0..3, got {code}")
    return code


def make_slice_mask_from_ffa_attn_type(
    seqlen_q: int, seqlen_k: int, attn_type_idx: "int | AttnMaskType" = 0, device: str | torch.device = "cpu"
) -> Tensor:
    """What one slice shows: bool ``(seqlen_q, seqlen_k)``, True where the pair is visible.

    Args:
        seqlen_q, seqlen_k: extents of the slice.
        attn_type_idx: 0 full, 1 causal (``j <= i + seqlen_k - seqlen_q``), 2 inverse causal (``j >= i``), 3 both.
        device: of the result.
    """
    code = _type_code(attn_type_idx)
    i = torch.arange(seqlen_q, device=device)[:, None]
    j = torch.arange(seqlen_k, device=device)[None, :]
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if code & 1:
        mask &= j <= i + (seqlen_k - seqlen_q)
    if code & 2:
        mask &= j >= i
    return mask


def _pairs(ranges: Any, name: str) -> np.ndarray:
    if hasattr(ranges, "to_naive_ranges"):
        ranges = ranges.to_naive_ranges()
    elif isinstance(ranges, Tensor):
        ranges = ranges.detach().cpu().numpy()
    pairs = np.asarray(ranges, dtype=np.int64).reshape(-1, 2) if len(ranges) == 0 else np.asarray(ranges)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"{name} must be N pairs (start, end), got shape {pairs.shape}")
    return pairs.astype(np.int64)


def make_attn_mask_from_ffa_args(
    q_ranges: "AttnRanges | Tensor | Sequence[Sequence[int]]",
    k_ranges: "AttnRanges | Tensor | Sequence[Sequence[int]]",
    attn_type_map: "Tensor | Sequence[int | str | AttnMaskType] | None",
    total_seqlen_q: int,
    total_seqlen_k: int,
    device: str | torch.device = "cpu",
) -> Tensor:
    """What slices show together: bool ``(total_seqlen_q, total_seqlen_k)``, their union.

    Args:
        q_ranges, k_ranges: the slices, half-open.
        attn_type_map: one type each, as integer, string or ``AttnMaskType``; None is all full.
        total_seqlen_q, total_seqlen_k: size of the result.
        device: of the result.

    Raises:
        ValueError: lists of different length, or a range outside the totals.
    """
    q, k = _pairs(q_ranges, "q_ranges"), _pairs(k_ranges, "k_ranges")
    if attn_type_map is None:
        codes = [0] * len(q)
    else:
        values = attn_type_map.tolist() if isinstance(attn_type_map, Tensor) else attn_type_map
        codes = [_type_code(mask_type) for mask_type in values]
    if not len(q) == len(k) == len(codes):
        raise ValueError(
            f"q_ranges, k_ranges and attn_type_map must be equally long, got {len(q)}, {len(k)} and {len(codes)}"
        )
    for name, pairs, total in (("q_ranges", q, total_seqlen_q), ("k_ranges", k, total_seqlen_k)):
        if len(pairs) and (pairs[:, 0].min() < 0 or pairs[:, 1].max() > total or (pairs[:, 1] < pairs[:, 0]).any()):
            raise ValueError(f"{name} must lie within [0, {total}], got {pairs.tolist()}")
    mask = torch.zeros(total_seqlen_q, total_seqlen_k, dtype=torch.bool, device=device)
    for (q0, q1), (k0, k1), code in zip(q.tolist(), k.tolist(), codes, strict=True):
        mask[q0:q1, k0:k1] |= make_slice_mask_from_ffa_attn_type(q1 - q0, k1 - k0, code, device)
    return mask


def _pyplot() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'magi-attention[draw]'") from error
    return Figure


def vis_matrix(
    matrix: Tensor | np.ndarray,
    title: str = "",
    xlabel: str = "",
    ylabel: str = "",
    save_path: str | Path | None = None,
) -> Any:
    """Draw a two-dimensional matrix in colours; returns the matplotlib ``Figure``.

    Args:
        matrix: ``(rows, columns)``, numbers or bool.
        title, xlabel, ylabel: texts.
        save_path: also write the picture there; its ending chooses the format.

    Raises:
        ImportError: matplotlib is not installed; names the extra that brings it.
    """
    figure = _pyplot()(figsize=(6, 6), layout="constrained")  # no pyplot: no global state, no display
    values = matrix.detach().cpu().numpy() if isinstance(matrix, Tensor) else np.asarray(matrix)
    if values.ndim != 2:
        raise ValueError(f"matrix must have 2 dims, got shape {values.shape}")
    axes = figure.subplots()
    axes.imshow(values, aspect="auto", interpolation="nearest")
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    if save_path is not None:
        figure.savefig(save_path)
    return figure


def vis_attn_mask(attn_mask: Tensor | np.ndarray, save_path: str | Path | None = None) -> Any:
    """Draw a dense mask, rows are queries; see ``vis_matrix``."""
    return vis_matrix(attn_mask, title="attention mask", xlabel="key", ylabel="query", save_path=save_path)
