"""Tolerances that come from data (contract item 9)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["assert_within_budget"]


def assert_within_budget(
    got: Tensor, same_precision: Tensor, exact: Tensor, *, name: str, rounding: torch.dtype | None = None
) -> None:
    """``got`` may err twice as much as plain torch in the same precision, plus one rounding of the largest value.

    Args:
        got: the tensor under test. same_precision: the same from plain torch in its precision.
        exact: the same in float64. All of one shape.
        rounding: dtype of the one rounding, where it is coarser than that of ``got``: dsink is float32 but is made of
            ``out``, which is rounded to the dtype of the inputs.

    Raises:
        AssertionError: a shape differs, a value is infinite or NaN in other places than in ``exact``, infinities
            differ in sign, or the largest error is over the budget.
    """
    got, same_precision, exact = got.detach(), same_precision.detach(), exact.detach()
    assert got.shape == exact.shape == same_precision.shape, (
        f"{name}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    )
    if got.numel() == 0:
        return
    finite = exact.isfinite()
    for x in (got, same_precision):  # without this an overflow in the baseline would buy an infinite budget
        assert torch.equal(x.isfinite(), finite), f"{name}: finite in other places than the reference"
    assert torch.equal(got[~finite].double(), exact[~finite]), f"{name}: other infinities than the reference"
    differences = (got.double() - exact, same_precision.double() - exact, exact)
    error, baseline, largest = (float(torch.where(finite, x, 0.0).abs().max()) for x in differences)
    budget = 2 * baseline + torch.finfo(rounding or got.dtype).eps * largest
    assert error <= budget, f"{name}: error {error:.3e} over budget {budget:.3e}"
