"""FlashAttention with sink on the CPU provider, against attention written out densely in float64."""

import pytest
import torch
from magi_attn_extensions import (
    fa2_func_with_sink,
    fa2_kvpacked_func_with_sink,
    fa2_qkvpacked_func_with_sink,
    fa2_varlen_func_with_sink,
    fa2_varlen_kvpacked_func_with_sink,
    fa2_varlen_qkvpacked_func_with_sink,
    fa3_func_with_sink,
    fa3_qkvpacked_func_with_sink,
    fa3_varlen_func_with_sink,
    fa4_func_with_sink,
    fa4_varlen_func_with_sink,
    use_provider,
)
from magi_core.testing import assert_within_budget


def dense(q, k, v, sink, *, causal=False, window=(-1, -1), softcap=0.0, alibi=None, scale=None, drop=None, exact=True):
    """One sequence: q ``(sq, hq, d)``; sink ``(s, hq)`` or ``(sq, s, hq)``; ``(out, lse (hq, sq))``."""
    dtype, p_dtype = (torch.float64, torch.float64) if exact else (torch.float32, q.dtype)
    if q.dtype == torch.float64:
        dtype = torch.float64
    sq, sk, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1).to(dtype) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    s = (q.shape[2] ** -0.5 if scale is None else scale) * q @ k.transpose(1, 2)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    distance = torch.arange(sk)[None, :] - torch.arange(sq)[:, None] - (sk - sq)
    if alibi is not None:
        s = s - alibi.to(dtype)[:, None, None] * distance.abs()
    seen = torch.ones(sq, sk, dtype=torch.bool)
    seen &= (distance <= 0) | (not causal)
    seen &= (distance <= window[1]) | (window[1] < 0)
    seen &= (distance >= -window[0]) | (window[0] < 0)
    s = s.masked_fill(~seen, -torch.inf)
    logits = torch.zeros(q.shape[0], sq, 0, dtype=dtype)
    if sink is not None:
        logits = (sink[None].expand(sq, -1, -1) if sink.dim() == 2 else sink).to(dtype).permute(2, 0, 1)
    every = torch.cat([s, logits], 2)
    nothing = (every == -torch.inf).all(2, keepdim=True)
    every = torch.where(nothing, 0.0, every)
    p = torch.where(nothing, 0.0, torch.softmax(every, 2))
    lse = torch.where(nothing.squeeze(2), -torch.inf, torch.logsumexp(every, 2))
    p = p[:, :, :sk]
    if drop is not None:
        p = p * drop
    return (p.to(p_dtype) @ v.to(p_dtype)).transpose(0, 1), lse


def tensors(batch, sq, sk, hq, hk, d, sinks, layout, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    q, k, v = make(batch, sq, hq, d).to(dtype), make(batch, sk, hk, d).to(dtype), make(batch, sk, hk, d).to(dtype)
    sink = make(*((sinks, hq) if layout == "sh" else (batch, sq, sinks, hq)))
    sink = sink.to(torch.float64 if dtype == torch.float64 else torch.float32)
    return [x.requires_grad_() for x in (q, k, v, sink)]


def gradients(out, lse, leaves, keep, seed=1):
    """Of a loss through out and through the finite part of lse."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    slope = torch.randn(lse.shape, generator=generator, dtype=torch.float64)
    loss = (out * weight.to(out.dtype)).sum() + (torch.where(lse.isfinite(), lse, 0.0) * slope.to(lse.dtype)).sum()
    return torch.autograd.grad(loss, leaves, retain_graph=keep)


def batched(q, k, v, sink, exact=True, **options):
    per_row = sink is not None and sink.dim() == 4
    parts = [dense(*x, sink[i] if per_row else sink, exact=exact, **options) for i, x in enumerate(zip(q, k, v))]
    return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])


def check(got, leaves, same, exact):
    """Outputs and gradients of ``got = (out, lse)`` against two runs of the dense form on the same leaves."""
    names = ("out", "lse", "dq", "dk", "dv", "dsink")
    rows = [(*result, *gradients(*result, leaves, keep=result is not got)) for result in (got, same, exact)]
    for name, a, b, c in zip(names, *rows):
        if a.dtype == torch.float64:  # a budget measured with float64 against itself would be nothing
            torch.testing.assert_close(a, c, rtol=1e-11, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")
            continue
        rounding = leaves[0].dtype if name == "dsink" else None
        assert_within_budget(a, b, c.double(), name=name, rounding=rounding)


OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "softcap": 2.0},
    {"window": (3, 1)},
    {"causal": True, "window": (2, -1), "scale": -0.3},
    {"causal": True, "alibi": torch.tensor([0.5, 0.25, 0.1, 0.0])},
]


def keywords(options):
    names = {"window": "window_size", "scale": "softmax_scale", "alibi": "alibi_slopes"}
    return {names.get(name, name): value for name, value in options.items()}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "full")
@pytest.mark.parametrize("layout", ["sh", "ssh"])
@pytest.mark.parametrize("lengths", [(7, 9), (9, 5)], ids=str)  # 9 rows over 5 keys: causal rows that see nothing
def test_batched(lengths, layout, options):
    leaves = tensors(2, *lengths, 4, 2, 8, 3, layout, torch.float64)
    out, lse, probs = fa2_func_with_sink(*leaves, layout, **keywords(options), return_attn_probs=True)
    assert probs is None
    exact = batched(*leaves, **options)
    check((out, lse), leaves, exact, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision(dtype):
    leaves = tensors(2, 33, 40, 4, 1, 16, 2, "sh", dtype)
    out, lse, _ = fa2_func_with_sink(*leaves, causal=True, return_attn_probs=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    check((out, lse), leaves, batched(*leaves, exact=False, causal=True), batched(*leaves, causal=True))


def test_no_sink_is_plain_attention_and_minus_infinity_is_no_sink():
    *leaves, sink = tensors(1, 6, 6, 4, 4, 8, 1, "sh", torch.float64)
    plain = fa2_func_with_sink(*leaves, causal=True, return_attn_probs=True)
    want = batched(*leaves, None, causal=True)
    none = fa2_func_with_sink(*leaves, torch.full_like(sink, -torch.inf), causal=True, return_attn_probs=True)
    for a, b, c in zip(plain, want, none):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(a, c, rtol=1e-12, atol=1e-12)


def test_an_infinite_sink_takes_everything():
    *leaves, sink = tensors(1, 6, 6, 4, 4, 8, 2, "sh", torch.float64)
    full = torch.where(torch.arange(4) == 1, torch.inf, sink.detach()).requires_grad_()
    out, lse, _ = fa2_func_with_sink(*leaves, full, return_attn_probs=True)
    assert (out[:, :, 1] == 0).all() and (lse[:, 1] == torch.inf).all()
    grads = torch.autograd.grad(out.sum() + torch.where(lse.isfinite(), lse, 0.0).sum(), (*leaves, full))
    assert all(x.isfinite().all() for x in grads)
    assert (grads[0][:, :, 1] == 0).all() and (grads[3][:, 1] == 0).all()


def test_rows_without_keys():
    leaves = tensors(1, 5, 2, 2, 1, 8, 1, "sh", torch.float64)
    out, lse, _ = fa2_func_with_sink(*leaves, causal=True, return_attn_probs=True)
    assert (out[:, :3] == 0).all()
    torch.testing.assert_close(lse[0, :, :3], leaves[3].logsumexp(0)[:, None].expand(2, 3))
    _, lse, _ = fa2_func_with_sink(*leaves[:3], causal=True, return_attn_probs=True)
    assert torch.isneginf(lse[:, :, :3]).all()


@pytest.mark.parametrize("layout", ["sh", "ssh"])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (2, 0)}], ids=str)
def test_varlen(layout, options):
    cu_q, cu_k = torch.tensor([0, 4, 4, 9], dtype=torch.int32), torch.tensor([0, 5, 8, 12], dtype=torch.int32)
    q, _, _, sink = (x[0].detach() if x.dim() == 4 else x.detach()
                     for x in tensors(1, 9, 12, 6, 2, 8, 2, layout, torch.float64))  # fmt: skip
    _, k, v, _ = (x[0].detach() for x in tensors(1, 9, 12, 6, 2, 8, 2, "ssh", torch.float64))
    leaves = [x.requires_grad_() for x in (q, k, v, sink)]
    out, lse, _ = fa2_varlen_func_with_sink(
        *(q, k, v, cu_q, cu_k, 5, 5, sink, layout), **keywords(options), return_attn_probs=True
    )
    parts = []
    for (a, b), (c, d) in zip(zip(cu_q, cu_q[1:]), zip(cu_k, cu_k[1:])):
        parts.append(dense(q[a:b], k[c:d], v[c:d], sink[a:b] if layout == "ssh" else sink, **options))
    exact = torch.cat([x for x, _ in parts]), torch.cat([x for _, x in parts], 1)
    check((out, lse), leaves, exact, exact)


def test_dropout_keeps_what_it_says_it_keeps():
    leaves = tensors(2, 8, 8, 4, 2, 8, 2, "sh", torch.float64)
    out, lse, probs = fa2_func_with_sink(*leaves, dropout_p=0.3, causal=True, return_attn_probs=True)
    seen = torch.ones(8, 8, dtype=torch.bool).tril()
    dropped = torch.signbit(probs) & seen
    assert 0.15 < float(dropped.sum() / seen.sum() / 8) < 0.45
    drop = (~dropped).double() / 0.7
    parts = [dense(*(x[i] for x in leaves[:3]), leaves[3], causal=True, drop=drop[i]) for i in range(2)]
    exact = torch.stack([x for x, _ in parts]), torch.stack([x for _, x in parts])
    check((out, lse), leaves, exact, exact)


def test_packed_forms_are_the_plain_one():
    q, k, v, sink = (x.detach() for x in tensors(2, 6, 6, 4, 4, 8, 2, "sh", torch.float32))
    cu = torch.tensor([0, 6, 12], dtype=torch.int32)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    want = fa2_func_with_sink(q, k, v, sink, causal=True)
    assert torch.equal(want, fa2_qkvpacked_func_with_sink(torch.stack((q, k, v), 2), sink, causal=True))
    assert torch.equal(want, fa2_kvpacked_func_with_sink(q, torch.stack((k, v), 2), sink, causal=True))
    for got in (
        fa2_varlen_func_with_sink(*flat, cu, cu, 6, 6, sink, causal=True),
        fa2_varlen_qkvpacked_func_with_sink(torch.stack(flat, 1), cu, 6, sink, causal=True),
        fa2_varlen_kvpacked_func_with_sink(flat[0], torch.stack(flat[1:], 1), cu, cu, 6, 6, sink, causal=True),
    ):
        assert torch.equal(want.flatten(0, 1), got)


def test_fa3_and_fa4_forms_on_the_reference():
    q, k, v, sink = (x.detach() for x in tensors(2, 6, 6, 4, 2, 8, 2, "sh", torch.float32))
    cu, flat = torch.tensor([0, 6, 12], dtype=torch.int32), [x.flatten(0, 1) for x in (q, k, v)]
    out, lse, _ = fa2_func_with_sink(q, k, v, sink, causal=True, return_attn_probs=True)
    with use_provider("fa3", "reference"), use_provider("fa4", "reference"):
        for got in (
            fa3_func_with_sink(q, k, v, sink, causal=True, return_attn_probs=True),
            fa4_func_with_sink(q, k, v, sink, causal=True, return_attn_probs=True),
            fa3_qkvpacked_func_with_sink(
                torch.cat((q, k, v), 2), sink, causal=True, num_heads_q=4, return_attn_probs=True
            ),
        ):
            assert len(got) == 2 and torch.equal(got[0], out) and torch.equal(got[1], lse)
        for got in (
            fa3_varlen_func_with_sink(*flat, cu, cu, 6, 6, sink, causal=True),
            fa4_varlen_func_with_sink(*flat, cu, cu, sink=sink, causal=True),
        ):
            assert torch.equal(got, out.flatten(0, 1))
        used = torch.tensor([6, 3], dtype=torch.int32)
        part = fa3_varlen_func_with_sink(*flat, cu, cu, 6, 6, sink, seqused_k=used)
        want = fa3_func_with_sink(q[1:], k[1:, :3], v[1:, :3], sink)
        torch.testing.assert_close(part[6:], want[0])


def test_compiled_without_a_graph_break():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: fa2_func_with_sink(*x, causal=True, return_attn_probs=True)[:2], fullgraph=True, backend="aot_eager"
    )
    for lengths in ((7, 9), (6, 11)):
        leaves = tensors(2, *lengths, 4, 2, 8, 3, "sh", torch.float64)
        exact = batched(*leaves, causal=True)
        check(compiled(*leaves), leaves, exact, exact)


def test_double_backward_is_refused():
    leaves = tensors(1, 4, 4, 2, 2, 8, 1, "sh", torch.float64)
    (dq,) = torch.autograd.grad(fa2_func_with_sink(*leaves).square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sink_layout": "shd"}, NotImplementedError, "'shd' is not implemented"),
        ({"sink_layout": "hs"}, ValueError, "sink_layout must be one of sh, ssh, got 'hs'"),
        ({"sink": torch.zeros(1, 3)}, ValueError, r"\(s_sink, num_heads_q=4\)"),
        ({"sink": torch.zeros(1, 4, dtype=torch.bfloat16)}, TypeError, "sink must be float32"),
        ({"q": torch.zeros(5, 4, 8)}, ValueError, "q must have shape"),
        ({"q": torch.zeros(1, 5, 3, 8)}, ValueError, r"num_heads_kv must divide num_heads_q \(3\)"),
        ({"k": torch.zeros(1, 5, 2, 8).double()}, TypeError, "one floating point dtype"),
        ({"v": torch.zeros(1, 5, 2, 4)}, ValueError, r"v must have the head_dim of q \(8\), got 4"),
        ({"dropout_p": 1.0}, ValueError, r"dropout_p must be in \[0, 1\)"),
        ({"window_size": (-2, 0)}, ValueError, "window_size must be at least -1"),
        ({"softcap": -1.0}, ValueError, "softcap must be 0"),
    ],
)
def test_bad_arguments(change, error, message):
    arguments = dict(q=torch.zeros(1, 5, 4, 8), k=torch.zeros(1, 5, 2, 8), v=torch.zeros(1, 5, 2, 8))
    arguments.update(change)
    with pytest.raises(error, match=message):
        fa2_func_with_sink(**arguments)


def test_what_a_provider_lacks_is_refused():
    q = torch.zeros(1, 4, 2, 8)
    with use_provider("fa2", "torch"), pytest.raises(NotImplementedError, match="takes float16 and bfloat16 on cuda"):
        fa2_func_with_sink(q, q, q)
    with pytest.raises(NotImplementedError, match="has no block_table"):
        cu = torch.tensor([0, 4], dtype=torch.int32)
        fa2_varlen_func_with_sink(q[0], q, q, cu, cu, 4, 4, block_table=torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="has no attention_chunk"), use_provider("fa3", "reference"):
        fa3_func_with_sink(q, q, q, attention_chunk=2)
