# ruff: noqa: B023, E501  (functions are called in the iteration that makes them; wide tables)
"""Bring-up on the device: forward checks against fp64 and timings, from a plain .so (no wheel installed).

python3 ci/device/sm90_bringup.py LIBRARY [check|time ...]
"""

from __future__ import annotations

import importlib.util
import os
import sys

import numpy as np
import torch
import tvm_ffi

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import sm90_plan  # noqa: E402

try:
    from magi_core import FlexPlan, Mask
except ImportError:
    FlexPlan = None

torch.manual_seed(0)
tvm_ffi.register_error("NotImplementedError", NotImplementedError)
lib = tvm_ffi.load_module(sys.argv[1])
dev = torch.device("cuda")


def make_plan(slices, tq, tk, hq, hk, core=True, many=False, **options):
    """A plan on the device: the C++ builder's, or the independent one's."""
    if core and FlexPlan is not None:
        a = np.array(slices, np.int64).reshape(-1, 5)
        mask = Mask.from_slices(a[:, 0:2], a[:, 2:4], a[:, 4].tolist(), total_q=tq, total_k=tk)
        return FlexPlan.build(mask, num_heads_q=hq, num_heads_kv=hk, **options).tensor(dev)
    return torch.from_numpy(sm90_plan.build(slices, tq, tk, many=many)).to(dev)


def masks_module():
    """The mask suite, from its file: magi_core itself may be missing here."""
    place = os.path.join(HERE, "../../packages/magi-core/src/magi_core/testing/masks.py")
    spec = importlib.util.spec_from_file_location("masks", place)
    m = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(m)
    return m


def reference(q, k, v, seen, scale, softcap=0.0, sink=None):
    """fp64, dense. seen: (Tq, Tk) counts."""
    g = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(g, 1), v.double().repeat_interleave(g, 1)
    s = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    w = torch.from_numpy(seen).to(s.device).double()
    s = s + torch.log(w)
    lse = torch.logsumexp(s, -1)
    top = s.amax((1, 2))
    safe = torch.where(lse.isinf(), torch.zeros_like(lse), lse)
    p = torch.exp(s - safe[..., None])
    out = torch.einsum("hqk,khd->qhd", p, v)
    lse = lse.t()
    if sink is not None:
        ls = torch.logsumexp(sink.double(), 0)[None].expand_as(lse)
        both = torch.logaddexp(lse, ls)
        out = out * torch.exp(lse - both)[..., None]
        lse = both
    return out, lse, top


def plain(q, k, v, seen, scale, dtype):
    """The same in 16 bits, as torch would compute it."""
    g = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    s = torch.einsum("qhd,khd->hqk", q, k) * scale
    s = s.masked_fill(torch.from_numpy(seen == 0).to(s.device), float("-inf"))
    p = torch.nan_to_num(torch.softmax(s.float(), -1)).to(dtype)
    return torch.einsum("hqk,khd->qhd", p, v)


def run(q, k, v, plan, scale, softcap=0.0, sink=None, out_acc=None, lse=None, out=None, ml=None):
    if out is None:
        out = torch.full((q.shape[0], q.shape[1], v.shape[2]), float("nan"), device=dev, dtype=q.dtype)
    if lse is None:
        lse = torch.full((q.shape[0], q.shape[1]), float("nan"), device=dev)
    lib["attn_fwd"](out, out_acc, lse, ml, q, k, v, plan, sink, 0, scale, softcap, 0)
    return out, lse


def check_one(
    name, slices, tq, tk, hq, hk, d, dv, dtype, softcap=0.0, with_sink=False, many=False, poison=True, core=True
):
    q = torch.randn(tq, hq, d, device=dev).to(dtype)
    k = torch.randn(tk, hk, d, device=dev).to(dtype)
    v = torch.randn(tk, hk, dv, device=dev).to(dtype)
    scale = d**-0.5
    plan = make_plan(slices, tq, tk, hq, hk, core, many)
    seen = sm90_plan.dense(sm90_plan.bands_of(slices), tq, tk)
    if poison:
        dead = torch.from_numpy(seen.sum(0) == 0).to(dev)
        k[dead], v[dead] = float("nan"), float("nan")
    sink = torch.randn(2, hq, device=dev) if with_sink else None
    ml = torch.full((hq,), float("-inf"), device=dev)
    out, lse = run(q, k, v, plan, scale, softcap, sink, ml=ml)
    torch.cuda.synchronize()
    k, v = torch.nan_to_num(k), torch.nan_to_num(v)
    want, want_lse, top = reference(q, k, v, seen, scale, softcap, sink)
    err = (out.double() - want).abs().max().item()
    base = (
        (plain(q, k, v, seen, scale, dtype).double() - want).abs().max().item() if not (softcap or with_sink) else 0.02
    )
    fin = want_lse.isfinite()
    lse_ok = torch.equal(fin, lse.isfinite())
    lse_err = (lse.double() - want_lse)[fin].abs().max().item() if fin.any() else 0.0
    ml_err = (ml.double() - top)[top.isfinite()].abs().max().item() if top.isfinite().any() else 0.0
    eps = torch.finfo(dtype).eps
    cap_slack = softcap * 2**-10
    ok = (
        err <= 2 * base + eps * want.abs().max().item()
        and lse_ok
        and lse_err < 2e-3 + cap_slack
        and ml_err < 1e-2 + cap_slack
    )
    ok = ok and bool(torch.isfinite(out).all())
    print(
        f"{'ok  ' if ok else 'FAIL'} {name:28s} d{d}/{dv} {str(dtype)[6:]:9s} err {err:.2e} base {base:.2e} lse {lse_err:.1e} ml {ml_err:.1e}",
        flush=True,
    )
    return ok


def random_slices(rng, tq, tk, n):
    """Slices with disjoint query ranges; types and key ranges are random."""
    cuts = np.sort(rng.integers(0, tq + 1, n - 1))
    edges = [0, *cuts.tolist(), tq]
    out = []
    for a, b in zip(edges, edges[1:]):
        x, y = sorted(rng.integers(0, tk + 1, 2).tolist())
        out.append((a, b, x, y, int(rng.integers(0, 4))))
    return [s for s in out if s[1] > s[0] and s[3] > s[2]]


HEAD_DIMS = ((128, 128), (64, 64), (192, 128), (192, 192), (256, 256), (96, 96), (8, 8), (72, 40))


def checks():
    m = masks_module()
    bf, hf = torch.bfloat16, torch.float16
    good = True
    for d, dv in HEAD_DIMS:
        for dtype in (bf, hf):
            try:
                good &= check_one("full 300", [(0, 300, 0, 300, 0)], 300, 300, 4, 2, d, dv, dtype)
                good &= check_one("causal 1000", [(0, 1000, 0, 1000, 1)], 1000, 1000, 6, 2, d, dv, dtype)
                good &= check_one(
                    "causal many", [(0, 1000, 0, 1000, 1)], 1000, 1000, 6, 2, d, dv, dtype, many=True, core=False
                )
                good &= check_one("long row", [(0, 100, 0, 3000, 0)], 100, 3000, 2, 1, d, dv, dtype)
                good &= check_one("softcap", [(0, 500, 0, 700, 1)], 500, 700, 3, 1, d, dv, dtype, softcap=15.0)
            except NotImplementedError as e:
                print("skip", d, dv, dtype, str(e)[:60])
    rng = np.random.default_rng(1)
    for i in range(12):
        tq, tk = int(rng.integers(1, 1500)), int(rng.integers(1, 1500))
        good &= check_one(
            f"random {i}",
            random_slices(rng, tq, tk, int(rng.integers(1, 20))),
            tq,
            tk,
            4,
            2,
            128,
            128,
            bf,
            many=bool(i % 2),
            core=i % 3 > 0,
        )
    good &= check_one("sink", [(0, 200, 0, 300, 1)], 500, 300, 4, 2, 128, 128, bf, with_sink=True)
    good &= check_one("nothing", [], 200, 300, 4, 2, 128, 128, bf)
    for kind in m.KINDS + m.ODD:
        good &= check_one(kind, m.make(kind, 4097), 4097, 4097, 2, 1, 128, 128, bf)
    # stages: keys split in three, state carried
    q, k, v = (torch.randn(700, h, 128, device=dev).to(bf) for h in (4, 2, 2))
    whole, lse = run(q, k, v, torch.from_numpy(sm90_plan.build([(0, 700, 0, 700, 1)], 700, 700)).to(dev), 0.1)
    out = torch.full_like(whole, float("nan"))
    acc, l2 = torch.full((700, 4, 128), float("nan"), device=dev), torch.full_like(lse, float("nan"))
    for i, (a, b) in enumerate(((0, 200), (200, 500), (500, 700))):
        sl = [(max(a, 0), b, a, b, 1)] + ([(b, 700, a, b, 0)] if b < 700 else [])
        pl = sm90_plan.build(
            [(x, y, c - a, e - a, t) for x, y, c, e, t in sl],
            700,
            b - a,
            flags=(1 if i == 0 else 0) | (2 if i == 2 else 0),
        )
        run(q, k[a:b], v[a:b], torch.from_numpy(pl).to(dev), 0.1, out_acc=acc, lse=l2, out=out)
    e1, e2 = (out.float() - whole.float()).abs().max().item(), (lse - l2).abs().max().item()
    print("stages", e1, e2)
    good &= e1 < 0.02 and e2 < 1e-3
    print("ALL OK" if good else "SOME FAILED", flush=True)


def backward(q, k, v, dout, out, lse, plan, scale, softcap=0.0, dlse=None, float_kv=False):
    delta = torch.full_like(lse, float("nan"))
    lib["attn_bwd_prepare"](delta, dout, out, lse, dlse)
    ws = torch.zeros(lib["dq_workspace_words"](*q.shape), device=dev)
    kv = torch.float32 if float_kv else k.dtype
    dk, dv = (torch.full(x.shape, float("nan"), device=dev, dtype=kv) for x in (k, v))
    lib["attn_bwd"](ws, dk, dv, dout, q, k, v, lse, delta, plan, scale, softcap, 0, 0)
    dq = torch.full_like(q, float("nan"))
    lib["dq_convert"](dq, ws)
    return dq, dk, dv


def check_bwd(
    name, slices, tq, tk, hq, hk, d, dtype, softcap=0.0, core=True, many=False, with_dlse=False, float_kv=False
):
    q, dout = (torch.randn(tq, hq, d, device=dev).to(dtype) for _ in range(2))
    k, v = (torch.randn(tk, hk, d, device=dev).to(dtype) for _ in range(2))
    scale = d**-0.5
    seen = sm90_plan.dense(sm90_plan.bands_of(slices), tq, tk)
    dead = torch.from_numpy(seen.sum(0) == 0).to(dev)
    k[dead], v[dead] = float("nan"), float("nan")
    plan = make_plan(slices, tq, tk, hq, hk, core, many)
    dlse = torch.randn(tq, hq, device=dev) if with_dlse else None
    out, lse = run(q, k, v, plan, scale, softcap)
    dq, dk, dv = backward(q, k, v, dout, out, lse, plan, scale, softcap, dlse, float_kv)
    torch.cuda.synchronize()
    k, v = torch.nan_to_num(k), torch.nan_to_num(v)

    def grads(cast):
        qq, kk, vv = (cast(x).detach().requires_grad_() for x in (q, k, v))
        g = hq // hk
        kr, vr = kk.repeat_interleave(g, 1), vv.repeat_interleave(g, 1)
        s = torch.einsum("qhd,khd->hqk", qq, kr) * scale
        if softcap > 0:
            s = softcap * torch.tanh(s / softcap)
        w = torch.from_numpy(seen).to(dev)
        s = s.masked_fill(w == 0, -1e30 if s.dtype == torch.float64 else -3e4)
        live = torch.from_numpy(seen.sum(1) > 0).to(dev)
        l2 = torch.logsumexp(s.double(), -1)
        p = torch.softmax(s.double() if s.dtype == torch.float64 else s.float(), -1).to(s.dtype) * live[None, :, None]
        o = torch.einsum("hqk,khd->qhd", p, vr)
        loss = (o.double() * dout.double()).sum()
        if dlse is not None:
            loss = loss + (torch.where(live[None], l2, torch.zeros_like(l2)).t() * dlse.double()).sum()
        return torch.autograd.grad(loss, (qq, kk, vv))

    exact, same = grads(lambda x: x.double()), grads(lambda x: x)
    ok, text = True, ""
    for label, got, e, b in zip(("dq", "dk", "dv"), (dq, dk, dv), exact, same):
        err, base = (got.double() - e).abs().max().item(), (b.double() - e).abs().max().item()
        ok &= bool(torch.isfinite(got).all()) and err <= 2 * base + torch.finfo(dtype).eps * e.abs().max().item()
        text += f" {label} {err:.2e}/{base:.2e}"
    print(f"{'ok  ' if ok else 'FAIL'} bwd {name:24s} d{d} {str(dtype)[6:]:9s}{text}", flush=True)
    return ok


def bwd_checks():
    m = masks_module()
    bf = torch.bfloat16
    good = True
    for d in (128, 64, 96, 40):
        good &= check_bwd("full 64x128", [(0, 64, 0, 128, 0)], 64, 128, 1, 1, d, bf)
        good &= check_bwd("full 300", [(0, 300, 0, 300, 0)], 300, 300, 4, 2, d, bf)
        good &= check_bwd("causal 1000", [(0, 1000, 0, 1000, 1)], 1000, 1000, 6, 2, d, bf)
        good &= check_bwd("dlse, float dk", [(0, 500, 0, 700, 1)], 500, 700, 4, 2, d, bf, with_dlse=True, float_kv=True)
    good &= check_bwd("softcap", [(0, 500, 0, 700, 1)], 500, 700, 3, 1, 128, bf, softcap=15.0)
    good &= check_bwd("nothing", [], 200, 300, 4, 2, 128, bf)
    good &= check_bwd("split", [(0, 5000, 0, 100, 0)], 5000, 100, 8, 1, 128, bf)
    rng = np.random.default_rng(2)
    for i in range(12):
        tq, tk = int(rng.integers(1, 1500)), int(rng.integers(1, 1500))
        good &= check_bwd(f"random {i}", random_slices(rng, tq, tk, int(rng.integers(1, 20))), tq, tk, 4, 2, 128, bf)
    for kind in m.KINDS + m.ODD:
        good &= check_bwd(kind, m.make(kind, 2049), 2049, 2049, 2, 1, 128, bf)
    print("BWD ALL OK" if good else "BWD SOME FAILED", flush=True)


def bwd_timings(sizes=(8192, 16384), d=128, hq=64, hk=8):
    m = masks_module()
    for s in sizes:
        q, dout = (torch.randn(s, hq, d, device=dev).to(torch.bfloat16) for _ in range(2))
        k, v = (torch.randn(s, hk, d, device=dev).to(torch.bfloat16) for _ in range(2))
        for kind in m.KINDS:
            sl = m.make(kind, s)
            plan = make_plan(sl, s, s, hq, hk)
            out, lse = run(q, k, v, plan, d**-0.5)
            ms = timed(lambda: backward(q, k, v, dout, out, lse, plan, d**-0.5), 8)
            print(
                f"bwd  {kind:22s} S {s:6d} d {d} {ms:8.3f} ms {10 * m.area(sl) * hq * d / ms / 1e9:7.1f} TFLOP/s",
                flush=True,
            )


def versus(sizes=(8192, 16384), d=128, hq=64, hk=8, rounds=15):
    """Forward against FlashAttention-3 (fa3-fwd on PYTHONPATH), alternating in this process."""
    import fa3_fwd_interface as fa3

    m = masks_module()
    for s in sizes:
        q = torch.randn(s, hq, d, device=dev).to(torch.bfloat16)
        k, v = (torch.randn(s, hk, d, device=dev).to(torch.bfloat16) for _ in range(2))
        for kind in ("full", "causal", "varlen_full", "varlen_causal"):
            sl = m.make(kind, s)
            plan = make_plan(sl, s, s, hq, hk)
            out, lse = torch.empty_like(q), torch.empty(s, hq, device=dev)

            def ours():
                lib["attn_fwd"](out, None, lse, None, q, k, v, plan, None, 0, d**-0.5, 0.0, 0)

            if kind.startswith("varlen"):
                lengths = m.document_lengths(s)
                cu = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=dev)
                longest = max(lengths)

                def theirs():
                    return fa3.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, causal=kind == "varlen_causal")
            else:
                window = (1023, 0) if kind == "swa_causal" else (-1, -1)

                def theirs():
                    return fa3.flash_attn_func(q[None], k[None], v[None], causal=kind != "full", window_size=window)

            ours()
            r = theirs()
            r = (r[0] if isinstance(r, tuple) else r).reshape(out.shape)
            diff = (r.float() - out.float()).abs().max().item()
            a, b = [], []
            for _ in range(rounds):
                a.append(timed(ours, 1, 0))
                b.append(timed(theirs, 1, 0))
            flop = 4 * m.area(sl) * hq * d / 1e9
            ta, tb = float(np.median(a)), float(np.median(b))
            print(
                f"vs   {kind:14s} S {s:6d} ours {flop / ta:6.1f} fa3 {flop / tb:6.1f} TFLOP/s ratio {tb / ta:.3f} diff {diff:.1e}",
                flush=True,
            )


def timed(f, n=20, warm=3):
    for _ in range(warm):
        f()
    times = []
    for _ in range(n):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        f()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b))
    return float(np.median(times))


def timings(sizes=(8192, 16384), kinds=None, d=128, hq=64, hk=8):
    m = masks_module()
    for s in sizes:
        q = torch.randn(s, hq, d, device=dev).to(torch.bfloat16)
        k, v = (torch.randn(s, hk, d, device=dev).to(torch.bfloat16) for _ in range(2))
        for kind in kinds or m.KINDS:
            sl = m.make(kind, s)
            plan = make_plan(sl, s, s, hq, hk)
            out, lse = torch.empty_like(q), torch.empty(s, hq, device=dev)
            ms = timed(lambda: lib["attn_fwd"](out, None, lse, None, q, k, v, plan, None, 0, d**-0.5, 0.0, 0))
            print(
                f"time {kind:22s} S {s:6d} d {d} {ms:8.3f} ms {4 * m.area(sl) * hq * d / ms / 1e9:7.1f} TFLOP/s",
                flush=True,
            )


if __name__ == "__main__":
    for what in sys.argv[2:] or ["check", "time"]:
        if what == "check":
            checks()
        elif what == "time":
            timings()
        elif what == "bwd":
            bwd_checks()
        elif what == "bwdtime":
            bwd_timings()
        elif what == "versus":
            versus()
        elif what == "quick":
            HEAD_DIMS = ((128, 128),)
            checks()
        elif what == "timeshort":
            timings(kinds=["full", "causal", "varlen_causal"], sizes=(1024, 2048, 4096))
        elif what == "time64":
            timings(kinds=["full", "causal"], sizes=(16384,), d=64)
        elif what == "time256":
            timings(kinds=["full", "causal"], sizes=(16384,), d=256)
