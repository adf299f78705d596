"""forgetting_attention against dense float64: out and four gradients."""

import pytest
import torch
from magi_triton.forgetting_attention import forgetting_attention
from magi_triton.forgetting_attention.reference import forgetting_attention as reference
from magi_triton.testing import assert_within_budget

HALF, BF16 = torch.float16, torch.bfloat16


def tensors(b, hq, hkv, m, n, d, dtype, device):
    generator = torch.Generator().manual_seed(0)
    shapes = ((b, m, hq, d), (b, n, hkv, d), (b, n, hkv, d))
    inputs = [torch.randn(s, generator=generator).to(dtype).to(device).requires_grad_() for s in shapes]
    gates = torch.nn.functional.logsigmoid(torch.randn(b, n, hq, generator=generator) + 2.0)
    return [*inputs, gates.to(device).requires_grad_()]


def with_gradients(attend, inputs, **options):
    out = attend(*inputs, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, inputs, dout)


@pytest.mark.parametrize(
    ("shape", "starts", "scale"),
    [
        ((1, 2, 1, 70, 70, 32, HALF), None, None),
        ((2, 3, 1, 33, 50, 24, BF16), [40, 0], None),
        ((2, 2, 2, 40, 40, 16, HALF), [40, 7], -0.2),  # a sequence of padding alone
        ((1, 1, 1, 1, 1, 16, HALF), None, None),
    ],
    ids=str,
)
def test_matches_reference(shape, starts, scale, device):
    inputs = tensors(*shape, device)
    options = {"sm_scale": scale, "seq_start": None if starts is None else torch.tensor(starts, device=device)}
    got = with_gradients(forgetting_attention, inputs, **options)
    assert got[0].stride() == inputs[0].stride()
    same = with_gradients(reference, [x.detach().requires_grad_() for x in inputs], **options)
    exact = with_gradients(reference, [x.detach().double().requires_grad_() for x in inputs], **options)
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), got, same, exact):
        assert_within_budget(a, b, c, name=name)
    # the gate's gradient is float32, but made of half-precision products: its budget is theirs
    error = (got[4].double() - exact[4]).abs().max()
    baseline = (same[4].double() - exact[4]).abs().max()
    assert error <= 2 * baseline + torch.finfo(shape[-1]).eps * exact[4].abs().max()


def test_head_first_and_threshold(device):
    inputs = tensors(1, 2, 2, 64, 100, 16, HALF, device)
    plain = forgetting_attention(*inputs)
    first = [x.transpose(1, 2) for x in inputs]
    assert torch.equal(forgetting_attention(*first, head_first=True), plain.transpose(1, 2))
    steep = [*inputs[:3], inputs[3].detach() - 1.0]  # 32 keys back the decay is below exp(-32)
    exact = reference(*(x.detach().double() for x in steep))
    pruned = forgetting_attention(*steep, adaptive_threshold=-20.0)
    assert (pruned.double() - exact).abs().max() <= 4e-3
    nothing_pruned = forgetting_attention(*steep, adaptive_threshold=-1e9)
    assert torch.equal(nothing_pruned, forgetting_attention(*steep))
    far = [steep[0], steep[1], steep[2].detach().clone(), steep[3]]
    far[2][:, :32] = 1e4  # of weight exp(-32) and less: only a skipped tile leaves no trace
    assert torch.equal(forgetting_attention(*far, adaptive_threshold=-20.0)[:, 40:], pruned[:, 40:])


def test_compiles_whole(device):
    inputs = tensors(1, 1, 1, 10, 12, 16, HALF, device)
    compiled = torch.compile(forgetting_attention, fullgraph=True, backend="aot_eager")
    for a, b in zip(with_gradients(compiled, inputs), with_gradients(forgetting_attention, inputs)):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(1, 9, 2, 16, dtype=HALF)}, ValueError, "q must have at most as many rows"),
        ({"log_fgate": torch.zeros(1, 2, 8)}, ValueError, "log_fgate must have shape"),
        ({"log_fgate": torch.zeros(1, 8, 2, dtype=HALF)}, TypeError, "log_fgate must be float32"),
        ({"seq_start": torch.zeros(2, dtype=torch.int64)}, ValueError, "seq_start must have shape"),
        ({"adaptive_threshold": 1.0}, ValueError, "adaptive_threshold must be None or"),
    ],
)
def test_mistakes_are_named(change, error, message):
    x = torch.zeros(1, 8, 2, 16, dtype=HALF)
    with pytest.raises(error, match=message):
        forgetting_attention(**{"q": x, "k": x, "v": x, "log_fgate": torch.zeros(1, 8, 2), **change})
