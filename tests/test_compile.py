"""``torch.compile(fullgraph=True)`` over the distributed calls: new masks of the same local lengths compile nothing."""

from __future__ import annotations

from typing import Any

import magi_attention.api as api
import pytest
import torch
from magi_comm.groups import SingleCommunicator
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

HEADS, KV_HEADS, DIM = 4, 2, 8


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    api.clear_cache()


def keys_of_masks(comm: Any, number: int, total: int) -> list[api.DistAttnRuntimeKey]:
    """Keys of ``number`` different packings of ``total`` tokens."""
    keys = []
    for i in range(number):
        cut = 1 + i * (total - 2) // number
        keys.append(
            api.magi_attn_varlen_key([0, cut, total], [0, cut, total], HEADS, KV_HEADS, DIM, 0, comm, causal=True)
        )
    assert len(set(keys)) == number
    return keys


def step(x: Tensor, sink: Tensor, key: api.DistAttnRuntimeKey) -> Tensor:
    """A layer's worth of every call: whole tensor in, whole tensor out."""
    local = api.dispatch(x, key)
    position = api.get_position_ids(key, device=x.device)
    local = local * (1 + position.to(x.dtype)[:, None, None] * 1e-3)
    q, k, v = local, local[:, :KV_HEADS], local[:, KV_HEADS : 2 * KV_HEADS]
    out, meta = api.calc_attn(q, k.contiguous(), v.contiguous(), key, sink, softcap=3.0, return_max_logits=True)
    out = out + api.roll(out, 1, 0, key) * meta.lse.exp().clamp(max=1)[..., None] + meta.max_logits[:, None]
    return api.undispatch(out, key)


def run_step(call: Any, x: Tensor, sink: Tensor, key: Any) -> list[Tensor]:
    x, sink = x.clone().requires_grad_(), sink.clone().requires_grad_()
    out = call(x, sink, key)
    out.square().sum().backward()
    return [out.detach(), x.grad, sink.grad]


def compare_masks(comm: Any, number: int, backend: str) -> int:
    """Compiled against eager on ``number`` masks; returns how often was compiled."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    total = 61
    x = torch.randn(total, HEADS, DIM, generator=generator, dtype=torch.float64)
    sink = torch.randn(2, HEADS, generator=generator, dtype=torch.float64)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for key in keys_of_masks(comm, number, total):
        got, expected = run_step(compiled, x, sink, key), run_step(step, x, sink, key)
        for name, a, b in zip(("out", "dx", "dsink"), got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")
    return counter.frame_count


def test_twenty_masks_compile_once() -> None:
    assert compare_masks(SingleCommunicator(), 20, "aot_eager") == 1


def test_inductor_gives_the_same() -> None:
    assert compare_masks(SingleCommunicator(), 2, "inductor") == 1


def test_twenty_masks_compile_once_on_ranks(process_pool: Any) -> None:
    assert process_pool.run(compare_masks, 20, "aot_eager", world_size=2) == [1, 1]


def test_other_lengths_compile_once_more_and_then_never() -> None:
    comm = SingleCommunicator()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for total in (127, 129, 196, 257, 64):
        x = torch.randn(total, HEADS, DIM, dtype=torch.float64)
        sink = torch.randn(2, HEADS, dtype=torch.float64)
        (key,) = keys_of_masks(comm, 1, total)
        for a, b in zip(run_step(compiled, x, sink, key), run_step(step, x, sink, key), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert counter.frame_count <= 2  # the second length makes lengths dynamic


@pytest.mark.parametrize(
    "name", ["dispatch", "undispatch", "partial", "roll", "calc_attn", "calc_attn_permuted", "position_ids"]
)
def test_operators_hold_to_torchs_rules(name: str) -> None:
    comm = SingleCommunicator()
    key = api.magi_attn_flex_key([(0, 20)], [(0, 20)], "causal", 20, 20, 2, 1, 4, 0, comm)
    x = torch.randn(20, 2, 4, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(20, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sink = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    ops = torch.ops.magi_attention
    arguments: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "dispatch": (ops.dispatch, (x, key.handle, "q", 0.0, 20)),
        "undispatch": (ops.undispatch, (x, key.handle, "q", False, 20)),
        "partial": (ops.undispatch, (x, key.handle, "q", True, 20)),
        "roll": (ops.roll, (x, key.handle, "q", 3, 0, 0.0)),
        "calc_attn": (ops.calc_attn_fwd, (x, k, v, sink, key.handle, 0.5, 0.0, True)),
        "calc_attn_permuted": (
            ops.calc_attn_fwd,
            (
                x.detach().permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_(),
                k.detach().mT.contiguous().mT.requires_grad_(),
                v,
                None,
                key.handle,
                0.5,
                0.0,
                False,
            ),
        ),
        "position_ids": (ops.position_ids, (key.handle, "q", 20, torch.device("cpu"))),
    }
    operator, given = arguments[name]
    torch.library.opcheck(operator, given)


def test_operators_give_what_the_eager_path_gives() -> None:
    comm = SingleCommunicator()
    key = api.magi_attn_flex_key([(0, 20)], [(0, 20)], "causal", 20, 20, 2, 1, 4, 0, comm)
    leaves = [torch.randn(20, h, 4, requires_grad=True) for h in (2, 1, 1)]
    for wanted in ([0], [1], [2], [0, 2], [0, 1, 2]):
        eager_leaves = [x.detach().clone().requires_grad_(i in wanted) for i, x in enumerate(leaves)]
        other_leaves = [x.detach().clone().requires_grad_(i in wanted) for i, x in enumerate(leaves)]
        out, meta = api.calc_attn(*eager_leaves, key)
        same, lse, _ = torch.ops.magi_attention.calc_attn_fwd(*other_leaves, None, key.handle, 0.5, 0.0, False)
        (out.sum() + meta.lse.sum()).backward()
        (same.sum() + lse.sum()).backward()
        assert torch.equal(out, same)
        for a, b in zip(eager_leaves, other_leaves, strict=True):
            assert (a.grad is None) == (b.grad is None) and (a.grad is None or torch.equal(a.grad, b.grad))
