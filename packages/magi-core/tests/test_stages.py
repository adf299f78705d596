"""Stages: keys that arrive in parts give what they give at once, whatever the parts are."""

import math

import numpy as np
import pytest
import torch
from magi_core import FlexPlan, stages
from magi_core.bands import Bands
from magi_core.flex_attn import flex_flash_attn_func
from magi_core.testing import assert_within_budget, masks, poisoned_empty, reference_attention

FIRST, LAST = 1, 2


@pytest.fixture(autouse=True)
def few_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def split_plans(bands, total_q, parts, tile=32):
    """A plan per part of the keys (a list of intervals, concatenated), with the flags of shared query tiles."""
    starts = np.append(np.arange(0, total_q, tile), total_q).astype(np.int32)
    stage_bands = []
    for part in parts:
        rows, offset = [], 0
        for a, b in part:
            rows.append(bands.clip(k=(a, b)).shift(0, offset - a).data)
            offset += b - a
        stage_bands.append((Bands(np.concatenate(rows)) if rows else Bands(), offset))
    touched = np.array(
        [[len(b.clip(q=(int(s), int(e)))) > 0 for s, e in zip(starts, starts[1:])] for b, _ in stage_bands]
    )
    flags = np.zeros(touched.shape, np.int32)
    for t in range(touched.shape[1]):
        stages_of = np.flatnonzero(touched[:, t])
        if len(stages_of):
            flags[stages_of[0], t] |= FIRST
            flags[stages_of[-1], t] |= LAST
        else:
            flags[0, t] = FIRST | LAST
    return [
        FlexPlan.build(
            b, total_q, n, q_tile_starts=starts, stage=i, num_stages=len(parts), tile_flags=flags[i], block_m=tile
        )
        for i, (b, n) in enumerate(stage_bands)
    ]


def exact_results(q, k, v, sink, slices, dout, dlse):
    """Outputs and gradients in float64."""
    leaves = [None if x is None else x.detach().double().requires_grad_() for x in (q, k, v, sink)]
    out, lse, max_logits = reference_attention(*leaves[:3], slices, softcap=4.0, sink=leaves[3], sink_layout="ssh")
    torch.autograd.backward([out, lse], [dout.double(), torch.where(lse.isfinite(), dlse.double(), 0.0)])
    grads = {
        name: torch.zeros_like(x) if x.grad is None else x.grad
        for name, x in zip(("dq", "dk", "dv", "dsink"), leaves, strict=True)
        if x is not None
    }
    return {"out": out, "lse": lse, "max_logits": max_logits, **grads}


@pytest.mark.parametrize("kind", [*masks.KINDS, *masks.ODD, "nothing"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sink_layout", [None, "ssh"])
def test_parts_of_the_keys_give_the_whole(kind, dtype, sink_layout):
    total, heads_q, heads_kv, dim, dim_v = 200, 4, 2, 16, 8
    slices = [] if kind == "nothing" else masks.make(kind, total, window=50, block=30)
    bands = Bands.from_slices([s[:2] for s in slices], [s[2:4] for s in slices], [s[4] for s in slices])
    parts = [[(40, 90), (150, 170)], [(0, 40)], [], [(90, 150), (170, 200)]]
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(total, h, d, dtype=torch.float64).to(dtype).requires_grad_()
        for h, d in ((heads_q, dim), (heads_kv, dim), (heads_kv, dim_v))
    )
    sink = torch.randn(total, 2, heads_q, requires_grad=True) if sink_layout else None
    dout = torch.randn(total, heads_q, dim_v, dtype=torch.float64).to(dtype)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    dlse = torch.randn(total, heads_q, dtype=acc)

    whole, meta = flex_flash_attn_func(
        *(q, k, v, [s[:2] for s in slices], [s[2:4] for s in slices], [s[4] for s in slices]),
        sink=sink,
        sink_layout="ssh",
        softcap=4.0,
        return_max_logits=True,
    )
    torch.autograd.backward([whole, meta.lse], [dout, dlse])

    options = dict(softcap=4.0)
    with torch.no_grad(), poisoned_empty():
        plans = split_plans(bands, total, parts)
        out, lse = torch.empty_like(whole), torch.empty_like(meta.lse)
        out_acc = torch.empty(whole.shape, dtype=acc)
        max_logits = torch.full((heads_q,), -math.inf, dtype=acc)
        gather = [
            [torch.cat([x[a:b] for a, b in part]) if part else x[:0] for x in (k.detach(), v.detach())]
            for part in parts
        ]
        for plan, (part_k, part_v) in zip(plans, gather, strict=True):
            stages.attn_fwd_stage(
                *(out, out_acc, lse, max_logits, q, part_k, part_v, plan), sink=sink, sink_layout="ssh", **options
            )
        delta = stages.attn_bwd_prepare(dout, out, lse, dlse)
        workspace = stages.new_dq_workspace(q)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        for plan, part, (part_k, part_v) in zip(plans, parts, gather, strict=True):
            part_dk, part_dv = torch.empty_like(part_k), torch.empty_like(part_v)
            stages.attn_bwd_stage(*(workspace, part_dk, part_dv, dout, q, part_k, part_v, lse, delta, plan), **options)
            offset = 0
            for a, b in part:
                dk[a:b], dv[a:b] = part_dk[offset : offset + b - a], part_dv[offset : offset + b - a]
                offset += b - a
        dq = stages.dq_from_workspace(workspace, q)
    got = {"out": out, "lse": lse, "max_logits": max_logits, "dq": dq, "dk": dk, "dv": dv}
    at_once = {"out": whole, "lse": meta.lse, "max_logits": meta.max_logits, "dq": q.grad, "dk": k.grad, "dv": v.grad}
    if sink is not None:
        got["dsink"], at_once["dsink"] = stages.sink_backward(dout, out, lse, dlse, sink, "ssh"), sink.grad
    if dtype == torch.float64:
        for name, value in got.items():
            tolerance = 1e-6 if name == "dsink" else 1e-11  # dsink is float32
            torch.testing.assert_close(value, at_once[name].detach(), rtol=tolerance, atol=tolerance)
        return
    exact = exact_results(q, k, v, sink, slices, dout, dlse)
    for name, value in got.items():
        rounding = dtype if name == "dsink" else None
        assert_within_budget(value, at_once[name], exact[name], name=name, rounding=rounding)


def test_a_stage_touches_only_its_tiles():
    bands = Bands.from_slices([[32, 64]], [[0, 8]])
    plan = FlexPlan.build(
        bands, 96, 8, q_tile_starts=[0, 32, 64, 96], stage=1, num_stages=2, tile_flags=[0, FIRST | LAST, 0], block_m=32
    )
    q, k = torch.randn(96, 1, 4), torch.randn(8, 1, 4)
    out, lse = torch.full((96, 1, 4), 7.0), torch.full((96, 1), 7.0)
    stages.attn_fwd_stage(out, None, lse, None, q, k, k, plan)
    assert (out[:32] == 7).all() and (out[64:] == 7).all() and (lse[64:] == 7).all()
    assert not (out[32:64] == 7).any()


def test_errors():
    q, k = torch.randn(10, 1, 4), torch.randn(6, 1, 4)
    plan = FlexPlan.build(Bands.from_slices([[0, 10]], [[0, 6]]), 10, 6)
    out, lse = torch.empty(10, 1, 4), torch.empty(10, 1)
    with pytest.raises(ValueError, match=r"plan must be for the tokens of k \(5\), got a plan for 6"):
        stages.attn_fwd_stage(out, None, lse, None, q, k[:5], k[:5], plan)
    with pytest.raises(ValueError, match="sink_layout must be one of sh, ssh, got 'hs'"):
        stages.attn_fwd_stage(out, None, lse, None, q, k, k, plan, sink_layout="hs")
    for flags in (FIRST, LAST):
        part = FlexPlan.build(
            *(Bands.from_slices([[0, 10]], [[0, 6]]), 10, 6), q_tile_starts=[0, 10], num_stages=2, tile_flags=[flags]
        )
        with pytest.raises(ValueError, match="out_acc must be given when a tile of the plan"):
            stages.attn_fwd_stage(out, None, lse, None, q, k, k, part)
