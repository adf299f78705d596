"""flash_attention, dense and packed, against dense float64."""

import pytest
import torch
from magi_triton.flash.api import flash_attention, flash_attention_varlen
from magi_triton.testing import assert_within_budget, attention, recompute_mask

HALF, BF16 = torch.float16, torch.bfloat16


def tensors(b, hq, hkv, m, n, d, dtype, device, std=1.0, layout="bhtd"):
    generator = torch.Generator().manual_seed(0)

    def one(heads, rows):
        x = torch.randn(b, rows, heads, d, generator=generator).mul(std).to(dtype).to(device).transpose(1, 2)
        return (x if layout == "bthd" else x.contiguous()).detach().requires_grad_()

    return one(hq, m), one(hkv, n), one(hkv, n)


def gradients(outputs, inputs, seed=1):
    """Gradients of a fixed random functional of the outputs."""
    total = 0.0
    for x in outputs:
        weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x.device)
        total = total + (torch.where(x.isfinite(), x, 0.0).double() * weight).sum()
    return torch.autograd.grad(total, inputs)


def compare(q, k, v, *, causal=False, sm_scale=None, dropout_p=0.0, sink=None, **options):
    inputs = [q, k, v] + ([] if sink is None else [sink])
    out, lse, total, seed, offset = flash_attention(
        q, k, v, causal, sm_scale, dropout_p, True, True, True, sink=sink, **options
    )
    assert (out.shape, out.dtype, out.stride()) == (q.shape, q.dtype, q.stride())
    mask = None
    if dropout_p:
        mask = recompute_mask(*q.shape[:3], k.shape[2], dropout_p, seed, offset, q.device)
    else:
        assert seed is None
        assert offset is None

    def plain(cast):
        copies = [cast(x).detach().requires_grad_() for x in inputs]
        o, normaliser, sums = attention(
            *copies[:3], causal, sm_scale, dropout_p, mask, sink=copies[3] if sink is not None else None, **options
        )
        return o, normaliser, sums, *gradients((o, normaliser), copies)

    got = (out, lse, total, *gradients((out, lse), inputs))
    same, exact = plain(lambda x: x), plain(lambda x: x.double())
    for name, a, b, c in zip(("out", "lse", "total", "dq", "dk", "dv", "dsink"), got, same, exact):
        assert_within_budget(a.detach(), b.detach(), c.detach(), name=name)


CASES = {
    "full": ((2, 4, 2, 40, 70, 32, HALF), {}),
    "causal": ((1, 2, 1, 70, 70, 64, BF16), {"causal": True}),
    "more rows than keys": ((1, 3, 1, 70, 33, 16, HALF), {"causal": True}),
    "one token": ((2, 2, 2, 1, 1, 16, BF16), {"causal": True}),
    "group of 7": ((1, 7, 1, 5, 45, 32, HALF), {}),
    "group of 6, head dim 24": ((1, 6, 1, 9, 40, 24, BF16), {"causal": True}),
    "head dim 256": ((1, 1, 1, 33, 40, 256, HALF), {"causal": True}),
    "large logits": ((1, 2, 2, 35, 70, 16, HALF), {"std": 10.0}),
    "window": ((1, 2, 1, 70, 100, 16, HALF), {"window": (20, 7)}),
    "causal window": ((1, 1, 1, 100, 70, 16, BF16), {"window": (17, -1), "causal": True}),
    "softcap": ((1, 2, 2, 40, 40, 32, HALF), {"softcap": 2.0, "causal": True}),
    "sink": ((1, 3, 1, 40, 35, 16, HALF), {"sink": True, "causal": True}),
    "negative scale": ((1, 1, 1, 35, 40, 16, HALF), {"sm_scale": -0.3}),
    "zero scale": ((1, 1, 1, 35, 40, 16, HALF), {"sm_scale": 0.0, "causal": True}),
    "dropout": ((2, 2, 1, 40, 37, 16, HALF), {"dropout_p": 0.5, "causal": True}),
    "dropout, bf16": ((1, 2, 2, 33, 64, 16, BF16), {"dropout_p": 0.8}),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case, device):
    shape, options = CASES[case]
    options = dict(options)
    q, k, v = tensors(*shape, device, std=options.pop("std", 1.0))
    if options.pop("sink", False):
        options["sink"] = torch.linspace(-1.0, 2.0, shape[1], device=device).requires_grad_()
    compare(q, k, v, **options)


def test_strides_are_each_tensors_own(device):
    q, k, v = tensors(2, 2, 2, 35, 40, 16, HALF, device, layout="bthd")
    v = v.detach().contiguous().requires_grad_()
    k = k.detach().permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2).requires_grad_()  # last dim not contiguous
    compare(q, k, v, causal=True)


@pytest.mark.parametrize("value", [float("-inf"), float("inf")])
def test_infinite_sink(value, device):
    q, k, v = tensors(1, 1, 1, 33, 20, 16, HALF, device)
    sink = torch.full((1,), value, device=device).requires_grad_()
    out, lse, *_ = flash_attention(q, k, v, True, return_log_normalizer=True, sink=sink)
    grads = torch.autograd.grad(out.float().sum(), (q, k, v, sink))
    plain = flash_attention(q, k, v, True)
    assert torch.equal(out, torch.zeros_like(out) if value > 0 else plain)
    assert grads[3].item() == 0.0
    assert all(x.isfinite().all() for x in grads)
    if value > 0:
        assert (lse == float("inf")).all()
        assert not any(x.any() for x in grads)


def test_packed_sequences(device):
    lengths_q, lengths_k = [33, 0, 1, 40], [20, 5, 37, 40]
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=torch.int32, device=device) for x in (lengths_q, lengths_k)
    )
    q, k, v = tensors(1, 4, 2, sum(lengths_q), sum(lengths_k), 16, HALF, device)
    packed = [x.detach()[0].transpose(0, 1).requires_grad_() for x in (q, k, v)]
    sink = torch.tensor([0.5, -1.0, 0.0, 2.0], device=device)
    out, lse = flash_attention_varlen(*packed, cu_q, cu_k, 40, 40, True, return_log_normalizer=True, sink=sink)
    grads = torch.autograd.grad(out.float().square().sum(), packed)
    assert lse.shape == (sum(lengths_q), 4)
    q0 = k0 = 0
    for m, n in zip(lengths_q, lengths_k):
        part = [x.detach()[None, a : a + s].transpose(1, 2).requires_grad_()
                for x, a, s in zip(packed, (q0, k0, k0), (m, n, n))]  # fmt: skip
        if m:
            alone, lse_alone, *_ = flash_attention(*part, True, return_log_normalizer=True, sink=sink)
            assert torch.equal(out[q0 : q0 + m], alone[0].transpose(0, 1))
            assert torch.equal(lse[q0 : q0 + m], lse_alone[0].transpose(0, 1))
            expected = torch.autograd.grad(alone.float().square().sum(), part)
        else:
            expected = [torch.zeros_like(x) for x in part]
        for x, y, a, s in zip(grads, expected, (q0, k0, k0), (m, n, n)):
            assert torch.equal(x[a : a + s], y[0].transpose(0, 1))
        q0, k0 = q0 + m, k0 + n


def test_repeats_are_equal_and_dropout_moves_on(device):
    q, k, v = tensors(1, 1, 1, 20, 20, 16, HALF, device)
    torch.manual_seed(5)
    first = flash_attention(q, k, v, dropout_p=0.5, return_seed_offset=True)
    second = flash_attention(q, k, v, dropout_p=0.5, return_seed_offset=True)
    torch.manual_seed(5)
    again = flash_attention(q, k, v, dropout_p=0.5, return_seed_offset=True)
    assert first[3:] == again[3:] != second[3:]
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], second[0])


def test_no_keys_and_no_rows(device):
    q, k, v = tensors(1, 2, 2, 5, 0, 16, HALF, device)
    out, lse, total, *_ = flash_attention(q, k, v, return_log_normalizer=True, return_total_attention=True)
    assert not out.any()
    assert (lse == float("-inf")).all()
    assert total.shape == (1, 2, 0)
    assert not torch.autograd.grad(out.float().sum(), q)[0].any()
    q, k, v = tensors(1, 2, 2, 0, 5, 16, HALF, device)
    out = flash_attention(q, k, v)
    assert out.shape == q.shape
    assert not torch.autograd.grad(out.float().sum(), k)[0].any()


def test_double_backward_is_refused(device):
    q, k, v = tensors(1, 1, 1, 4, 4, 16, HALF, device)
    (dq,) = torch.autograd.grad(flash_attention(q, k, v).float().square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="first order"):
        dq.float().sum().backward()


def test_compiles_whole(device):
    q, k, v = tensors(1, 2, 1, 20, 24, 16, HALF, device)

    def step(q, k, v):
        out, lse, *_ = flash_attention(q, k, v, True, return_log_normalizer=True, softcap=5.0)
        return out * 2, lse

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(q, k, v), step(q, k, v)):
        assert torch.equal(a, b)
    grads = [torch.autograd.grad(f(q, k, v)[0].float().sum(), (q, k, v)) for f in (compiled, step)]
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_new_lengths_compile_nothing_anew(device):
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph.forward

    compiled = torch.compile(flash_attention, fullgraph=True, dynamic=True, backend=backend)
    for rows, keys in ((20, 24), (21, 40), (33, 17)):
        q, k, v = tensors(1, 2, 2, rows, keys, 16, HALF, device)
        assert torch.equal(compiled(q, k, v, True), flash_attention(q, k, v, True))
    assert len(compiles) == 1


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k = torch.empty(2, 4, 30, 64, dtype=HALF), torch.empty(2, 2, 50, 64, dtype=HALF)
        out, lse, total, *_ = flash_attention(q, k, k, True, None, 0.1, True, True)
    assert (out.shape, lse.shape, total.shape) == ((2, 4, 30, 64), (2, 4, 30), (2, 4, 50))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(1, 3, 4, 16, dtype=HALF)}, ValueError, "heads of q must be a multiple of heads of k, got 3"),
        ({"q": torch.zeros(2, 4, 16, dtype=HALF)}, ValueError, "q must have 4 dims"),
        ({"q": torch.zeros(1, 2, 4, 16)}, TypeError, "q must be float16 or bfloat16, got float32"),
        ({"k": torch.zeros(1, 2, 4, 16, dtype=BF16)}, TypeError, "k must have the dtype of q"),
        ({"k": torch.zeros(1, 2, 4, 16, dtype=HALF, device="meta")}, ValueError, "k must be on the device of q"),
        ({"v": torch.zeros(1, 2, 5, 16, dtype=HALF)}, ValueError, "v must have the shape of k"),
        ({"k": torch.zeros(3, 2, 4, 16, dtype=HALF)}, ValueError, "k must have the batch and head dim of q"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p must be in"),
        ({"sm_scale": float("inf")}, ValueError, "sm_scale must be finite"),
        ({"softcap": -1.0}, ValueError, "softcap must be finite and not negative"),
        ({"window": (-2, 0)}, ValueError, "window must be two integers"),
        ({"sink": torch.zeros(3)}, ValueError, "sink must have shape"),
        ({"k": "k"}, TypeError, "k must be a tensor"),
    ],
)
def test_mistakes_are_named(change, error, message):
    good = torch.zeros(1, 2, 4, 16, dtype=HALF)
    with pytest.raises(error, match=message):
        flash_attention(**{"q": good, "k": good, "v": good, **change})
