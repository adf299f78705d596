"""Properties of attention over slices (style section 8), on drawn cases."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from magi_core.flex_attn import flex_flash_attn_func
from magi_core.sink import merge
from magi_core.testing import AttentionCase, check_attention, masks

cases = st.builds(
    lambda total_q, total_k, count, seed, heads, group, layout, softcap: AttentionCase(
        masks.random_bands(total_q, total_k, count, seed),
        *(total_q, total_k, heads * group, heads),
        head_dim=4,
        sink_layout=layout,
        softcap=softcap,
        seed=seed,
    ),
    total_q=st.integers(0, 60),
    total_k=st.integers(0, 60),
    count=st.integers(0, 8),
    seed=st.integers(0, 10**6),
    heads=st.integers(1, 2),
    group=st.integers(1, 3),
    layout=st.sampled_from([None, "sh", "ssh"]),
    softcap=st.sampled_from([0.0, 1.0]),
)
drawn = settings(max_examples=25, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def few_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def attend(case, slices=None, q=None, k=None, v=None, **keywords):
    q0, k0, v0, sink, *_ = case.tensors()
    slices = case.slices if slices is None else slices
    options = {"sink": sink, **case.options(), **keywords}
    q, k, v = (a if b is None else b for a, b in ((q0, q), (k0, k), (v0, v)))
    out, meta = flex_flash_attn_func(
        q, k, v, [s[:2] for s in slices], [s[2:4] for s in slices], [s[4] for s in slices], **options
    )
    return out, meta.lse


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@drawn
@given(case=cases)
def test_equals_the_reference(case):
    def run(q, k, v, sink):
        ranges = case.ranges()
        out, meta = flex_flash_attn_func(q, k, v, *ranges, sink=sink, return_max_logits=True, **case.options())
        return out, meta.lse, meta.max_logits

    check_attention(case, run)


@drawn
@given(case=cases, cut=st.floats(0, 1))
def test_two_halves_of_the_slices_merge_to_the_whole(case, cut):
    at = round(cut * len(case.slices))
    left = attend(case, case.slices[:at])
    right = attend(case, case.slices[at:], sink=None)
    assert_same(merge(*left, *right), attend(case))


@drawn
@given(case=cases, seed=st.integers(0, 100))
def test_the_order_of_slices_does_not_matter(case, seed):
    order = torch.randperm(len(case.slices), generator=torch.Generator().manual_seed(seed)).tolist()
    a, b = attend(case, [case.slices[i] for i in order]), attend(case)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@drawn
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6), mask_type=st.integers(0, 3), seed=st.integers(0, 99)
)
def test_permuting_packed_documents_permutes_the_result(lengths, mask_type, seed):
    def pack(parts):
        edges = torch.tensor([0, *(len(p) for p in parts)]).cumsum(0).tolist()
        return [(a, b, a, b, mask_type) for a, b in zip(edges, edges[1:])], torch.cat(parts)

    torch.manual_seed(seed)
    parts = [torch.randn(n, 2, 4, dtype=torch.float64) for n in lengths]
    order = torch.randperm(len(lengths)).tolist()
    outs = []
    for chosen in (parts, [parts[i] for i in order]):
        slices, x = pack(chosen)
        ranges = [s[:2] for s in slices]
        outs.append(flex_flash_attn_func(x, x, x, ranges, ranges, mask_type)[0].split([len(p) for p in chosen]))
    for place, i in enumerate(order):
        torch.testing.assert_close(outs[1][place], outs[0][i], rtol=1e-12, atol=1e-12)


@drawn
@given(case=cases)
def test_groups_equal_repeated_kv_heads(case):
    _, k, v, *_ = case.tensors()
    group = case.num_heads_q // case.num_heads_kv
    assert_same(attend(case, k=k.repeat_interleave(group, 1), v=v.repeat_interleave(group, 1)), attend(case))


@drawn
@given(case=cases)
def test_a_sink_is_one_more_key_whose_value_is_zero(case):
    q, k, v, *_ = case.tensors()
    total, heads_kv = case.total_k, case.num_heads_kv
    key = torch.randn(1, heads_kv, case.head_dim, dtype=torch.float64)
    longer_k, longer_v = torch.cat([k, key]), torch.cat([v, torch.zeros_like(key)])
    slices = [*case.slices, (0, case.total_q, total, total + 1, 0)]
    repeated = key.repeat_interleave(case.num_heads_q // heads_kv, 1)[0]
    logit = (q.detach() * repeated).sum(2) * case.head_dim**-0.5  # (total_q, num_heads_q)
    a = attend(case, slices, k=longer_k, v=longer_v, sink=None, softcap=0.0)
    b = attend(case, sink=logit[:, None, :].contiguous(), sink_layout="ssh", softcap=0.0)
    assert_same(a, b)


@drawn
@given(total=st.integers(1, 80), window=st.integers(1, 80))
def test_a_window_equals_its_slices_row_by_row(total, window):
    rows = [(i, i + 1, max(0, i + 1 - window), i + 1, 0) for i in range(total)]
    case = AttentionCase(masks.make("swa_causal", total, window=window), total, total, head_dim=4)
    assert_same(attend(case), attend(case, rows))
