"""FlashAttention-2 with sink against the same without one, and sparse attention against dense causal attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..case import Case, Check, Setup, register

SEQLEN, HEADS, HEADS_KV, DIM = 16384, 64, 8, 128
KEYS, TOPK, SPARSE_HEADS = 65536, 2048, 128


def _make(*shape: int, seed: int = 0) -> Any:
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def _sink_setup(is_backward: bool) -> Setup:
    import torch
    from magi_attn_extensions import fa2_func_with_sink

    q = _make(1, SEQLEN, HEADS, DIM).requires_grad_()
    k, v = (_make(1, SEQLEN, HEADS_KV, DIM, seed=i).requires_grad_() for i in (1, 2))
    sink = torch.randn(1, HEADS, device="cuda").requires_grad_()
    dout = _make(1, SEQLEN, HEADS, DIM, seed=3)
    outs = {
        name: fa2_func_with_sink(q, k, v, x, causal=True, return_attn_probs=True)
        for name, x in (("magi", sink), ("fa2", None))
    }

    def run(x: Any, name: str) -> Callable[[], Any]:
        if is_backward:
            leaves = (q, k, v) if x is None else (q, k, v, x)
            return lambda: torch.autograd.grad(outs[name][0], leaves, dout, retain_graph=True)

        def forward() -> Any:
            with torch.no_grad():
                return fa2_func_with_sink(q, k, v, x, causal=True)

        return forward

    def verify(name: str, result: Any) -> Check:
        """Rows of the last 8 tokens in float64: out, or dq."""
        exact, x = 0.0, sink if name == "magi" else torch.full_like(sink, -torch.inf)
        for row in range(SEQLEN - 8, SEQLEN):
            b_q = q[0, row].detach().double().requires_grad_()
            keys, values = (y[0, : row + 1].detach().double().repeat_interleave(HEADS // HEADS_KV, 1) for y in (k, v))
            s = torch.einsum("hd,jhd->hj", b_q, keys) * DIM**-0.5
            p = torch.softmax(torch.cat((s, x.detach().double().t()), 1), 1)[:, :-1]
            out = torch.einsum("hj,jhd->hd", p, values)
            (dq,) = torch.autograd.grad(out, b_q, dout[0, row].double())
            got, want = (result[0][0, row], dq) if is_backward else (result[0, row], out)
            exact = max(exact, float((got.detach().double() - want.detach()).abs().max() / want.detach().abs().max()))
        return Check(exact, 2.0**-6, "fp64")

    return Setup({"magi": run(sink, "magi"), "fa2": run(None, "fa2")}, verify)


def _sparse_setup(is_backward: bool, dim: int, dim_v: int) -> Setup:
    import torch
    from magi_attn_extensions import dsa_attn_func, fa2_func_with_sink

    q = _make(KEYS, SPARSE_HEADS, dim).requires_grad_()
    k, v = _make(KEYS, 1, dim, seed=1).requires_grad_(), _make(KEYS, 1, dim_v, seed=2).requires_grad_()
    dout = _make(KEYS, SPARSE_HEADS, dim_v, seed=3)
    index = torch.randint(0, KEYS, (1, KEYS, TOPK), device="cuda", dtype=torch.int32)
    out: Any = dsa_attn_func(q, k, v, index)[0] if is_backward else None

    def magi() -> Any:
        if is_backward:
            return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        with torch.no_grad():
            return dsa_attn_func(q, k, v, index)[0]

    implementations: dict[str, Callable[[], Any]] = {"magi": magi}
    if dim == dim_v:  # dense causal attention of the same size, by the FlashAttention-2 inside torch
        dense_out: Any = fa2_func_with_sink(q[None], k[None], v[None], causal=True) if is_backward else None

        def dense() -> Any:
            if is_backward:
                return torch.autograd.grad(dense_out, (q, k, v), dout[None], retain_graph=True)
            with torch.no_grad():
                return fa2_func_with_sink(q[None], k[None], v[None], causal=True)

        implementations["fa2 causal"] = dense

    def verify(name: str, result: Any) -> Check:
        if name != "magi":
            return Check(0.0, 0.0, "not checked: another mask, timed for its size only")
        worst = 0.0
        for row in (0, KEYS // 2, KEYS - 1):
            b_q, keys = q[row].detach().double().requires_grad_(), index[0, row].long()
            p = torch.softmax(b_q @ k[keys, 0].detach().double().t() * dim**-0.5, 1)
            exact = p @ v[keys, 0].detach().double()
            (dq,) = torch.autograd.grad(exact, b_q, dout[row].double())
            got, want = (result[0][row], dq) if is_backward else (result[row], exact.detach())
            worst = max(worst, float((got.detach().double() - want).abs().max() / want.abs().max()))
        return Check(worst, 2.0**-6, "fp64")

    return Setup(implementations, verify)


_AREA = SEQLEN * (SEQLEN + 1) / 2
for _is_backward, _name, _bound in ((False, "fwd", 1.04), (True, "bwd", 1.03)):
    register(
        Case(
            name=f"extensions/fa2_sink/{_name}/s{SEQLEN}",
            operator=f"attn_{_name}",
            setup=lambda is_backward=_is_backward: _sink_setup(is_backward),  # type: ignore[misc]
            params=dict(mask="causal", seqlen=SEQLEN, heads=HEADS, heads_kv=HEADS_KV, head_dim=DIM, dtype="bfloat16"),
            flops=(10.0 if _is_backward else 4.0) * _AREA * HEADS * DIM,
            device="cuda",
            bounds={"ratio:fa2": _bound},
        )
    )
    for _dim, _dim_v in ((128, 128), (576, 512)):
        _per_pair = (3 * _dim + 2 * _dim_v) * 2.0 if _is_backward else (_dim + _dim_v) * 2.0
        register(
            Case(
                name=f"extensions/dsa/{_name}/k{KEYS}_top{TOPK}_d{_dim}",
                operator=f"dsa_{_name}",
                setup=lambda b=_is_backward, d=_dim, e=_dim_v: _sparse_setup(b, d, e),  # type: ignore[misc]
                params=dict(
                    mask=f"top {TOPK} of {KEYS}", heads=SPARSE_HEADS, heads_kv=1, head_dim=_dim, head_dim_v=_dim_v
                ),
                flops=_per_pair * KEYS * TOPK * SPARSE_HEADS,
                device="cuda",
            )
        )
