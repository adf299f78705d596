"""Sink maths and merging against the formulas of contract items 4 and 7."""

import math

import pytest
import torch
from magi_core import sink as sinks
from magi_core.stages import sink_backward

INF = math.inf


def test_merge_of_two_empty_states():
    out, lse = sinks.merge(*(torch.full((2, 3), math.nan), torch.full((2,), -INF)) * 2)
    assert (out == 0).all() and (lse == -INF).all()


def test_merge_with_an_empty_state_is_the_other():
    out, lse = torch.randn(4, 2, 3), torch.randn(4, 2)
    nothing = torch.full_like(out, math.nan), torch.full_like(lse, -INF)
    for merged in (sinks.merge(out, lse, *nothing), sinks.merge(*nothing, out, lse)):
        assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)


def test_merge_is_the_attention_over_both():
    scores, values = torch.randn(5, 8, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)

    def attend(columns):
        return scores[:, columns].softmax(1) @ values[columns], scores[:, columns].logsumexp(1)

    out, lse = sinks.merge(*attend(slice(0, 3)), *attend(slice(3, 8)))
    exact = attend(slice(0, 8))
    torch.testing.assert_close(out, exact[0])
    torch.testing.assert_close(lse, exact[1])


def test_merge_of_far_apart_states_does_not_overflow():
    out, lse = sinks.merge(torch.ones(1, 1), torch.tensor([1e38]), torch.full((1, 1), 5.0), torch.tensor([-1e38]))
    assert out.item() == 1 and lse.item() == pytest.approx(1e38)


@pytest.mark.parametrize("value", [INF, -INF, 2.4e38, -2.4e38, 0.0])
def test_merge_lse_of_extremes(value):
    assert sinks.merge_lse(torch.tensor(value), torch.tensor(-INF)).item() == pytest.approx(value)
    assert sinks.merge_lse(torch.tensor(value), torch.tensor(value)).item() == pytest.approx(
        value if value != 0 else math.log(2)
    )


@pytest.mark.parametrize("layout", ["sh", "ssh"])
def test_apply_sink_and_its_gradient(layout):
    torch.manual_seed(0)
    total, heads = 6, 2
    sink = torch.randn((3, heads) if layout == "sh" else (total, 3, heads), dtype=torch.float64, requires_grad=True)
    raw_out, raw_lse = torch.randn(total, heads, 4, dtype=torch.float64), torch.randn(total, heads, dtype=torch.float64)
    lse_sink = sink.logsumexp(0 if layout == "sh" else 1)
    lse = torch.logaddexp(raw_lse, lse_sink.expand_as(raw_lse))
    out = raw_out * (raw_lse - lse).exp()[..., None]
    got_out, got_lse = sinks.apply_sink(raw_out, raw_lse, sink.detach(), layout)
    torch.testing.assert_close(got_out, out.detach())
    torch.testing.assert_close(got_lse, lse.detach())
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    torch.autograd.backward([out, lse], [dout, dlse])
    got = sink_backward(dout, out.detach(), lse.detach(), dlse, sink.detach(), layout)
    torch.testing.assert_close(got, sink.grad)


def test_no_sink_and_an_all_taking_sink():
    out, lse = torch.randn(3, 1, 2), torch.tensor([[1.0], [-INF], [4.0]])
    same_out, same_lse = sinks.apply_sink(out, lse, torch.full((2, 1), -INF))
    assert torch.equal(same_out[0], out[0]) and torch.equal(same_lse, lse) and (same_out[1] == 0).all()
    zero, full = sinks.apply_sink(out, lse, torch.tensor([[INF], [0.0]]))
    assert (zero == 0).all() and (full == INF).all()
    gradient = sink_backward(torch.ones(3, 1, 2), zero, full, torch.ones(3, 1), torch.tensor([[INF], [0.0]]))
    assert (gradient == 0).all()
