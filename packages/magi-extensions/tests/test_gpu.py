"""On a GPU: FlashAttention-2 inside torch with sink, and the Triton kernels, against float64."""

import pytest
import torch
from magi_attn_extensions import dsa_attn_func, fa2_func_with_sink, fa2_varlen_func_with_sink, provider, use_provider
from magi_attn_extensions.dsa import indexer_scores, lightning_indexer
from magi_core.testing import assert_within_budget, reference_attention, same_precision_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def make(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)


def compare(got, leaves, attend, weight, slope, names=("out", "lse", "dq", "dk", "dv", "dsink")):
    """``got = (out, lse)`` token-major; ``attend(fn)`` runs a dense form. Gradients through out and lse."""
    rows = []
    for out, lse in (got, attend(same_precision_attention), attend(reference_attention)):
        loss = (out * weight.to(out.dtype)).double().sum() + (torch.where(lse.isfinite(), lse, 0.0) * slope).sum()
        rows.append((out, lse, *torch.autograd.grad(loss, leaves)))
    for name, a, b, c in zip(names, *rows):
        assert_within_budget(a, b, c.double(), name=name, rounding=leaves[0].dtype if name == "dsink" else None)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("ratio", [1, 4, 8])
@pytest.mark.parametrize("layout", ["sh", "ssh"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["batched", "varlen"])
def test_fa2_of_torch(is_packed, causal, layout, ratio, dim, seed):
    heads, lengths = 8, [(129, 70), (64, 200)] if is_packed else [(150, 190), (150, 190)]
    total_q, total_k = (sum(x) for x in zip(*lengths))
    q, k, v = make(total_q, heads, dim), make(total_k, heads // ratio, dim), make(total_k, heads // ratio, dim, seed=1)
    sink = make(*((3, heads) if layout == "sh" else (total_q, 3, heads)), seed=seed, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in (q, k, v, sink)]
    slices, a, b = [], 0, 0
    for sq, sk in lengths:
        slices.append((a, a + sq, b, b + sk, int(causal)))
        a, b = a + sq, b + sk
    with use_provider("fa2", "torch"):
        if is_packed:
            cu_q, cu_k = (torch.tensor([0, x, x + y], dtype=torch.int32, device="cuda") for x, y in zip(*lengths))
            options = dict(sink_layout=layout, causal=causal, return_attn_probs=True)
            out, lse, _ = fa2_varlen_func_with_sink(q, k, v, cu_q, cu_k, 129, 200, sink, **options)
            got = out, lse.t()
        else:
            two = [x.unflatten(0, (2, -1)) for x in (q, k, v)]
            rows = sink.unflatten(0, (2, -1)) if layout == "ssh" else sink
            out, lse, _ = fa2_func_with_sink(*two, rows, layout, causal=causal, return_attn_probs=True)
            got = out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
    compare(
        got,
        leaves,
        lambda form: form(q, k, v, slices, sink=sink, sink_layout=layout)[:2],
        make(total_q, heads, dim, seed=seed + 7),
        make(total_q, heads, seed=seed + 8, dtype=torch.float32),
    )


def test_the_torch_provider_is_chosen_and_takes_odd_head_dims():
    assert provider("fa2") in ("torch", "flash_attn")
    q, k, v = (make(1, 100, 2, 36, seed=i).requires_grad_() for i in range(3))
    with use_provider("fa2", "torch"):
        out = fa2_func_with_sink(q, k, v, window_size=(7, 0), deterministic=True)
        first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
        for a, b in zip(first, torch.autograd.grad(out.sum(), (q, k, v))):
            assert torch.equal(a, b)
        with pytest.raises(NotImplementedError, match="provider 'torch' has no softcap"):
            fa2_func_with_sink(q, k, v, softcap=1.0)
    mask = [(i, i + 1, max(0, i - 7), i + 1, 0) for i in range(100)]
    forms = (form(q[0], k[0], v[0], mask)[0] for form in (same_precision_attention, reference_attention))
    assert_within_budget(out[0], *forms, name="out")


@pytest.mark.parametrize(
    ("heads", "dims"), [((8, 2), (64, 64)), ((128, 1), (128, 128)), ((64, 1), (576, 512))], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_triton_sparse_attention(heads, dims, dtype):
    q, k = make(67, heads[0], dims[0], dtype=dtype), make(300, heads[1], dims[0], dtype=dtype)
    v = make(300, heads[1], dims[1], dtype=dtype)
    index = torch.randint(-1, 300, (heads[1], 67, 100), device="cuda", dtype=torch.int32)
    index[:, 3] = -1
    leaves = [x.requires_grad_() for x in (q, k, v)]
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    runs = [(dsa_attn_func(*leaves, index), leaves), (dsa_attn_func(*leaves, index, backend="sdpa"), leaves)]
    runs.append((dsa_attn_func(*exact_leaves, index, backend="sdpa"), exact_leaves))
    weight, slope = make(67, heads[0], dims[1], seed=5), make(67, heads[0], dtype=torch.float32)
    rows = []
    for (out, lse), inputs in runs:
        loss = (out * weight.to(out.dtype)).double().sum() + (torch.where(lse.isfinite(), lse, 0.0) * slope).sum()
        rows.append((out, lse, *torch.autograd.grad(loss, inputs)))
    for name, a, b, c in zip(("out", "lse", "dq", "dk", "dv"), *rows):
        # P and dS are rounded to the dtype of the inputs before their products; the dense form keeps them in float32.
        scale = torch.where(c.isfinite(), c, 0.0).abs().max() * torch.finfo(dtype).eps
        if name == "lse":
            finite = c.isfinite()
            error, baseline = ((x.double() - c)[finite].abs().max() for x in (a, b))
            assert error <= 2 * baseline + torch.finfo(torch.float32).eps * c[finite].abs().max(), name
            assert torch.equal(a.isfinite(), finite)
        else:
            assert (a.double() - c).abs().max() <= 4 * scale, name


def test_triton_sparse_attention_in_a_cuda_graph():
    q, k, v = make(32, 16, 64), make(100, 1, 64), make(100, 1, 64, seed=1)
    index = torch.randint(0, 100, (1, 32, 40), device="cuda", dtype=torch.int32)
    dsa_attn_func(q, k, v, index)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = dsa_attn_func(q, k, v, index)
    index.copy_(torch.randint(0, 100, (1, 32, 40), device="cuda", dtype=torch.int32))
    graph.replay()
    assert torch.equal(out, dsa_attn_func(q, k, v, index)[0])


def test_indexer_on_the_gpu():
    q, k, w = make(300, 16, 128), make(500, 128), make(300, 16, dtype=torch.float32)
    index, scores = lightning_indexer(q, k, w, 64)
    exact = indexer_scores(q.double(), k.double(), w.double())
    keep = torch.arange(500, device="cuda")[None] <= torch.arange(300, device="cuda")[:, None] + 200
    best = exact.masked_fill(~keep, -torch.inf).topk(64, 1).values
    torch.testing.assert_close(scores.double(), best, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(exact.gather(1, index[0].long()), best, rtol=1e-4, atol=1e-3)
