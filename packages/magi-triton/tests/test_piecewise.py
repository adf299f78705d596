"""piecewise_attention against dense float64: out and five gradients."""

import pytest
import torch
from magi_triton.flash.api import flash_attention
from magi_triton.piecewise.api import piecewise_attention
from magi_triton.piecewise.reference import piecewise_attention as reference
from magi_triton.testing import assert_within_budget

HALF, BF16 = torch.float16, torch.bfloat16


def tensors(b, hq, hkv, m, n, d, dtype, device, std=1.0):
    generator = torch.Generator().manual_seed(0)

    def one(heads, rows):
        x = torch.randn(b, rows, heads, d, generator=generator).mul(std).to(dtype).to(device)
        return x.transpose(1, 2).detach().requires_grad_()

    return [one(hq, m), one(hkv, n), one(hq, m), one(hkv, n), one(hkv, n)]


def with_gradients(attend, inputs, *args):
    out = attend(*inputs, *args)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, inputs, dout)


@pytest.mark.parametrize(
    ("shape", "threshold", "causal", "scale"),
    [
        ((1, 2, 1, 70, 70, 32, HALF), 30, True, None),
        ((1, 3, 1, 40, 100, 24, BF16), 50, False, None),
        ((1, 2, 2, 100, 40, 16, HALF), 5, True, None),  # rows that see nothing
        ((2, 1, 1, 1, 1, 16, BF16), 0, True, None),
        ((1, 1, 1, 40, 70, 16, HALF), -3, True, None),  # far everywhere
        ((1, 1, 1, 40, 40, 16, HALF), -7, False, -0.2),
        ((1, 1, 1, 33, 65, 64, HALF), 32, True, None),
    ],
    ids=str,
)
def test_matches_reference(shape, threshold, causal, scale, device):
    inputs = tensors(*shape, device)
    got = with_gradients(piecewise_attention, inputs, threshold, causal, scale)
    assert got[0].stride() == inputs[0].stride()
    same = with_gradients(reference, [x.detach().requires_grad_() for x in inputs], threshold, causal, scale)
    exact = with_gradients(reference, [x.detach().double().requires_grad_() for x in inputs], threshold, causal, scale)
    for name, a, b, c in zip(("out", "dq1", "dk1", "dq2", "dk2", "dv"), got, same, exact):
        assert_within_budget(a, b, c, name=name)


@pytest.mark.parametrize(("threshold", "pair"), [(10**12, 0), (-(10**12), 1)])
def test_one_side_only_is_flash_attention(threshold, pair, device):
    inputs = tensors(1, 2, 1, 40, 50, 16, HALF, device)
    out = piecewise_attention(*inputs, threshold, True)
    exact = flash_attention(inputs[2 * pair], inputs[2 * pair + 1], inputs[4], True)
    torch.testing.assert_close(out, exact, rtol=2e-3, atol=2e-3)


def test_compiles_whole(device):
    inputs = tensors(1, 1, 1, 10, 12, 16, HALF, device)

    def step(*x):
        return piecewise_attention(*x, 4, True) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for a, b in zip(with_gradients(compiled, inputs), with_gradients(step, inputs)):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("position", "value", "error", "message"),
    [
        (2, torch.zeros(1, 2, 5, 16, dtype=HALF), ValueError, "q2 must have the shape of q1"),
        (3, torch.zeros(1, 1, 4, 16, dtype=HALF), ValueError, "k2 must have the shape of k1"),
        (3, torch.zeros(1, 2, 4, 16, dtype=BF16), TypeError, "k2 must have the dtype of q1"),
        (5, 1.5, TypeError, "dist_threshold must be an int"),
    ],
)
def test_mistakes_are_named(position, value, error, message):
    call = [torch.zeros(1, 2, 4, 16, dtype=HALF)] * 5 + [3]
    call[position] = value
    with pytest.raises(error, match=message):
        piecewise_attention(*call)
