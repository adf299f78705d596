"""One attention problem with its inputs, its exact results, and the check of an implementation against them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .budget import assert_within_budget
from .masks import Slice
from .reference import dense_counts, reference_attention, same_precision_attention

__all__ = ["AttentionCase", "check_attention"]

# What an implementation gives: out, lse, max_logits (or None).
Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], "tuple[Tensor, Tensor, Tensor | None]"]


@dataclass(frozen=True)
class AttentionCase:
    """Sizes and options of one problem; the inputs follow from ``seed``.

    Keys that no slice covers hold NaN in k and v (``is_poisoned``), as the contract allows.
    """

    slices: Sequence[Slice]
    total_q: int
    total_k: int
    num_heads_q: int = 2
    num_heads_kv: int = 1
    head_dim: int = 16
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    sink_layout: str | None = None
    num_sinks: int = 2
    softmax_scale: float | None = None
    softcap: float = 0.0
    is_poisoned: bool = True
    seed: int = 0

    def ranges(self) -> tuple[Tensor, Tensor, Tensor]:
        """``q_ranges (n, 2)``, ``k_ranges (n, 2)``, ``attn_type_map (n,)``, int32."""
        table = torch.tensor(list(self.slices), dtype=torch.int32).reshape(-1, 5)
        return table[:, 0:2].contiguous(), table[:, 2:4].contiguous(), table[:, 4].contiguous()

    def options(self) -> dict[str, Any]:
        """Keywords of the score."""
        return {
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
            "sink_layout": self.sink_layout or "sh",
        }

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """``q, k, v, sink`` (leaves that require gradients), and the gradients ``dout, dlse``."""
        generator = torch.Generator().manual_seed(self.seed)
        lse_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        head_dim_v = self.head_dim_v or self.head_dim

        def draw(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(self.device)

        q = draw(self.total_q, self.num_heads_q, self.head_dim)
        k = draw(self.total_k, self.num_heads_kv, self.head_dim)
        v = draw(self.total_k, self.num_heads_kv, head_dim_v)
        if self.is_poisoned:
            uncovered = (dense_counts(self.slices, self.total_q, self.total_k) == 0).all(0).to(self.device)
            k[uncovered] = torch.nan
            v[uncovered] = torch.nan
        sink = None
        if self.sink_layout == "sh":
            sink = draw(self.num_sinks, self.num_heads_q, dtype=torch.float32)
        elif self.sink_layout == "ssh":
            sink = draw(self.total_q, self.num_sinks, self.num_heads_q, dtype=torch.float32)
        dout = draw(self.total_q, self.num_heads_q, head_dim_v)
        dlse = draw(self.total_q, self.num_heads_q, dtype=lse_dtype)
        for x in (q, k, v, sink):
            if x is not None:
                x.requires_grad_()
        return q, k, v, sink, dout, dlse


def _results(case: AttentionCase, attend: Attend, *, as_double: bool) -> dict[str, Tensor]:
    q, k, v, sink, dout, dlse = case.tensors()
    if as_double:
        q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
        sink = None if sink is None else sink.detach().double().requires_grad_()
    out, lse, max_logits = attend(q, k, v, sink)
    torch.autograd.backward([out, lse], [dout.to(out.dtype), torch.where(lse.isfinite(), dlse, 0.0).to(lse.dtype)])
    found = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad, "max_logits": max_logits}
    if sink is not None:
        found["dsink"] = sink.grad
    return {name: torch.zeros(0) if x is None else x.detach().cpu() for name, x in found.items()}


def _sink_gradient_of_rounded(case: AttentionCase, baseline: dict[str, Tensor]) -> Tensor:
    """dsink by contract item 7 in plain torch, from the out and lse that the baseline gives (out is rounded)."""
    _, _, _, sink, dout, dlse = (x if x is None else x.detach().cpu() for x in case.tensors())
    assert sink is not None and dout is not None and dlse is not None
    lse = baseline["lse"]
    slope = torch.where(lse.isfinite(), dlse, 0.0) - (baseline["out"].float() * dout.float()).sum(2)
    logits = sink[None] if case.sink_layout == "sh" else sink
    gradient = torch.exp(logits - lse[:, None]) * slope[:, None]
    return (gradient.sum(0) if case.sink_layout == "sh" else gradient).to(sink.dtype)


def check_attention(case: AttentionCase, attend: Attend, *, has_max_logits: bool = True) -> None:
    """Compare out, lse, max_logits, dq, dk, dv and dsink of ``attend`` with the reference.

    float64 must agree to 1e-10, other dtypes within the budget of contract item 9.

    Raises:
        AssertionError: naming the tensor.
    """
    options = case.options()
    got = _results(case, attend, as_double=False)
    exact = _results(
        case, lambda q, k, v, sink: reference_attention(q, k, v, case.slices, sink=sink, **options), as_double=True
    )
    names = [name for name in exact if has_max_logits or name != "max_logits"]
    if case.dtype == torch.float64:
        for name in names:
            assert got[name].shape == exact[name].shape, name
            torch.testing.assert_close(
                got[name].double(),
                exact[name],
                rtol=1e-10 if got[name].dtype == torch.float64 else 1e-6,  # dsink is float32
                atol=1e-10 if got[name].dtype == torch.float64 else 1e-6,
                msg=partial("{}: {}".format, name),
            )
        return
    baseline = _results(
        case,
        lambda q, k, v, sink: same_precision_attention(q, k, v, case.slices, sink=sink, **options),
        as_double=False,
    )
    if case.sink_layout is not None:
        # Every kernel that saves only out and lse computes dsink from the rounded out: so does its baseline.
        baseline["dsink"] = _sink_gradient_of_rounded(case, baseline)
    for name in names:
        rounding = case.dtype if name == "dsink" else None
        assert_within_budget(got[name], baseline[name], exact[name], name=name, rounding=rounding)
