"""Merging of attention states."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from magi_comm import merge_states

INF = float("inf")


def test_two_empty_states_merge_to_zero_and_minus_infinity():
    nan = torch.full((3, 2, 4), float("nan"))
    nothing = torch.full((3, 2), -INF)
    out, lse = merge_states(nan, nothing, nan, nothing)
    assert torch.equal(out, torch.zeros(3, 2, 4))
    assert torch.equal(lse, nothing)


@pytest.mark.parametrize(
    ("a", "b", "exact"),
    [
        ((2.0, 0.0), (4.0, 0.0), (3.0, math.log(2.0))),
        ((2.0, -INF), (4.0, 1.0), (4.0, 1.0)),
        ((2.0, 1.0), (4.0, -INF), (2.0, 1.0)),
        ((float("nan"), -INF), (4.0, -524288.0), (4.0, -524288.0)),
        ((0.0, INF), (4.0, 3.0), (0.0, INF)),
        ((0.0, INF), (0.0, INF), (0.0, INF)),
        ((0.0, INF), (float("nan"), -INF), (0.0, INF)),
        ((1.0, 2.4e38), (3.0, -2.4e38), (1.0, 2.4e38)),
    ],
)
def test_edges(a, b, exact):
    out, lse = merge_states(*(torch.tensor([[x]]) if i % 2 == 0 else torch.tensor([x]) for i, x in enumerate((*a, *b))))
    torch.testing.assert_close(out, torch.tensor([[exact[0]]]))
    torch.testing.assert_close(lse, torch.tensor([exact[1]]))


@given(seed=st.integers(0, 2**32 - 1), cut=st.integers(0, 12))
def test_two_halves_of_the_keys_merge_to_the_whole(seed, cut):
    generator = torch.Generator().manual_seed(seed)
    scores = 10 * torch.randn(5, 12, dtype=torch.float64, generator=generator)
    values = torch.randn(12, 3, dtype=torch.float64, generator=generator)

    def attend(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.logsumexp(scores[:, keys], -1)
        return (scores[:, keys] - lse[:, None]).exp() @ values[keys], lse

    out, lse = merge_states(*attend(slice(0, cut)), *attend(slice(cut, 12)))
    exact_out, exact_lse = attend(slice(0, 12))
    torch.testing.assert_close(out, exact_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-12, atol=1e-12)
