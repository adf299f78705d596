"""Cases of the distributed pipeline, what a rank does in one, and what one rank alone says about it.

Imported by tests and by their worker processes; knows nothing of pytest.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import magi_attention.api as api
import torch
from magi_attention.config import DispatchConfig, DistAttnConfig, OverlapConfig
from magi_core.testing import masks, reference_attention, same_precision_attention
from torch import Tensor

WORLD_SIZES = (1, 2, 3, 4, 5, 6, 7, 8)
TOTALS = (7, 1000, 4097)
OVERLAPS = ("0", "1", "2", "3", "4", "auto")
MASKS = (*masks.KINDS, "prefix_tree", "random_bands", "blind_rows", "cross")
VARIANTS = ("plain", "sink", "gqa_softcap", "uneven", "small_chunks")
Slice = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Case:
    """One point of the matrix. Every field can be filtered from the environment (``env_filter``).

    Attributes:
        mask: a name of ``MASKS``. total: query tokens; ``cross`` has another number of keys.
        overlap: degree of overlap, or auto.
        variant: plain; sink (with gradients into lse); gqa_softcap (ratio 3, another head dim of values, max_logits);
            uneven (shards without padding); small_chunks (many runs of tokens per rank).
    """

    world_size: int
    mask: str
    total: int
    overlap: str
    variant: str
    dtype: str = "float64"
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.mask}-{self.total}-w{self.world_size}-o{self.overlap}-{self.variant}-{self.dtype}"

    @property
    def total_k(self) -> int:
        return self.total // 2 + 3 if self.mask == "cross" else self.total

    @property
    def num_heads(self) -> tuple[int, int]:
        if self.dtype != "float64":  # dsink has one independent error per head: a budget needs many to mean something
            return (18, 6) if self.variant == "gqa_softcap" else (16, 8)
        return (6, 2) if self.variant == "gqa_softcap" else (2, 1) if self.total > 2000 else (2, 2)

    @property
    def head_dims(self) -> tuple[int, int]:
        return (8, 12) if self.variant == "gqa_softcap" else (8, 8)

    @property
    def softcap(self) -> float:
        return 1.5 if self.variant == "gqa_softcap" else 0.0

    @property
    def has_sink(self) -> bool:
        return self.variant == "sink"

    @property
    def has_dlse(self) -> bool:
        return self.variant in ("sink", "uneven")

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def slices(self) -> list[Slice]:
        return slices_of(self.mask, self.total, self.total_k)

    @property
    def config(self) -> DistAttnConfig:
        smallest_piece = max(1, self.total // 64)  # so that small totals have several stages too
        degree = None if self.overlap == "auto" else int(self.overlap)
        chunk_size = max(1, self.total // 50) if self.variant == "small_chunks" else None
        dispatch = DispatchConfig(chunk_size=chunk_size, uneven_shard=self.variant == "uneven")
        return DistAttnConfig(
            dispatch_config=dispatch, overlap_config=OverlapConfig(degree=degree, min_chunk_size=smallest_piece)
        )


def slices_of(mask: str, total: int, total_k: int) -> list[Slice]:
    """Slices of a named mask."""
    if mask == "random_bands":
        return masks.random_bands(total, total_k, 24, seed=total)
    if mask == "blind_rows":  # the first third sees nothing, then causal documents, then a tail that sees nothing
        a, b, c = total // 3, total // 2, total - total // 5
        return [(a, b, a, b, 1), (b, c, b, c, 1)]
    if mask == "cross":  # two thirds of the queries see all keys, the rest a band of them
        cut = 2 * total // 3
        return [(0, cut, 0, total_k, 0), (cut, total, total_k // 4, total_k, 1)]
    return masks.make(mask, total, window=max(1, total // 8), block=max(1, total // 16))


def covering_cases(seed: int = 0) -> list[Case]:
    """A set in which every two values of different dimensions meet (but for the sizes that are only slow).

    Greedy: keep drawing candidates and take the one that meets most pairs not met yet.
    """
    draw = random.Random(seed)
    dims: tuple[Sequence[Any], ...] = (WORLD_SIZES, MASKS, TOTALS, OVERLAPS, VARIANTS)

    def pairs(values: Sequence[Any]) -> set[Any]:
        return {((i, values[i]), (j, values[j])) for i, j in itertools.combinations(range(len(dims)), 2)}

    missing = {
        ((i, x), (j, y)) for i, j in itertools.combinations(range(len(dims)), 2) for x in dims[i] for y in dims[j]
    }
    cases = []
    while missing:
        (i, x), (j, y) = min(missing, key=str)
        candidates = []
        for _ in range(12):
            values = [draw.choice(d) for d in dims]
            values[i], values[j] = x, y
            candidates.append(values)
        best = max(candidates, key=lambda v: len(pairs(v) & missing))
        missing -= pairs(best)
        cases.append(Case(*best))
    return cases


def every_case() -> list[Case]:
    """The full product."""
    return [Case(*values) for values in itertools.product(WORLD_SIZES, MASKS, TOTALS, OVERLAPS, VARIANTS)]


def tensors_of(case: Case) -> dict[str, Tensor]:
    """Global inputs and output gradients, equal in every process."""
    generator = torch.Generator().manual_seed(
        hash_of(f"{case.mask}-{case.total}-{_same_problem(case.variant)}") + case.seed
    )
    (hq, hk), (d, dv) = case.num_heads, case.head_dims

    def normal(*shape: int, dtype: torch.dtype = case.torch_dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    wide = torch.float64 if case.torch_dtype == torch.float64 else torch.float32
    tensors = {
        "q": normal(case.total, hq, d),
        "k": normal(case.total_k, hk, d),
        "v": normal(case.total_k, hk, dv),
        "dout": normal(case.total, hq, dv),
        "dlse": normal(case.total, hq, dtype=wide),
    }
    if case.has_sink:
        # Low precision: sinks of like size, so that the largest error is over many heads, not over the luckless one.
        tensors["sink"] = normal(3, hq, dtype=wide) * (1.0 if case.dtype == "float64" else 0.1)
    return tensors


def hash_of(text: str) -> int:
    """The same in every process, unlike ``hash``."""
    return int.from_bytes(text.encode()[-7:], "little") ^ len(text)


def make_key(case: Case, group: Any) -> api.DistAttnRuntimeKey:
    """The case's key, with ranges in one of the accepted forms."""
    q = [(a, b) for a, b, _, _, _ in case.slices]
    k = [(c, d) for _, _, c, d, _ in case.slices]
    types = [api.AttnMaskType.from_int_type(t) for *_, t in case.slices]
    return api.magi_attn_flex_key(
        q,
        k,
        types,
        case.total,
        case.total_k,
        *case.num_heads,
        case.head_dims[0],
        0,
        group,
        case.config,
    )


def run_rank(comm: Any, case: Case, tensors: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """What a program does: key, dispatch, attend, undispatch, backward. Returns global tensors (every rank the same,
    but ``dsink``, which is the rank's share) and ``max_logits``."""
    tensors = tensors_of(case) if tensors is None else tensors
    key = make_key(case, comm)
    local = {
        "q": api.dispatch(tensors["q"], key).requires_grad_(),
        "k": api.dispatch(tensors["k"], key, role="k").requires_grad_(),
        "v": api.dispatch(tensors["v"], key, role="k").requires_grad_(),
    }
    sink = tensors["sink"].clone().requires_grad_() if case.has_sink else None
    # Padding holds garbage in real programs: a gradient there must change nothing.
    dout = api.dispatch(tensors["dout"], key, pad_value=3.0)
    dlse = api.dispatch(tensors["dlse"], key, pad_value=5.0)
    wants_max = case.variant == "gqa_softcap"
    out, meta = api.calc_attn(
        local["q"], local["k"], local["v"], key, sink, softcap=case.softcap, return_max_logits=wants_max
    )
    inputs = [*local.values(), *([sink] if sink is not None else [])]
    outputs, gradients = ((out, meta.lse), (dout, dlse)) if case.has_dlse else ((out,), (dout,))
    dq, dk, dv, *dsink = torch.autograd.grad(outputs, inputs, gradients)
    result = {
        "out": api.undispatch(out, key),
        "lse": api.undispatch(meta.lse, key),
        "dq": api.undispatch(dq, key),
        "dk": api.undispatch(dk, key, role="k"),
        "dv": api.undispatch(dv, key, role="k"),
    }
    if dsink:
        result["dsink"] = dsink[0]
    if wants_max:
        result["max_logits"] = meta.max_logits
    return {name: value.detach() for name, value in result.items()}


def _differentiate(case: Case, attend: Any, dtype: torch.dtype | None) -> dict[str, Tensor]:
    given = tensors_of(case)
    tensors = given if dtype is None else {name: x.to(dtype) for name, x in given.items()}
    leaves = {name: tensors[name].requires_grad_() for name in ("q", "k", "v", "sink") if name in tensors}
    out, lse, max_logits = attend(leaves)
    outputs, gradients = (
        ((out, lse), (tensors["dout"], tensors["dlse"])) if case.has_dlse else ((out,), (tensors["dout"],))
    )
    grads = torch.autograd.grad(outputs, list(leaves.values()), gradients)
    result = {"out": out, "lse": lse, **{f"d{name}": g for name, g in zip(leaves, grads, strict=True)}}
    if case.variant == "gqa_softcap":
        result["max_logits"] = max_logits
    return {name: value.detach() for name, value in result.items()}


@lru_cache(maxsize=64)
def _exact(case: Case) -> dict[str, Tensor]:
    if case.total <= 1000:

        def attend(x: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            return reference_attention(x["q"], x["k"], x["v"], case.slices, softcap=case.softcap, sink=x.get("sink"))
    else:

        def attend(x: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            q = torch.tensor([s[:2] for s in case.slices], dtype=torch.int32)
            k = torch.tensor([s[2:4] for s in case.slices], dtype=torch.int32)
            types = torch.tensor([s[4] for s in case.slices], dtype=torch.int32)
            out, meta = api.flex_flash_attn_func(
                x["q"],
                x["k"],
                x["v"],
                q,
                k,
                types,
                sink=x.get("sink"),
                softcap=case.softcap,
                return_max_logits=True,
            )
            return out, meta.lse, meta.max_logits

    return _differentiate(case, attend, torch.float64)


def exact(case: Case) -> dict[str, Tensor]:
    """One rank in float64: the dense reference, or, where that is too large, the one-device operator, which is held to
    the dense reference by its own tests."""
    return _exact(Case(1, case.mask, case.total, "1", _same_problem(case.variant), case.dtype, case.seed))


def _same_problem(variant: str) -> str:
    return "plain" if variant == "small_chunks" else variant


def same_precision(case: Case) -> dict[str, Tensor]:
    """Plain torch in the precision of the case: what a budget is measured with."""

    def attend(x: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return same_precision_attention(x["q"], x["k"], x["v"], case.slices, softcap=case.softcap, sink=x.get("sink"))

    return _differentiate(case, attend, None)
