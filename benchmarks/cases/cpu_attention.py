"""The blockwise torch backend on a CPU: forward + backward against torch SDPA, a narrow window, and its memory."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from ..case import Case, Check, Setup, register

HEADS, DIM, SEQLEN, LONG, WINDOW = 8, 64, 4096, 32768, 1024
# Exact in float64 to about 1e-15; float32 sums of 4096 terms of size 1 are good to about 1e-5.
BUDGET = 2e-5


def _attention(slices: list[Any], q: Any, k: Any, v: Any, dout: Any) -> Callable[[], tuple[Any, ...]]:
    """One forward + backward of ours: ``(out, dq, dk, dv)``."""
    import torch
    from magi_core import flex_flash_attn_func

    table = torch.tensor(slices, dtype=torch.int32)
    q_ranges, k_ranges, types = table[:, :2].contiguous(), table[:, 2:4].contiguous(), table[:, 4].contiguous()

    def run() -> tuple[Any, ...]:
        out, _ = flex_flash_attn_func(q, k, v, q_ranges, k_ranges, types)
        return (out, *torch.autograd.grad(out, (q, k, v), dout))

    return run


def _tensors(total: int) -> tuple[Any, ...]:
    """``q, k, v`` that require gradients, and ``dout``: ``(total, HEADS, DIM)`` float32."""
    import torch

    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(total, HEADS, DIM, generator=generator) for _ in range(4))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def _sampled_rows_error(slices: list[Any], tensors: tuple[Any, ...], results: tuple[Any, ...]) -> float:
    """Largest error of ``out`` and ``dq`` on 24 rows, against float64."""
    import torch
    from magi_core.bands import Bands

    q, k, v, dout = (x.detach().double() for x in tensors)
    bands = Bands.from_slices([s[:2] for s in slices], [s[2:4] for s in slices], [s[4] for s in slices])
    worst = 0.0
    for row in torch.linspace(0, len(q) - 1, 24).long().tolist():
        seen = torch.from_numpy(bands.clip(q=(row, row + 1)).shift(dq=-row).to_dense(1, len(k))[0])
        row_q = q[row].clone().requires_grad_()
        p = (torch.einsum("hd,khd->hk", row_q, k[seen]) * DIM**-0.5).softmax(1)
        out = torch.einsum("hk,khd->hd", p, v[seen])
        (dq,) = torch.autograd.grad(out, row_q, dout[row])
        for got, exact in ((results[0][row], out), (results[1][row], dq)):
            worst = max(worst, float((got.detach().double() - exact.detach()).abs().max()))
    return worst


def _causal() -> Setup:
    import torch
    from magi_core.testing import masks

    q, k, v, dout = tensors = _tensors(SEQLEN)
    slices = masks.make("causal", SEQLEN)
    # SDPA gets what it likes best: heads first, contiguous.
    sq, sk, sv = (x.detach().transpose(0, 1)[None].contiguous().requires_grad_() for x in (q, k, v))
    sdout = dout.transpose(0, 1)[None].contiguous()

    def sdpa() -> tuple[Any, ...]:
        out = torch.nn.functional.scaled_dot_product_attention(sq, sk, sv, is_causal=True)
        return tuple(x[0].transpose(0, 1) for x in (out, *torch.autograd.grad(out, (sq, sk, sv), sdout)))

    return Setup(
        implementations={"magi": _attention(slices, *tensors), "sdpa": sdpa},
        verify=lambda name, result: Check(_sampled_rows_error(slices, tensors, result), BUDGET, "fp64"),
    )


def _window_of(share: float, total: int) -> int:
    """Keys per row of a causal window that shows ``share`` of ``total ** 2`` pairs."""
    return int(total * (1 - math.sqrt(1 - 2 * share)))


def _narrow() -> Setup:
    from magi_core.testing import masks

    tensors = _tensors(SEQLEN)
    slices = {
        "magi": masks.make("swa_causal", SEQLEN, window=_window_of(0.1, SEQLEN)),
        "full mask": masks.make("full", SEQLEN),
    }
    return Setup(
        implementations={name: _attention(mask, *tensors) for name, mask in slices.items()},
        verify=lambda name, result: Check(_sampled_rows_error(slices[name], tensors, result), BUDGET, "fp64"),
    )


def peak_extra_mib() -> float:
    """Peak resident memory of one forward + backward of the long case, over what its inputs take, in MiB.

    Runs in this process: call it in a fresh one. Linux only.
    """
    from magi_core.testing import masks

    def resident(name: str) -> float:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) / 1024 for line in status if line.startswith(name))

    run = _attention(masks.make("swa_causal", LONG, window=WINDOW), *_tensors(LONG))
    _attention(masks.make("swa_causal", 256, window=32), *_tensors(256))()  # libraries and threads are up
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def _long() -> Setup:
    from magi_core.testing import masks

    tensors = _tensors(LONG)
    slices = masks.make("swa_causal", LONG, window=WINDOW)

    def measure() -> float:
        code = "from benchmarks.cases.cpu_attention import peak_extra_mib as p; print(p())"
        return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    return Setup(
        implementations={"magi": _attention(slices, *tensors)},
        verify=lambda name, result: Check(_sampled_rows_error(slices, tensors, result), BUDGET, "fp64"),
        measures={"peak_extra_mib": measure},
    )


def _flops(area: float) -> float:
    """Forward 4, backward 10 operations per visible pair, head and dim."""
    return 14.0 * area * HEADS * DIM


def _params(mask: str, total: int) -> dict[str, Any]:
    return {"mask": mask, "seqlen": total, "heads": HEADS, "head_dim": DIM, "dtype": "float32"}


register(
    Case(
        name=f"cpu_attention/causal/s{SEQLEN}",
        operator="attn_fwd_bwd",
        setup=_causal,
        params=_params("causal", SEQLEN),
        flops=_flops(SEQLEN * (SEQLEN + 1) / 2),
        bounds={"ratio:sdpa": 1.5},
    )
)
register(
    Case(
        name=f"cpu_attention/window_tenth/s{SEQLEN}",
        operator="attn_fwd_bwd",
        setup=_narrow,
        params=_params("swa_causal, a tenth of the area", SEQLEN),
        flops=_flops(0.1 * SEQLEN**2),
        bounds={"ratio:full mask": 0.2},
    )
)
register(
    Case(
        name=f"cpu_attention/window{WINDOW}/s{LONG}",
        operator="attn_fwd_bwd",
        setup=_long,
        params=_params(f"swa_causal, window {WINDOW}", LONG),
        flops=_flops(WINDOW * (LONG - WINDOW) + WINDOW * (WINDOW + 1) / 2),
        bounds={"peak_extra_mib": 1024.0},
    )
)
