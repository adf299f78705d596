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


def make_slice_mask_from_ffa_attn_type(
    seqlen_q: int, seqlen_k: int, attn_type_idx: "int | AttnMaskType" = 0, device: str | torch.device = "cpu"
) -> Tensor:
    """What one slice shows: bool ``(seqlen_q, seqlen_k)``, True where the pair is visible.

    Args:
        seqlen_q, seqlen_k: extents of the slice.
        attn_type_idx: 0 full, 1 causal (``j <= i + seqlen_k - seqlen_q``), 2 inverse causal (``j >= i``), 3 both.
        device: of the result.
    """
    return make_attn_mask_from_ffa_args([(0, seqlen_q)], [(0, seqlen_k)], [attn_type_idx], seqlen_q, seqlen_k, device)


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
    from magi_core.mask import Mask

    mask = Mask.from_slices(q_ranges, k_ranges, attn_type_map, total_q=total_seqlen_q, total_k=total_seqlen_k)
    return torch.from_numpy(mask.to_dense()).to(device)


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
