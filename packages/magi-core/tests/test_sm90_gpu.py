"""The compiled Hopper kernels through the public function, against fp64. Needs a Hopper GPU and the wheel."""

from __future__ import annotations

import importlib.util

import pytest

torch = pytest.importorskip("torch")

from magi_core import flex_flash_attn_func  # noqa: E402
from magi_core.testing import masks  # noqa: E402
from magi_core.testing.budget import assert_within_budget  # noqa: E402
from magi_core.testing.reference import reference_attention, same_precision_attention  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
    pytest.mark.skipif(importlib.util.find_spec("magi_core_sm90") is None, reason="needs the magi-core-sm90 wheel"),
]


def _check(slices, total_q, total_k, heads_q, heads_kv, dim, dtype=torch.bfloat16, sink=False, **score):
    """out, lse and every gradient of a case, both gradients arriving."""
    torch.manual_seed(0)
    q = torch.randn(total_q, heads_q, dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(total_k, heads_kv, dim, device="cuda", dtype=dtype) for _ in range(2))
    leaves = [q, k, v]
    if sink:
        leaves.append(torch.randn(2, heads_q, device="cuda"))
    dout, dlse = torch.randn_like(q), torch.randn(total_q, heads_q, device="cuda")
    ranges = [[s[0:2] for s in slices], [s[2:4] for s in slices], [s[4] for s in slices]]

    def ours(q, k, v, s):
        out, meta = flex_flash_attn_func(q, k, v, *ranges, sink=s, **score)
        return out, meta.lse

    def reference(q, k, v, s):
        return reference_attention(q, k, v, slices, sink=s, **score)[:2]

    def plain(q, k, v, s):
        return same_precision_attention(q, k, v, slices, sink=s, **score)[:2]

    def results(attend, cast):
        inputs = [cast(x).detach().requires_grad_() for x in leaves]
        out, lse = attend(*inputs[:3], inputs[3] if sink else None)
        seen = lse.isfinite()
        loss = (out.double() * dout.double()).sum() + (lse.double() * dlse.double())[seen].sum()
        names = ("out", "lse", "dq", "dk", "dv", "dsink")
        return dict(zip(names, (out, lse, *torch.autograd.grad(loss, inputs))))

    got = results(ours, lambda x: x)
    same, exact = results(plain, lambda x: x), results(reference, lambda x: x.double())
    for name in ("out", "dq", "dk", "dv"):
        assert_within_budget(got[name], same[name], exact[name], name=name)
    torch.testing.assert_close(got["lse"].double(), exact["lse"], atol=3e-3, rtol=1e-4)
    if sink:
        torch.testing.assert_close(got["dsink"].double(), exact["dsink"], atol=5e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [8, 31, 64, 100, 128])
def test_head_dims(dim, dtype):
    _check([(0, 300, 0, 500, 1)], 300, 500, 6, 2, dim, dtype)


@pytest.mark.parametrize("kind", [*masks.KINDS, *masks.ODD])
def test_mask_suite(kind):
    _check(masks.make(kind, 1500, window=200, block=256), 1500, 1500, 4, 2, 128)


@pytest.mark.parametrize("seed", range(20))
def test_random_bands(seed):
    _check(masks.random_bands(700, 900, 8, seed=seed), 700, 900, 3, 1, 64)


def test_softcap_sink_and_scale():
    _check([(0, 200, 0, 300, 1)], 400, 300, 4, 2, 128, softcap=15.0)
    _check([(0, 200, 0, 300, 1)], 400, 300, 4, 2, 128, sink=True)
    _check([(0, 200, 0, 300, 1)], 400, 300, 4, 2, 128, softmax_scale=-0.05)


def test_operands_that_need_a_copy():
    """A base off 16 bytes and a stride that is no multiple of them."""
    wide = torch.randn(200, 3, 130, device="cuda", dtype=torch.bfloat16)
    q, k, v = (wide[:, :, i : i + 128] for i in range(3))
    out, _ = flex_flash_attn_func(q, k, v, [[0, 200]], [[0, 200]], [1])
    again, _ = flex_flash_attn_func(*(x.contiguous() for x in (q, k, v)), [[0, 200]], [[0, 200]], [1])
    assert torch.equal(out, again)


def test_expanded_gradient():
    q = torch.randn(200, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out, _ = flex_flash_attn_func(q, q, q, [[0, 200]], [[0, 200]], [1])
    (ours,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    (want,) = torch.autograd.grad(out, q, torch.ones_like(out))
    assert torch.allclose(ours.float(), want.float(), atol=1e-2)


def test_forward_is_bitwise_repeatable():
    q, k, v = (torch.randn(3000, h, 128, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
    first, meta = flex_flash_attn_func(q[:100], k, v, [[0, 100]], [[0, 3000]], [0])  # split along the keys
    for _ in range(30):
        out, other = flex_flash_attn_func(q[:100], k, v, [[0, 100]], [[0, 3000]], [0])
        assert torch.equal(out, first) and torch.equal(other.lse, meta.lse)


def test_deterministic_backward_is_refused_by_name():
    q = torch.randn(64, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out, _ = flex_flash_attn_func(q, q, q, [[0, 64]], [[0, 64]], [1], deterministic=True)
    with pytest.raises(NotImplementedError, match="deterministic=True"):
        out.sum().backward()


def test_replays_under_a_graph():
    q, k, v = (torch.randn(500, h, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
    out, _ = flex_flash_attn_func(q, k, v, [[0, 500]], [[0, 500]], [1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = flex_flash_attn_func(q, k, v, [[0, 500]], [[0, 500]], [1])
    q.copy_(torch.randn_like(q))
    graph.replay()
    want, _ = flex_flash_attn_func(q, k, v, [[0, 500]], [[0, 500]], [1])
    assert torch.equal(captured, want) and not torch.equal(out, want)
