"""Correction helpers, sinks and range merging: against direct fp64 computation, at the edges, and in gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from magi_attention.functional import utils as F
from magi_attention.functional.range_merge import merge_ranges

INF = math.inf
Z = torch.zeros


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def state(logits: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``logits (t, h, k)``, ``v (k, h, d)`` to out (t, h, d), lse (t, h); rows of only -inf are empty."""
    return torch.einsum("thk,khd->thd", F.safe_softmax(logits), v), F.safe_lse(logits)


def two_halves(num_keys=6, t=5, h=3, d=4, dtype=torch.float64):
    logits = 3 * torch.randn(t, h, num_keys, dtype=dtype)
    logits[0, :, : num_keys // 2] = -INF  # first half empty
    logits[1, :, num_keys // 2 :] = -INF  # second half empty
    logits[2] = -INF  # both
    v = torch.randn(num_keys, h, d, dtype=dtype)
    return logits, v


def test_two_halves_of_the_keys_merge_to_the_whole():
    logits, v = two_halves()
    (out1, lse1), (out2, lse2) = state(logits[..., :3], v[:3]), state(logits[..., 3:], v[3:])
    expected_out, expected_lse = state(logits, v)
    out1[0], out2[1] = torch.nan, torch.nan  # an empty state may hold anything
    out, lse = F.correct_attn_out_lse(out1, lse1, out2, lse2)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-14)
    torch.testing.assert_close(out, expected_out, rtol=0, atol=1e-14)
    assert (out[2] == 0).all()
    assert (lse[2] == -INF).all()
    torch.testing.assert_close(F.correct_attn_lse(lse1, lse2), lse, rtol=0, atol=0)
    torch.testing.assert_close(F.correct_attn_out(out1, lse1, out2, lse2, lse), out, rtol=0, atol=0)


def test_merge_of_two_empty_states_is_zero_and_minus_infinity():
    out, lse = torch.full((1, 1, 2), torch.nan), torch.full((1, 1), -INF)
    merged_out, merged_lse = F.correct_attn_out_lse(out, lse, out, lse)
    assert merged_out.tolist() == [[[0.0, 0.0]]]
    assert merged_lse.tolist() == [[-INF]]


@pytest.mark.parametrize(
    ("lse1", "lse2", "expected"),
    [
        (1000.0, 0.0, 1000.0),
        (-524288.0, -INF, -524288.0),
        (INF, 3.0, INF),
        (INF, INF, INF),
        (INF, -INF, INF),
        (2.0, 2.0, 2.0 + math.log(2)),
    ],
)
def test_lse_at_the_ends_of_the_line(lse1, lse2, expected):
    for a, b in ((lse1, lse2), (lse2, lse1)):
        got = F.correct_attn_lse(torch.tensor([[a]]), torch.tensor([[b]]))
        assert got.item() == pytest.approx(expected, rel=1e-7)


def test_gradients_of_merging_are_those_of_the_whole_and_never_nan():
    logits, v = two_halves()
    grads = []
    for whole in (False, True):
        leaf, value = logits.clone().requires_grad_(), v.clone().requires_grad_()
        if whole:
            out, lse = state(leaf, value)
        else:
            out, lse = F.correct_attn_out_lse(*state(leaf[..., :3], value[:3]), *state(leaf[..., 3:], value[3:]))
        loss = (out * out).sum() + lse[lse.isfinite()].sum()
        grads.append(torch.autograd.grad(loss, (leaf, value)))
    for got, expected in zip(*grads, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("layout", ["sh", "ssh"])
def test_a_sink_is_one_more_key_whose_value_is_zero(layout):
    logits, v = two_halves()
    t, h, _ = logits.shape
    sink = torch.randn((2, h) if layout == "sh" else (t, 2, h), dtype=torch.float64)
    extra = sink.transpose(-1, -2).expand(t, h, 2)
    expected_out, expected_lse = state(torch.cat([logits, extra], -1), torch.cat([v, torch.zeros_like(v[:2])]))
    out, lse = state(logits, v)
    got_out, got_lse = F.correct_attn_out_lse_with_sink(out, lse, sink, layout)
    torch.testing.assert_close(got_out, expected_out, rtol=0, atol=1e-14)
    torch.testing.assert_close(got_lse, expected_lse, rtol=0, atol=1e-14)
    torch.testing.assert_close(F.correct_attn_lse_with_sink(lse, sink, layout), got_lse, rtol=0, atol=0)
    torch.testing.assert_close(F.correct_attn_out_with_sink(out, lse, sink, layout), got_out, rtol=0, atol=0)
    torch.testing.assert_close(F.calc_lse_sink(sink, t, layout), torch.logsumexp(extra, -1), rtol=0, atol=1e-14)


@pytest.mark.parametrize("layout", ["sh", "ssh"])
def test_sink_gradient_is_autograd_s(layout):
    logits, v = two_halves()
    t, h, _ = logits.shape
    sink = torch.randn((2, h) if layout == "sh" else (t, 2, h), dtype=torch.float64).requires_grad_()
    out, lse = F.correct_attn_out_lse_with_sink(*state(logits, v), sink, layout)
    dout = torch.randn_like(out)
    (expected,) = torch.autograd.grad((out * dout).sum(), sink)
    got = F.sink_bwd(sink.detach(), lse.detach(), out.detach(), dout, layout)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)
    into = torch.ones_like(got)
    assert F.sink_bwd(sink.detach(), lse.detach(), out.detach(), dout, layout, dsink=into) is into
    torch.testing.assert_close(into, got + 1, rtol=0, atol=1e-14)


@pytest.mark.parametrize("value", [INF, -INF, 2.4e38, 200.0])
def test_extreme_sinks(value):
    out, lse = torch.ones(2, 1, 3), torch.tensor([[1.0], [-INF]])
    out[1] = 0
    sink = torch.full((1, 1), value)
    got_out, got_lse = F.correct_attn_out_lse_with_sink(out, lse, sink)
    assert not got_out.isnan().any()
    expected = torch.logaddexp(lse.double(), sink.double()).float()
    torch.testing.assert_close(got_lse, expected)
    assert (got_out[1] == 0).all()
    if value == -INF:
        torch.testing.assert_close(got_out, out)
    else:
        assert got_out[0].max() < 1e-30
    dsink = F.sink_bwd(sink, got_lse, got_out, torch.ones_like(out))
    assert dsink.isfinite().all()
    if math.isinf(value):
        assert (dsink == 0).all()


def test_inplace_writes_the_first_state_and_returns_it():
    logits, v = two_halves()
    (out1, lse1), (out2, lse2) = state(logits[..., :3], v[:3]), state(logits[..., 3:], v[3:])
    expected_out, expected_lse = F.correct_attn_out_lse(out1, lse1, out2, lse2)
    out, lse = F.correct_attn_out_lse(out1, lse1, out2, lse2, inplace=True)
    assert out is out1
    assert lse is lse1
    torch.testing.assert_close(out1, expected_out, rtol=0, atol=0)
    torch.testing.assert_close(lse1, expected_lse, rtol=0, atol=0)
    sink = torch.zeros(1, 3, dtype=torch.float64)
    expected = F.correct_attn_out_lse_with_sink(out1, lse1, sink)
    got = F.correct_attn_out_lse_with_sink(out1, lse1, sink, inplace=True)
    assert got[0] is out1
    assert got[1] is lse1
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_out_keeps_its_dtype_and_lse_its_precision():
    out, lse = torch.randn(4, 2, 8).bfloat16(), torch.randn(4, 2)
    got_out, got_lse = F.correct_attn_out_lse(out, lse, out, lse)
    assert (got_out.dtype, got_lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(got_out, out, rtol=2**-7, atol=0)
    torch.testing.assert_close(got_lse, lse + math.log(2))


def test_a_compiled_variant_is_the_plain_function(monkeypatch):
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: compile_(f, backend="eager", fullgraph=True))  # no C++ compiler
    F._compiled.cache_clear()
    lse1, lse2 = torch.tensor([[1.0, -INF]]), torch.tensor([[2.0, -INF]])
    compiled = F.correct_attn_lse_compiled
    assert compiled is not F.correct_attn_lse
    assert compiled is F.correct_attn_lse_compiled
    torch.testing.assert_close(compiled(lse1, lse2), F.correct_attn_lse(lse1, lse2), rtol=0, atol=0)
    F._compiled.cache_clear()
    with pytest.raises(AttributeError):
        F.sink_bwd_compiled  # noqa: B018


@pytest.mark.parametrize("dim", [0, -1])
def test_safe_lse_and_softmax(dim):
    x = torch.randn(4, 5, dtype=torch.float64)
    torch.testing.assert_close(F.safe_lse(x, dim), torch.logsumexp(x, dim), rtol=0, atol=1e-14)
    torch.testing.assert_close(F.safe_softmax(x, dim), torch.softmax(x, dim), rtol=0, atol=1e-14)
    assert F.safe_lse(x, dim, keepdim=True).dim() == 2
    empty = torch.full((3, 3), -INF, requires_grad=True)
    out, lse = F.safe_softmax(empty, dim), F.safe_lse(empty, dim)
    assert (out == 0).all()
    assert (lse == -INF).all()
    (grad,) = torch.autograd.grad(out.sum() + torch.where(lse.isfinite(), lse, 0).sum(), empty)
    assert (grad == 0).all()
    leaf = x.clone().requires_grad_()
    out = F.safe_softmax(leaf, dim)
    dout = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, leaf, dout)
    torch.testing.assert_close(F.softmax_bwd(dout, out.detach(), dim), expected, rtol=0, atol=1e-14)


def test_safe_subtract_of_infinities():
    a, b = torch.tensor([1.0, -INF, INF, -INF, INF]), torch.tensor([3.0, -INF, INF, 1.0, 1.0])
    assert F.safe_subtract(a, b).tolist() == [-2.0, -INF, -INF, -INF, INF]
    assert F.calc_lse_rescale_weight(torch.tensor([[-INF]]), torch.tensor([[-INF]])).tolist() == [[[0.0]]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: F.correct_attn_lse(torch.zeros(3), torch.zeros(3)), ValueError, r"lse1 must be \(total_q, num_heads"),
        (lambda: F.correct_attn_lse(torch.zeros(3, 1), torch.zeros(1, 3)), ValueError, "lse2 must have the shape of"),
        (lambda: F.correct_attn_lse(torch.zeros(3, 1).int(), torch.zeros(3, 1)), TypeError, "lse1 must be floating"),
        (
            lambda: F.correct_attn_out(Z(3, 2, 4), Z(3, 1), Z(3, 1, 4), Z(3, 1), Z(3, 1)),
            ValueError,
            "out1 must be .* got shape",
        ),
        (
            lambda: F.correct_attn_lse_with_sink(torch.zeros(3, 1), torch.zeros(1, 1), "shd"),
            NotImplementedError,
            "sink_layout 'shd' is not implemented",
        ),
        (lambda: F.calc_lse_sink(torch.zeros(1, 1), 3, "hs"), ValueError, "sink_layout must be one of sh, ssh"),
        (lambda: F.calc_lse_sink(torch.zeros(1, 1).half(), 3), TypeError, "sink must be float32"),
        (
            lambda: F.sink_bwd(torch.zeros(1, 1), torch.zeros(3, 1), torch.zeros(3, 1, 4), torch.zeros(3, 1, 2)),
            ValueError,
            "do must have the shape of o",
        ),
    ],
)  # fmt: skip
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()


slices = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 9), st.integers(0, 5), st.integers(0, 3)),
    max_size=12,
)


@settings(deadline=None, max_examples=100)
@given(slices)
def test_merged_ranges_are_the_slices_grouped(rows):
    outer = torch.tensor([(a, a + n) for a, n, _, _, _ in rows], dtype=torch.int32).reshape(-1, 2)
    inner = torch.tensor([(b, b + m) for _, _, b, m, _ in rows], dtype=torch.int32).reshape(-1, 2)
    types = torch.tensor([t for *_, t in rows], dtype=torch.int32)
    merged, sorted_outer, sorted_inner, sorted_types, range_map, count = merge_ranges(outer, inner, types)
    order = sorted(range(len(rows)), key=lambda n: outer[n].tolist())  # Python's sort is stable
    assert sorted_outer.tolist() == outer[order].tolist()
    assert sorted_inner.tolist() == inner[order].tolist()
    assert sorted_types.tolist() == types[order].tolist()
    distinct = sorted({tuple(pair) for pair in outer.tolist()})
    assert count.item() == len(distinct)
    assert [tuple(pair) for pair in merged[: len(distinct)].tolist()] == distinct
    assert (merged[len(distinct) :] == 0).all()
    assert range_map.shape == (len(rows) + 1,)
    assert (range_map[len(distinct) :] == len(rows)).all()
    for g, pair in enumerate(distinct):
        members = sorted_outer[range_map[g] : range_map[g + 1]].tolist()
        assert members == [list(pair)] * outer.tolist().count(list(pair))
        assert members


def test_merge_ranges_refuses_what_does_not_fit():
    pairs = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"inner_ranges must be \(2, 2\), got shape \(1, 2\)"):
        merge_ranges(pairs, pairs[:1])
    with pytest.raises(TypeError, match="outer_ranges must be integers"):
        merge_ranges(pairs.float(), pairs)
    with pytest.raises(ValueError, match=r"attn_type_map must be \(2,\)"):
        merge_ranges(pairs, pairs, torch.zeros(3, dtype=torch.int32))
    assert merge_ranges(pairs, pairs)[3].tolist() == [0, 0]
