"""Merging attention states: (out, lse) pairs over disjoint sets of keys."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["merge_states"]


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The state over both sets of keys: ``lse = log(exp(lse_a) + exp(lse_b))``, ``out`` the weighted mean.

    A state with ``lse = -inf`` has seen nothing: its ``out`` is not read (it may be NaN), and two of them merge to
    ``(0, -inf)``. A state with ``lse = +inf`` (an infinite sink) takes all the weight. Every exponent is non-positive
    and ``inf - inf`` is never evaluated.

    Args:
        out_a, out_b: ``(..., head_dim)``; lse_a, lse_b: ``(...)``, natural log. Computed in the dtypes as they promote.

    Source: the online softmax of arXiv:2205.14135, section 3.1, in its pairwise form.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    out = _weighted(out_a, lse_a, lse) + _weighted(out_b, lse_b, lse)
    return out, lse


def _weighted(out: Tensor, part: Tensor, whole: Tensor) -> Tensor:
    """``exp(part - whole) * out``; zero for a part that has seen nothing, ``out`` for one that is all of the whole."""
    exponent = torch.where(part == whole, torch.zeros_like(whole), part - whole)
    seen = (part != float("-inf")).unsqueeze(-1)
    return torch.where(seen, exponent.exp().unsqueeze(-1) * out, 0.0)
