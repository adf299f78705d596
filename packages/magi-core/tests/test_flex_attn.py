"""flex_flash_attn_func against the fp64 reference: masks, dtypes, shapes, memory layouts, edges (contract 1 to 9)."""

import math

import numpy as np
import pytest
import torch
from magi_core import AttnMaskType, AttnRanges, FlexPlan, Mask, stages
from magi_core.backends import schedule
from magi_core.bands import Bands
from magi_core.flex_attn import flex_flash_attn_func
from magi_core.testing import AttentionCase, check_attention, masks, poisoned_empty, reference_attention

INF = math.inf


@pytest.fixture(autouse=True)
def few_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny_blocks(monkeypatch):
    """Blocks so small that short sequences have many tiles, steps, head blocks and gathered jobs."""
    from magi_core.backends import reference

    monkeypatch.setattr(schedule, "_TILE_SIZES", (24,))
    monkeypatch.setattr(schedule, "_STEPS", (40, 40))
    monkeypatch.setattr(schedule, "_JOB_OVERHEAD", 600)
    monkeypatch.setattr(schedule, "_EMPTY_TILE", 30)
    monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", 2000)
    stages._schedules.clear()
    yield
    stages._schedules.clear()


def attend_with(case, **keywords):
    q_ranges, k_ranges, types = case.ranges()

    def attend(q, k, v, sink):
        with poisoned_empty():
            out, meta = flex_flash_attn_func(
                *(q, k, v, q_ranges, k_ranges, types),
                **{"sink": sink, "return_max_logits": True, **case.options(), **keywords},
            )
        return out, meta.lse, meta.max_logits

    return attend


def check(case, **keywords):
    check_attention(case, attend_with(case, **keywords))


def slices_of(kind, total):
    if kind == "random":
        return masks.random_bands(total, total, 30, seed=total)
    return masks.make(kind, total, window=total // 6, block=total // 12 + 1)


ALL = (*masks.KINDS, *masks.ODD, "random")


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("total", [7, 150])
def test_masks(kind, total, tiny_blocks):
    check(AttentionCase(slices_of(kind, total), total, total, sink_layout="sh"))


@pytest.mark.parametrize("kind", ALL)
def test_masks_in_blocks_of_the_default_size(kind):
    check(AttentionCase(slices_of(kind, 700), 700, 700, num_heads_q=1, head_dim=8, sink_layout="ssh"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["varlen_causal", "swa_causal", "random", "pairs"])
@pytest.mark.parametrize("softcap", [0.0, 2.0], ids="cap{}".format)
def test_dtypes(kind, dtype, softcap, tiny_blocks):
    check(
        AttentionCase(
            *(slices_of(kind, 160), 160, 160, 8, 4),
            head_dim=32,
            num_sinks=4,
            dtype=dtype,
            softcap=softcap,
            sink_layout="sh",
        )
    )


@pytest.mark.parametrize("group", [1, 3, 6, 7])
@pytest.mark.parametrize("num_heads_kv", [1, 3])
def test_group_ratios(group, num_heads_kv, tiny_blocks):
    slices = [(0, 30, 0, 50, 1), (30, 61, 20, 45, 2), (30, 50, 45, 90, 3)]
    check(
        AttentionCase(slices, 61, 90, group * num_heads_kv, num_heads_kv, head_dim=8, head_dim_v=5, sink_layout="ssh")
    )


@pytest.mark.parametrize("head_dim", [1, 8, 31, 60, 72, 96, 100, 256])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_any_head_dim(head_dim, dtype):
    check(AttentionCase(slices_of("causal", 40), 40, 40, head_dim=head_dim, head_dim_v=33, dtype=dtype))


@pytest.mark.parametrize("scale", [-0.7, 0.0, 3.0])
def test_any_scale(scale):
    check(AttentionCase(slices_of("swa_causal", 60), 60, 60, softmax_scale=scale, sink_layout="sh"))


def test_defaults_of_the_scale():
    case = AttentionCase(slices_of("full", 20), 20, 20, head_dim=4)
    q, k, v, *_ = case.tensors()
    q_ranges, k_ranges, types = case.ranges()
    a, _ = flex_flash_attn_func(q, k, v, q_ranges, k_ranges, types)
    b, _ = flex_flash_attn_func(q, k, v, q_ranges, k_ranges, types, softmax_scale=0.5)
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "heads"),
    [
        ([0, 0, 1, 1, 2], [0, 0, 3, 3, 8], (9, 3)),
        ([0, 76, 110, 256], [0, 1, 2, 3], (2, 1)),
        ([0, 0], [0, 0], (2, 1)),
        ([0, 0], [0, 9], (2, 1)),
        ([0, 9], [0, 0], (2, 2)),
    ],
    ids=["zero-length-short", "q-longer-than-k", "nothing", "no-q", "no-k"],
)
@pytest.mark.parametrize("mask_type", [0, 1, 2, 3])
def test_packed_segments(cu_q, cu_k, heads, mask_type):
    slices = [(a, b, c, d, mask_type) for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False)]
    check(AttentionCase(slices, cu_q[-1], cu_k[-1], *heads, head_dim=4, sink_layout="sh"))


@pytest.mark.parametrize("mask_type", [0, 1])
def test_zero_length_segments_of_a_long_pack(mask_type):
    cu_q, cu_k = [0, 0, 1208, 2048, 2048], [0, 2538, 4280, 5120, 8192]
    case = AttentionCase([], 2048, 8192, 2, 1, head_dim=8, dtype=torch.float32)  # without slices every key is NaN
    q, k, v, _, dout, dlse = case.tensors()
    segments = [(slice(a, b), slice(c, d)) for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False)]
    with torch.no_grad():
        for _, columns in segments[1:3]:
            k[columns], v[columns] = torch.randn(2, columns.stop - columns.start, 1, 8)
    with poisoned_empty():
        q_ranges, k_ranges = torch.tensor(cu_q).unfold(0, 2, 1), torch.tensor(cu_k).unfold(0, 2, 1)
        out, meta = flex_flash_attn_func(q, k, v, q_ranges, k_ranges, mask_type)
        torch.autograd.backward([out, meta.lse], [dout, dlse])
    for rows, columns in segments:
        sizes = rows.stop - rows.start, columns.stop - columns.start
        if 0 in sizes:
            assert (k.grad[columns] == 0).all() and (v.grad[columns] == 0).all()
            continue
        leaves = [x.detach().double().requires_grad_() for x in (q[rows], k[columns], v[columns])]
        exact, lse, _ = reference_attention(*leaves, [(0, sizes[0], 0, sizes[1], mask_type)])
        torch.autograd.backward([exact, lse], [dout[rows].double(), dlse[rows].double()])
        for got, expected in (
            (out[rows], exact),
            (meta.lse[rows], lse),
            (q.grad[rows], leaves[0].grad),
            (k.grad[columns], leaves[1].grad),
            (v.grad[columns], leaves[2].grad),
        ):
            torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)


def test_no_slices_at_all():
    case = AttentionCase([], 5, 6, sink_layout="sh")
    check(case)
    q, k, v, *_ = case.tensors()
    out, meta = flex_flash_attn_func(q, k, v, AttnRanges(), AttnRanges())
    assert (out == 0).all() and (meta.lse == -INF).all() and meta.max_logits is None


def test_one_key_one_query_with_a_sink():
    q, k = (torch.ones(1, 1, 1, requires_grad=True) for _ in range(2))
    v = torch.full((1, 1, 1), 2.0, requires_grad=True)
    sink = torch.zeros(1, 1, requires_grad=True)
    out, meta = flex_flash_attn_func(q, k, v, [[0, 1]], [[0, 1]], sink=sink, softmax_scale=1.0)
    out.sum().backward()
    assert q.grad.item() == pytest.approx(0.39322387, abs=2e-7) and k.grad.item() == q.grad.item()
    assert meta.lse.item() == pytest.approx(math.log(1 + math.e), abs=2e-7)
    check(AttentionCase([(0, 1, 0, 1, 0)], 1, 1, 1, 1, 1, sink_layout="sh", num_sinks=1))


@pytest.mark.parametrize("value", [INF, -INF, 2.4e38, 200.0, -2.4e38])
@pytest.mark.parametrize("layout", ["sh", "ssh"])
def test_extreme_sinks(value, layout):
    slices = [(0, 3, 0, 4, 1)]  # of 4 rows the last sees nothing
    case = AttentionCase(slices, 4, 4, sink_layout=layout)
    q, k, v, sink, dout, dlse = case.tensors()
    results = []
    for as_double in (False, True):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, sink)]
        with torch.no_grad():
            leaves[3][..., 0, :] = value
        if as_double:
            leaves[3] = leaves[3].detach().double().requires_grad_()
            out, lse, _ = reference_attention(*leaves[:3], slices, sink=leaves[3], sink_layout=layout)
        else:
            out, lse, _ = attend_with(case)(*leaves)
        torch.autograd.backward([out, lse], [dout, dlse])
        results.append((out, lse, *(x.grad for x in leaves)))
    for got, exact in zip(*results, strict=True):
        torch.testing.assert_close(got, exact.to(got.dtype), rtol=1e-6, atol=1e-6)
    assert all(x.isfinite().all() for x in results[0][2:])


def test_a_row_without_keys_has_the_lse_of_its_sink():
    case = AttentionCase([(0, 2, 0, 3, 0)], 4, 3, sink_layout="sh")
    q, k, v, sink, *_ = case.tensors()
    out, lse, _ = attend_with(case)(q, k, v, sink)
    assert (out[2:] == 0).all()
    torch.testing.assert_close(lse[2:], sink.double().logsumexp(0).expand(2, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_one_key_with_a_very_negative_score(dtype):
    q, k = torch.full((1, 1, 8), -256.0, dtype=dtype), torch.full((1, 1, 8), 256.0, dtype=dtype)
    v = torch.randn(1, 1, 8).to(dtype)
    out, meta = flex_flash_attn_func(q, k, v, [[0, 1]], [[0, 1]], softmax_scale=1.0, return_max_logits=True)
    assert torch.equal(out, v) and meta.lse.item() == -524288 and meta.max_logits.item() == -524288


def test_softcap_of_a_large_score():
    q, k, v = (torch.full((2, 1, 1), x, requires_grad=True) for x in (5000.0, 1.0, 3.0))
    out, meta = flex_flash_attn_func(
        q, k, v, [[0, 2]], [[0, 2]], softmax_scale=1.0, softcap=50.0, return_max_logits=True
    )
    out.sum().backward()
    assert meta.max_logits.item() == 50.0 and (q.grad == 0).all()
    torch.testing.assert_close(meta.lse, torch.full((2, 1), 50 + math.log(2)))


def test_large_scores_do_not_overflow():
    case = AttentionCase(slices_of("causal", 50), 50, 50, softmax_scale=300.0, dtype=torch.float32)
    q, k, v, *_ = case.tensors()
    out, lse, _ = attend_with(case)(q, k, v, None)
    exact, exact_lse, _ = reference_attention(q, k, v, case.slices, softmax_scale=300.0)
    assert exact_lse.abs().max() > 2000
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-3)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_expanded_and_sliced_gradients():
    case = AttentionCase(slices_of("varlen_causal", 100), 100, 100, num_heads_q=2, num_heads_kv=2)
    q_ranges, k_ranges, types = case.ranges()
    grads = []
    for make in (
        lambda out: torch.ones_like(out),
        lambda out: torch.ones(1, 1, 1, dtype=out.dtype).expand_as(out),
        lambda out: torch.ones(100, 4, 2, 40, dtype=out.dtype)[:, 1, :, 7:23],
    ):
        q, k, v, *_ = case.tensors()
        out, _ = flex_flash_attn_func(q, k, v, q_ranges, k_ranges, types)
        out.backward(make(out.detach()))
        grads.append((q.grad, k.grad, v.grad))
    for other in grads[1:]:
        for a, b in zip(grads[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)  # BLAS may sum in another order at other addresses


@pytest.mark.parametrize("layout", ["heads-first", "transposed-last", "offset", "fused-qkv", "expanded-heads"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_memory_layouts(layout, dtype, tiny_blocks):
    case = AttentionCase(slices_of("varlen_causal", 90), 90, 90, 4, 4, dtype=dtype, is_poisoned=False)
    q_ranges, k_ranges, types = case.ranges()
    q, k, v, _, dout, _ = case.tensors()
    if layout == "expanded-heads":
        k, v = (x.detach()[:, :1].expand_as(x).requires_grad_() for x in (k, v))

    def arrange(x, is_key):
        if layout == "heads-first":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        if layout == "transposed-last":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "offset":
            wide = torch.full((x.shape[0] + 3, x.shape[1] + 1, x.shape[2] + 5), torch.nan, dtype=x.dtype)
            wide[2:-1, 1:, 3:-2] = x
            return wide[2:-1, 1:, 3:-2]
        if layout == "fused-qkv":
            return torch.stack([x, x, x], 1)[:, 1]
        return x[:, :1].contiguous().expand_as(x) if is_key else x

    results = []
    for is_arranged in (False, True):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        given = [arrange(x, i > 0) for i, x in enumerate(leaves)] if is_arranged else leaves
        out, meta = flex_flash_attn_func(*given, q_ranges, k_ranges, types)
        torch.autograd.backward([out, meta.lse], [dout, meta.lse.detach()])
        results.append((out, meta.lse, leaves[0].grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_offsets_past_two_to_the_31():
    far = 2**31 + 64  # elements
    try:
        memory = torch.empty(far + 64, dtype=torch.float16)  # never touched but at its ends
    except RuntimeError as error:  # the allocator of a small machine may refuse
        pytest.skip(f"no 4 GiB of address space: {error}")
    memory[:64], memory[far : far + 64] = torch.randn(64).half(), torch.randn(64).half()
    x = memory.as_strided((2, 2, 16), (far, 16, 1))
    near = x.contiguous()
    q_ranges = [[0, 2]]
    a, _ = flex_flash_attn_func(x, x, x, q_ranges, q_ranges, 1)
    b, _ = flex_flash_attn_func(near, near, near, q_ranges, q_ranges, 1)
    assert torch.equal(a, b)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "sink", "none"])
def test_gradients_of_some_inputs(wanted):
    case = AttentionCase(slices_of("swa_causal", 60), 60, 60, sink_layout="sh")
    names = ("q", "k", "v", "sink")
    q_ranges, k_ranges, types = case.ranges()

    def grads(needed):
        leaves = [
            x.detach().clone().requires_grad_(name in needed) for name, x in zip(names, case.tensors(), strict=False)
        ]
        out, meta = flex_flash_attn_func(*leaves[:3], q_ranges, k_ranges, types, sink=leaves[3])
        assert out.requires_grad == bool(needed)
        if needed:
            (out.sum() + meta.lse.sum()).backward()
        return {name: x.grad for name, x in zip(names, leaves, strict=True)}

    everything = grads(names)
    some = grads(() if wanted == "none" else (wanted,))
    for name in names:
        assert (some[name] is None) == (name != wanted)
        if name == wanted:
            assert torch.equal(some[name], everything[name])


def test_gradient_of_lse_alone_and_of_out_alone():
    case = AttentionCase(slices_of("causal", 30), 30, 30, sink_layout="sh")
    for take in (lambda out, lse: out.sin().sum(), lambda out, lse: lse.sin().sum()):
        q, k, v, sink, *_ = case.tensors()
        out, lse, _ = attend_with(case)(q, k, v, sink)
        got = torch.autograd.grad(take(out, lse), (q, k, v, sink))
        out, lse, _ = reference_attention(q, k, v, case.slices, sink=sink)
        exact = torch.autograd.grad(take(out, lse), (q, k, v, sink), allow_unused=True)
        for a, b in zip(got, exact, strict=True):
            torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


@pytest.mark.parametrize("types", [(a, b) for a in range(4) for b in range(a, 4)], ids=str)
@pytest.mark.parametrize("is_duplicate", [True, False], ids=["duplicate", "overlapping"])
def test_pairs_covered_twice(types, is_duplicate, tiny_blocks):
    second = (4, 54, 6, 66) if is_duplicate else (10, 40, 20, 70)
    slices = [(4, 54, 6, 66, types[0]), (*second, types[1])]
    case = AttentionCase(slices, 60, 70)
    q, k, v, *_ = case.tensors()
    with pytest.raises(ValueError, match="slice"):
        flex_flash_attn_func(q, k, v, *case.ranges())
    check(case, allow_overlap=True)


def test_a_pair_covered_many_times_counts_as_often():
    check(AttentionCase([(0, 3, 0, 3, 0)] * 5 + [(1, 2, 1, 3, 0)] * 2, 4, 4, sink_layout="sh"), allow_overlap=True)


def test_ways_to_say_the_same_mask():
    case = AttentionCase([(0, 20, 0, 20, 1), (20, 50, 0, 50, 1)], 50, 50)
    q, k, v, *_ = case.tensors()
    q_pairs, k_pairs = [(0, 20), (20, 50)], [(0, 20), (0, 50)]
    expected, _ = flex_flash_attn_func(q, k, v, *case.ranges())
    q_ranges, k_ranges = AttnRanges.from_ranges(q_pairs), AttnRanges.from_ranges(k_pairs)
    bands = Bands.from_slices(q_pairs, k_pairs, "causal")
    plan = FlexPlan.build(bands, 50, 50)
    for keywords in (
        dict(q_ranges=q_pairs, k_ranges=k_pairs, attn_type_map=[1, 1]),
        dict(q_ranges=np.array(q_pairs), k_ranges=np.array(k_pairs), attn_type_map=np.array([1, 1])),
        dict(q_ranges=torch.tensor(q_pairs), k_ranges=torch.tensor(k_pairs), attn_type_map=torch.tensor([1, 1])),
        dict(q_ranges=q_ranges, k_ranges=k_ranges, attn_type_map=AttnMaskType.CAUSAL),
        dict(q_ranges=q_ranges, k_ranges=k_ranges, attn_type_map=[AttnMaskType.CAUSAL, "causal"]),
        dict(q_ranges=q_ranges, k_ranges=k_ranges, attn_type_map="causal"),
        dict(plan=plan),
        dict(plan=plan.tensor()),
        dict(plan=FlexPlan.from_tensor(plan.tensor())),
    ):
        out, _ = flex_flash_attn_func(q, k, v, **keywords)
        assert torch.equal(out, expected), keywords


def test_hints_do_not_change_results():
    case = AttentionCase(slices_of("varlen_causal", 80), 80, 80)
    q, k, v, *_ = case.tensors()
    expected, _ = flex_flash_attn_func(q, k, v, *case.ranges())
    out, _ = flex_flash_attn_func(
        *(q, k, v, *case.ranges()),
        deterministic=True,
        sm_margin=4,
        disable_fwd_atomic_reduction=True,
        disable_bwd_dkv_atomic_reduction=True,
        ref_block_size=(64, 64),
        max_seqlen_q=80,
        auto_range_merge=True,
        swap_ab=True,
        pack_gqa=True,
        cat_gqa=True,
        sparse_load=True,
        swap_bwd_qk_loop=True,
        backend="reference",
    )
    assert torch.equal(out, expected)


def test_backend_names_of_the_blockwise_backend():
    case = AttentionCase(slices_of("causal", 10), 10, 10)
    q, k, v, *_ = case.tensors()
    outs = [flex_flash_attn_func(q, k, v, *case.ranges(), backend=b)[0] for b in (None, "reference", "sdpa", "sdpa_ol")]
    assert all(torch.equal(outs[0], x) for x in outs[1:])


def test_repeated_calls_plan_once(monkeypatch):
    case = AttentionCase(slices_of("varlen_causal", 77), 77, 77)
    q, k, v, *_ = case.tensors()
    flex_flash_attn_func(q, k, v, *case.ranges())
    monkeypatch.setattr(FlexPlan, "build", lambda *a, **k: pytest.fail("planned again"))
    flex_flash_attn_func(q, k, v, *case.ranges())
    monkeypatch.undo()
    planned = []
    build = FlexPlan.build
    monkeypatch.setattr(FlexPlan, "build", lambda *a, **k: planned.append(a) or build(*a, **k))
    flex_flash_attn_func(q, k, v, [[0, 77]], [[0, 5]])
    flex_flash_attn_func(q[:70], k, v, [[0, 70]], [[0, 5]])
    flex_flash_attn_func(q, k, v, [[0, 77]], [[0, 5]], "causal")
    assert len(planned) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_of_the_caller_changes_nothing(dtype):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(150, h, 32, generator=generator).to(dtype).requires_grad_() for h in (4, 2, 2))
    indices = torch.randint(0, 150, (150, 1, 5), dtype=torch.int32, generator=generator)

    def run():
        out, meta = flex_flash_attn_func(q, k, v, [[0, 150]], [[0, 150]], [1])
        listed, _ = flex_flash_attn_func(q, k[:, :1], v[:, :1], index_attn_indices=indices)
        loss = out.float().sin().sum() + meta.lse.cos().sum() + listed.float().sin().sum()
        return [out, meta.lse, listed, *torch.autograd.grad(loss, (q, k, v))]

    plain = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run()
    for got, expected in zip(cast, plain, strict=True):
        assert got.dtype == expected.dtype and torch.equal(got, expected)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_plan_of_one_of_several_stages_is_refused(as_tensor):
    plan = FlexPlan.build(Bands.from_slices([[0, 5]], [[0, 5]]), 300, 300, stage=1, num_stages=2)
    q = torch.randn(300, 1, 8)
    with pytest.raises(ValueError, match="plan must be for one stage, got stage 1 of 2"):
        flex_flash_attn_func(q, q, q, plan=plan.tensor() if as_tensor else plan)


def test_mask_in_the_place_of_ranges_is_told_the_way():
    q = torch.randn(8, 1, 16)
    with pytest.raises(ValueError, match=r"\*mask\.slices\(\)"):
        flex_flash_attn_func(q, q, q, Mask.causal(8))
