"""torch.compile(fullgraph=True) of the public function, and the operators' own consistency (contract item 11)."""

import shutil

import magi_core.ops  # noqa: F401, registers the operators
import pytest
import torch
from magi_core import AttnMaskType, AttnRanges, FlexPlan
from magi_core.bands import Bands
from magi_core.flex_attn import flex_flash_attn_func
from magi_core.schemas import NAMESPACE, SCHEMAS
from torch._dynamo.testing import CompileCounterWithBackend

LENGTHS = (127, 129, 196, 257)


@pytest.fixture(autouse=True)
def fresh_compiler():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(before)


def inputs(total, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(total, h, 16, generator=generator).requires_grad_() for h in (4, 2, 2))
    ranges = torch.tensor([[0, total // 3], [total // 3, total]], dtype=torch.int32)
    return q, k, v, ranges, torch.tensor([1, 0], dtype=torch.int32)


def loss(q, k, v, ranges, types, sink):
    out, meta = flex_flash_attn_func(q, k, v, ranges, ranges, types, sink=sink, softcap=3.0, return_max_logits=True)
    return out.sin().sum() + meta.lse.cos().sum() + meta.max_logits.sum()


def gradients(function, *arguments):
    leaves = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
    value = function(*arguments)
    return (value, *torch.autograd.grad(value, leaves))


def test_dynamic_lengths_compile_once():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=counter)
    sink = torch.randn(2, 4, requires_grad=True)
    for total in LENGTHS:
        arguments = (*inputs(total), sink)
        for a, b in zip(gradients(compiled, *arguments), gradients(loss, *arguments), strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


def test_twenty_masks_compile_once():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    q, k, v, _, types = inputs(60)
    sink = torch.randn(2, 4, requires_grad=True)
    for cut in range(1, 21):
        ranges = torch.tensor([[0, cut], [cut, 60]], dtype=torch.int32)
        torch.testing.assert_close(compiled(q, k, v, ranges, types, sink), loss(q, k, v, ranges, types, sink))
    assert counter.frame_count == 1


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_default_compiler():
    compiled = torch.compile(loss, fullgraph=True)
    arguments = (*inputs(40), torch.randn(2, 4, requires_grad=True))
    for a, b in zip(gradients(compiled, *arguments), gradients(loss, *arguments), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("form", ["AttnRanges", "list", "enum", "plan tensor", "plan", "index"])
def test_forms_of_a_mask(form):
    q, k, v, ranges, _ = inputs(30)
    pairs = ranges.tolist()
    plan = FlexPlan.build(Bands.from_slices(pairs, pairs, [1, 0]), 30, 30)
    attn_ranges = AttnRanges.from_ranges(pairs)
    indices = torch.arange(30, dtype=torch.int32).reshape(30, 1, 1)

    def call(q, k, v):
        if form == "AttnRanges":
            return flex_flash_attn_func(q, k, v, attn_ranges, attn_ranges, [1, 0])[0].sum()
        if form == "list":
            return flex_flash_attn_func(q, k, v, pairs, pairs, ["causal", "full"])[0].sum()
        if form == "enum":
            return flex_flash_attn_func(q, k, v, pairs, pairs, AttnMaskType.CAUSAL)[0].sum()
        if form == "plan tensor":
            return flex_flash_attn_func(q, k, v, plan=plan.tensor())[0].sum()
        if form == "plan":
            return flex_flash_attn_func(q, k, v, plan=plan)[0].sum()
        return flex_flash_attn_func(q, k[:, :1], v[:, :1], index_attn_indices=indices, softcap=1.0)[0].sum()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(compiled, q, k, v), gradients(call, q, k, v), strict=True):
        torch.testing.assert_close(a, b)


def test_errors_of_values_arrive_from_a_compiled_graph():
    q, k, v, ranges, types = inputs(30)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"q_ranges\[1\] must lie inside the 30 tokens of q"):
        compiled(q, k, v, ranges + torch.tensor([[0, 0], [0, 1]], dtype=torch.int32), types, None)


@pytest.mark.parametrize(
    "pairs, error",
    [([[0, 9.5]], TypeError), ([[0, 1, 2, 3]], ValueError), ([[0, 1], [0, 2**31]], ValueError)],
    ids=["float", "four", "large"],
)
def test_lists_of_ranges_are_checked_when_compiled(pairs, error):
    q, k, v, _, _ = inputs(30)
    with pytest.raises(error, match="q_ranges"):
        torch.compile(flex_flash_attn_func, backend="aot_eager")(q, k, v, pairs, pairs)


def score(sink, layout="sh"):
    return sink, layout, 0.25, 0.0


def test_operators_pass_opcheck():
    q, k, v, ranges, types = inputs(20)
    sink = torch.randn(2, 4, requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    ops = torch.ops.magi_core
    arguments = (q, k, v, ranges, ranges, types, None, *score(sink), False, True, False, 0, "")
    torch.library.opcheck(ops.flex_attn_fwd, arguments, test_utils=checks)
    indices = torch.randint(0, 20, (20, 4), dtype=torch.int32)
    listed = (q, k[:, :1].detach(), v[:, :1].detach(), indices, *score(None), False)
    torch.library.opcheck(ops.index_attn_fwd, listed, test_utils=checks)
    with torch.no_grad():
        q, k, v, sink = (x.detach() for x in (q, k, v, sink))
        out, lse, _ = ops.flex_attn_fwd(q, k, v, ranges, ranges, types, None, *score(sink), False, False, False, 0, "")
        mask = (ranges, ranges, types, None)
        backward = (out, lse, q, k, v, out, lse, *mask, *score(sink), False, False, 0, "")
        torch.library.opcheck(ops.flex_attn_bwd, backward, test_utils=("test_schema", "test_faketensor"))
        listed = (out, None, q, k[:, :1], v[:, :1], out, lse, indices, *score(None))
        torch.library.opcheck(ops.index_attn_bwd, listed, test_utils=("test_schema", "test_faketensor"))
        plan = FlexPlan.build(Bands.from_slices(ranges, ranges, types), 20, 20).tensor()
        acc, largest = torch.zeros_like(out), torch.full((4,), -torch.inf)
        stage = (out, acc, lse, largest, q, k, v, plan, *score(sink), 0, "")
        torch.library.opcheck(ops.flex_attn_fwd_stage, stage, test_utils=("test_schema", "test_faketensor"))
        stage = (torch.zeros(4, 20, 16), torch.zeros_like(k), torch.zeros_like(v), out, q, k, v, lse, lse, plan)
        stage = (*stage, 0.25, 0.0, False, 0, "")
        torch.library.opcheck(ops.flex_attn_bwd_stage, stage, test_utils=("test_schema", "test_faketensor"))


def test_stage_operators_equal_the_whole():
    q, k, v, ranges, types = (x.detach() for x in inputs(20))
    plan = FlexPlan.build(Bands.from_slices(ranges, ranges, types), 20, 20).tensor()
    expected, lse, _ = torch.ops.magi_core.flex_attn_fwd(
        *(q, k, v, ranges, ranges, types, None), *score(None), False, False, False, 0, ""
    )
    out, acc, found = torch.empty_like(expected), torch.empty_like(expected), torch.empty_like(lse)
    torch.ops.magi_core.flex_attn_fwd_stage(out, acc, found, None, q, k, v, plan, *score(None), 0, "")
    assert torch.equal(out, expected) and torch.equal(found, lse)


def test_every_schema_is_registered():
    for name in SCHEMAS:
        assert hasattr(getattr(torch.ops, NAMESPACE), name)


def test_double_backward_is_refused():
    q, k, v, ranges, types = inputs(20)
    gradient = torch.autograd.grad(loss(q, k, v, ranges, types, None), q, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="differentiable once.*double backward"):
        gradient.sum().backward()
    out, *_ = torch.ops.magi_core.flex_attn_fwd(
        *(q, k, v, ranges, ranges, types, None), *score(None), False, False, False, 0, ""
    )
    gradient = torch.autograd.grad(out.sum(), q, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="differentiable once.*double backward"):
        gradient.sum().backward()
