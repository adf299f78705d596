"""The fused Triton pair of magi_core.sink, in Triton's interpreter, against the plain torch form in float64."""

import pytest
import torch
from magi_core import sink as maths
from magi_core import sink_kernels

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or type(sink_kernels.sink_fwd_kernel).__name__ != "InterpretedFunction",
    reason="Triton's interpreter is off: there is a GPU, or Triton was imported before this package's tests",
)


def case(batch, seqlen, heads, dim, sinks, layout):
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    rows = batch * seqlen
    out, dout, lse, dlse = (
        make(rows, heads, dim),
        make(rows, heads, dim),
        make(batch, heads, seqlen),
        make(batch, heads, seqlen),
    )
    sink = make(sinks, heads) if layout == "sh" else make(rows, sinks, heads)
    lse[0, 0, 1] = -torch.inf  # a row without keys
    if heads > 1:
        sink[..., 1] = -torch.inf  # no sink; and a row with neither
        lse[0, 1, 2] = -torch.inf
    if heads > 2:
        sink[..., 0, 2] = torch.inf
    return out, dout, lse, dlse, sink


@pytest.mark.parametrize("layout", ["sh", "ssh"])
@pytest.mark.parametrize("shape", [(1, 5, 1, 8, 1), (2, 300, 3, 40, 2), (1, 70, 4, 256, 9)], ids=str)
def test_matches_torch(shape, layout):
    out, dout, lse, dlse, sink = case(*shape, layout)
    exact_out = out.double()
    exact_lse = maths.apply_sink_(exact_out, lse.double(), sink.double(), layout)
    strided = lse.transpose(1, 2).contiguous().transpose(1, 2)
    new_lse = sink_kernels.forward_correction(out, strided, sink, layout)
    torch.testing.assert_close(new_lse.double(), exact_lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.double(), exact_out, rtol=1e-5, atol=1e-6)
    for slope in (None, dlse):
        delta, dsink = sink_kernels.sink_backward(out, dout, new_lse, slope, sink, layout)
        wanted = maths.sink_gradient_of_output(
            *(exact_out, dout.double(), exact_lse, None if slope is None else slope.double(), sink.double(), layout)
        )
        for got, want in zip((delta, dsink), wanted):
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


def test_plus_infinity_of_a_library_is_a_row_without_keys():
    out, _, lse, _, sink = case(1, 5, 2, 8, 1, "sh")
    theirs = torch.where(lse == -torch.inf, torch.inf, lse)
    ours, other = out.clone(), out.clone()
    want = sink_kernels.forward_correction(ours, lse, sink, "sh")
    got = sink_kernels.forward_correction(other, theirs, sink, "sh", empty_is_plus_inf=True)
    assert torch.equal(got, want) and torch.equal(ours, other)
    assert (ours[1, 0] == 0).all() and got[0, 0, 1] == sink[0, 0]


def test_what_an_empty_row_holds_does_not_matter():
    out, _, lse, _, sink = case(1, 5, 2, 8, 1, "sh")
    out[1, 0] = torch.nan
    sink_kernels.forward_correction(out, lse, sink, "sh")
    assert (out[1, 0] == 0).all()
