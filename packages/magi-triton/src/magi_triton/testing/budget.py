"""The tolerance of every operator, from data."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_within_budget(got: Tensor, same_precision: Tensor, exact: Tensor, *, name: str) -> None:
    """``got`` may err twice as much as plain PyTorch in the same precision, plus one rounding of the largest value.

    Raises:
        AssertionError: over budget, another shape, or finite in other places than ``exact``.
    """
    assert got.shape == exact.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    finite = exact.isfinite()
    for x in (got, same_precision):  # without this an overflow in the baseline would buy an infinite budget
        assert torch.equal(x.isfinite(), finite), f"{name}: finite in other places than the reference"
    differences = (got.double() - exact, same_precision.double() - exact, exact)
    error, baseline, largest = (
        torch.where(finite, x, 0.0).abs().max() if x.numel() else torch.zeros(()) for x in differences
    )
    budget = 2 * baseline + torch.finfo(got.dtype).eps * largest
    assert error <= budget, f"{name}: error {error:.3e} over budget {budget:.3e}"
