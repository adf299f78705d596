"""Flex flash attention on a GPU: forward and backward over the mask suite, beside what the machine has.

Rival: FlashAttention-3's forward, where the package ``fa3-fwd`` is importable. Standard case: bf16, 64 query and 8 kv
heads. The backward of ours counts everything that a call does: preparation, zeroed workspace, main kernel, conversion.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from ..case import Case, Check, Setup, register

HEADS_Q, HEADS_KV = 64, 8


def _data(total: int, dim: int) -> tuple[Any, ...]:
    import torch

    torch.manual_seed(0)
    make: Callable[[int], Any] = lambda heads: torch.randn(total, heads, dim, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    return make(HEADS_Q), make(HEADS_KV), make(HEADS_KV), make(HEADS_Q)


def _mask(kind: str, total: int) -> Any:
    import numpy as np
    from magi_core import FlexPlan, Mask
    from magi_core.testing import masks

    a = np.array(masks.make(kind, total)).reshape(-1, 5)
    mask = Mask.from_slices(a[:, 0:2], a[:, 2:4], a[:, 4].tolist(), total_q=total, total_k=total)
    return FlexPlan.build(mask, num_heads_q=HEADS_Q, num_heads_kv=HEADS_KV)


def _area(kind: str, total: int) -> int:
    from magi_core.testing import masks

    return masks.area(masks.make(kind, total))


def _sampled_error(kind: str, total: int, tensors: tuple[Any, ...], result: tuple[Any, ...]) -> float:
    """Largest error over 64 rows of two heads: ``out``, and ``dq`` where the result has it. fp64."""
    import torch
    from magi_core.testing import masks

    q, k, v, dout = tensors
    rows = torch.linspace(0, total - 1, 64, device=q.device).long()
    seen = torch.zeros(64, total, dtype=torch.bool, device=q.device)
    cols = torch.arange(total, device=q.device)[None]
    for q0, q1, k0, k1, kind_of in masks.make(kind, total):
        i, j = rows[:, None] - q0, cols - k0
        ok = (rows[:, None] >= q0) & (rows[:, None] < q1) & (cols >= k0) & (cols < k1)
        if kind_of in (1, 3):
            ok &= j <= i + (k1 - k0) - (q1 - q0)
        if kind_of in (2, 3):
            ok &= j >= i
        seen |= ok
    error = 0.0
    for head in (0, HEADS_Q - 1):
        kv = head // (HEADS_Q // HEADS_KV)
        x, y, z = q[rows, head].double(), k[:, kv].double(), v[:, kv].double()
        p = torch.nan_to_num(torch.softmax((x @ y.T * q.shape[2] ** -0.5).masked_fill(~seen, float("-inf")), -1))
        out = p @ z
        error = max(error, float((result[0][rows, head].double() - out).abs().max()))
        if len(result) > 1:
            grad = dout[rows, head].double()
            ds = p * (grad @ z.T - (grad * out).sum(-1, keepdim=True))
            error = max(error, float((result[1][rows, head].double() - ds @ y * q.shape[2] ** -0.5).abs().max()))
    return error


def _fa3(kind: str, total: int, q: Any, k: Any, v: Any) -> Callable[[], tuple[Any, ...]] | None:
    served = ("full", "causal", "varlen_full", "varlen_causal")
    if importlib.util.find_spec("fa3_fwd_interface") is None or kind not in served:
        return None
    import fa3_fwd_interface as fa3
    import torch
    from magi_core.testing import masks

    causal = kind.endswith("causal")
    if not kind.startswith("varlen"):
        return lambda: (fa3.flash_attn_func(q[None], k[None], v[None], causal=causal)[0],)
    lengths = masks.document_lengths(total)
    cu = torch.tensor([0, *lengths], device=q.device).cumsum(0, dtype=torch.int32)
    return lambda: (fa3.flash_attn_varlen_func(q, k, v, cu, cu, max(lengths), max(lengths), causal=causal),)


def _setup(kind: str, total: int, dim: int, direction: str) -> Setup:
    import torch
    from magi_core import flex_flash_attn_func

    tensors = q, k, v, dout = _data(total, dim)
    plan = _mask(kind, total)

    def forward() -> tuple[Any, ...]:
        with torch.no_grad():
            return (flex_flash_attn_func(q, k, v, plan=plan)[0],)

    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out: Any = flex_flash_attn_func(*leaves, plan=plan)[0] if direction == "bwd" else None

    def backward() -> tuple[Any, ...]:
        return (out, *torch.autograd.grad(out, leaves, dout, retain_graph=True))

    implementations: dict[str, Callable[[], Any]] = {"magi": forward if direction == "fwd" else backward}
    rival = _fa3(kind, total, q, k, v) if direction == "fwd" else None
    if rival is not None:
        implementations["fa3"] = rival
    return Setup(
        implementations=implementations,
        verify=lambda name, result: Check(_sampled_error(kind, total, tensors, result), 0.05, "fp64"),
    )


for _direction, _factor in (("fwd", 4.0), ("bwd", 10.0)):
    for _kind in ("full", "causal", "varlen_full", "varlen_causal", "swa_causal", "varlen_block_causal"):
        for _total in (8192, 16384, 32768):

            def _make(kind: str = _kind, total: int = _total, direction: str = _direction) -> Setup:
                return _setup(kind, total, 128, direction)

            register(
                Case(
                    name=f"ffa/{_direction}/{_kind}/s{_total}/d128",
                    operator=f"attn_{_direction}",
                    setup=_make,
                    params={
                        "mask": _kind,
                        "seqlen": _total,
                        "num_heads_q": HEADS_Q,
                        "num_heads_kv": HEADS_KV,
                        "head_dim": 128,
                        "dtype": "bfloat16",
                    },
                    flops=_factor * _area(_kind, _total) * HEADS_Q * 128,
                    device="cuda",
                )
            )
