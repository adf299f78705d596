"""Particular distributed cases that went wrong somewhere, each by name, and properties over random ones."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import magi_attention.api as api
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from magi_attention.api import DispatchConfig, DistAttnConfig, OverlapConfig, SequentialDispatchAlg
from magi_comm.testing import ThreadWorld
from magi_core.mask import Mask
from magi_core.testing import masks, reference_attention
from torch import Tensor

WORLDS = {n: ThreadWorld(n) for n in range(1, 9)}
HEADS, KV_HEADS, DIM = 3, 1, 4
SEQUENTIAL = DistAttnConfig(dispatch_config=DispatchConfig(alg=SequentialDispatchAlg()))


@pytest.fixture(autouse=True)
def forget_plans() -> Any:
    yield
    api.clear_cache()


def inputs(total_q: int, total_k: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (total_q, HEADS, DIM), "k": (total_k, KV_HEADS, DIM), "v": (total_k, KV_HEADS, DIM)}
    shapes |= {"sink": (2, HEADS), "dout": (total_q, HEADS, DIM), "dlse": (total_q, HEADS)}
    return {name: torch.randn(*shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def reference(x: dict[str, Tensor], slices: Any, *, sink: bool) -> list[Tensor]:
    leaves = [x[n].clone().requires_grad_() for n in (("q", "k", "v", "sink") if sink else ("q", "k", "v"))]
    out, lse, _ = reference_attention(*leaves[:3], slices, sink=leaves[3] if sink else None)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (x["dout"], x["dlse"]))]


def on_rank(comm: Any, x: dict[str, Tensor], mask: Any, config: DistAttnConfig, *, sink: bool) -> list[Tensor]:
    key = api.magi_attn_flex_key(
        mask, None, None, mask.total_q, mask.total_k, HEADS, KV_HEADS, DIM, 0, comm, config, allow_overlap=True
    )
    roles = {"q": "q", "k": "k", "v": "k"}
    leaves = [api.dispatch(x[n], key, role=r).requires_grad_() for n, r in roles.items()]
    sinks = [x["sink"].clone().requires_grad_()] if sink else []
    out, meta = api.calc_attn(*leaves, key, *sinks)
    weights = api.dispatch(x["dout"], key), api.dispatch(x["dlse"], key)
    grads = torch.autograd.grad((out, meta.lse), leaves + sinks, weights)
    whole = [api.undispatch(t, key, role=r) for t, r in zip(grads, roles.values(), strict=False)]
    return [api.undispatch(out, key).detach(), api.undispatch(meta.lse, key).detach(), *whole, *grads[3:]]


def assert_like_one_rank(
    world: int, slices: Any, total_q: int, total_k: int, config: DistAttnConfig, *, sink: bool = False, seed: int = 0
) -> None:
    x = inputs(total_q, total_k, seed)
    mask = Mask.from_slices(
        [s[:2] for s in slices], [s[2:4] for s in slices], [s[4] for s in slices], total_q=total_q, total_k=total_k
    )
    expected = reference(x, slices, sink=sink)
    results = WORLDS[world].run(on_rank, x, mask, config, sink=sink)
    for result in results:
        for got, wanted in zip(result[:5], expected[:5], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    if sink:
        torch.testing.assert_close(sum(r[5] for r in results), expected[5], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("lengths", [[4, 3], [7], [1]], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("causal", [False, True])
def test_tiny_documents(lengths: list[int], world: int, causal: bool) -> None:
    slices = [(a, b, a, b, int(causal)) for a, b in pairwise(accumulate(lengths, initial=0))]
    for config in (DistAttnConfig(), SEQUENTIAL, DistAttnConfig(dispatch_config=DispatchConfig(uneven_shard=True))):
        assert_like_one_rank(world, slices, sum(lengths), sum(lengths), config, sink=True)


@pytest.mark.parametrize("masked_rank", range(4))
def test_a_rank_that_sees_nothing_and_that_nobody_sees(masked_rank: int) -> None:
    here = range(4 * masked_rank, 4 * masked_rank + 4)
    slices = [
        (q, q + 4, k, k + 4, 0) for q in range(0, 16, 4) for k in range(0, 16, 4) if q not in here and k not in here
    ]
    assert_like_one_rank(4, slices, 16, 16, SEQUENTIAL, sink=True)


@pytest.mark.parametrize("masked_rank", range(4))
def test_a_rank_whose_queries_see_nothing_still_serves_keys(masked_rank: int) -> None:
    a = 4 * masked_rank
    slices = [(0, a, 0, 16, 0), (a + 4, 16, 0, 16, 0)]
    for degree in (0, 1, 3):
        config = DistAttnConfig(
            dispatch_config=DispatchConfig(alg=SequentialDispatchAlg()),
            overlap_config=OverlapConfig(degree=degree, min_chunk_size=1),
        )
        assert_like_one_rank(4, slices, 16, 16, config, sink=True)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("totals", [(0, 0), (5, 0), (0, 5), (1, 6)], ids=str)
def test_empty_sequences(world: int, totals: tuple[int, int]) -> None:
    total_q, total_k = totals
    slices = [(0, total_q, 0, total_k, 0)] if total_q and total_k else []
    assert_like_one_rank(world, slices, total_q, total_k, DistAttnConfig(), sink=True)


def test_a_mask_without_any_pair() -> None:
    assert_like_one_rank(3, [], 10, 10, DistAttnConfig(), sink=True)
    assert_like_one_rank(3, [(0, 10, 0, 5, 3)], 10, 10, DistAttnConfig())  # bi-causal with more rows than columns


def test_pairs_covered_twice_count_twice_where_allowed() -> None:
    assert_like_one_rank(3, [(0, 20, 0, 20, 1), (10, 20, 0, 5, 0)], 20, 20, DistAttnConfig(), sink=True)


def test_every_placement_algorithm_and_overlap_algorithm_gives_the_same() -> None:
    slices = masks.make("varlen_causal", 96)
    algorithms = [
        api.BalancedDispatchAlg(),
        api.BalancedDispatchAlg(balance_slack=0.2),
        api.MinHeapDispatchAlg(),
        api.LBDispatchAlg(),
        api.DPDispatchAlg(),
        api.SequentialDispatchAlg(),
        api.SortedSequentialSelectAlg(),
        api.SortedSequentialSelectAlg(allocation_ratio=0.5),
        api.ToppHeapDispatchAlg(top_p=0.5),
        api.BSDispatchAlg(),
    ]
    for algorithm in algorithms:
        config = DistAttnConfig(
            dispatch_config=DispatchConfig(chunk_size=4, alg=algorithm),
            overlap_config=OverlapConfig(degree=2, min_chunk_size=1),
        )
        assert_like_one_rank(3, slices, 96, 96, config)
    for overlap in (api.GreedyOverlapAlg(), api.UniformOverlapAlg(random_costs=True, random_seed=42)):
        config = DistAttnConfig(overlap_config=OverlapConfig(degree=3, min_chunk_size=1, alg=overlap))
        assert_like_one_rank(4, slices, 96, 96, config)


@st.composite
def problems(draw: Any) -> tuple[Any, ...]:
    total_q, total_k = draw(st.integers(1, 90)), draw(st.integers(1, 90))
    if draw(st.booleans()):
        total_k = total_q
    slices = masks.random_bands(total_q, total_k, draw(st.integers(0, 12)), seed=draw(st.integers(0, 10**6)))
    config = DistAttnConfig(
        dispatch_config=DispatchConfig(
            chunk_size=draw(st.sampled_from([None, 1, 3])), uneven_shard=draw(st.booleans())
        ),
        overlap_config=OverlapConfig(
            degree=draw(st.sampled_from([0, 1, 2, 5, None])),
            min_chunk_size=draw(st.integers(1, 20)),
            max_num_chunks=draw(st.integers(1, 9)),
        ),
    )
    return draw(st.integers(1, 6)), slices, total_q, total_k, config


@given(problem=problems(), sink=st.booleans(), seed=st.integers(0, 99))
def test_any_world_any_mask_any_options(problem: tuple[Any, ...], sink: bool, seed: int) -> None:
    assert_like_one_rank(*problem, sink=sink, seed=seed)
    api.clear_cache()


@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6), world=st.integers(1, 5), order=st.randoms())
def test_permuting_documents_permutes_the_result(lengths: list[int], world: int, order: Any) -> None:
    total = sum(lengths)
    bounds = list(pairwise(accumulate(lengths, initial=0)))
    shuffled = list(range(len(lengths)))
    order.shuffle(shuffled)
    x = inputs(total, total)
    tokens = torch.cat([torch.arange(*bounds[i]) for i in shuffled])
    moved = {n: t if n == "sink" else t[tokens] for n, t in x.items()}
    first = Mask.documents(lengths, causal=True)
    second = Mask.documents([lengths[i] for i in shuffled], causal=True)
    a = WORLDS[world].run(on_rank, x, first, DistAttnConfig(), sink=False)[0]
    b = WORLDS[world].run(on_rank, moved, second, DistAttnConfig(), sink=False)[0]
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left[tokens], right, rtol=1e-11, atol=1e-11)
    api.clear_cache()
