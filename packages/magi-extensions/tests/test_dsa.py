"""Sparse attention over an index map, and its indexer, against loops in float64."""

import pytest
import torch
from magi_attn_extensions import dsa_attn_func, indexer_scores, lightning_indexer
from magi_attn_extensions.dsa import indexer_kernel, kernel

BACKENDS = ("reference", "sdpa", "ffa_index_attn", "ffa_sparse_load")
interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or type(kernel.dsa_fwd_kernel).__name__ != "InterpretedFunction",
    reason="Triton's interpreter is off: there is a GPU, or Triton was imported before this package's tests",
)


def one_by_one(q, k, v, index_map, scale):
    """(out, lse) in the dtype of q, with a loop over queries and heads; a key listed twice counts twice."""
    group = q.shape[1] // k.shape[1]
    out, lse = [], []
    for i in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys = [j for j in index_map[h // group, i].tolist() if 0 <= j < k.shape[0]]
            if not keys:
                out.append(torch.zeros(v.shape[2], dtype=q.dtype))
                lse.append(torch.tensor(float("-inf"), dtype=q.dtype))
                continue
            scores = scale * k[keys, h // group] @ q[i, h]
            out.append(torch.softmax(scores, 0) @ v[keys, h // group])
            lse.append(torch.logsumexp(scores, 0))
    return torch.stack(out).view(*q.shape[:2], -1), torch.stack(lse).view(*q.shape[:2])


def case(heads=(6, 2), total_q=11, total_k=17, topk=5, dims=(8, 12), dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(total_q, heads[0], dims[0], generator=generator, dtype=torch.float64).to(dtype)
    k = torch.randn(total_k, heads[1], dims[0], generator=generator, dtype=torch.float64).to(dtype)
    v = torch.randn(total_k, heads[1], dims[1], generator=generator, dtype=torch.float64).to(dtype)
    index_map = torch.randint(-1, total_k, (heads[1], total_q, topk), generator=generator, dtype=torch.int32)
    index_map[:, 3] = -1  # a query that lists nothing
    index_map[:, 4] = 7  # one key, listed topk times
    index_map[:, 5, 0] = -1  # nothing before something
    return q, k, v, index_map


def results(out, lse, leaves):
    """Outputs, and gradients of a loss through both."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    seen = torch.arange(out.shape[0]) != 3
    loss = (out * weights).sum() + lse[seen].square().sum()
    return (out, lse, *torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (7, 1)], ids=str)
@pytest.mark.parametrize("scale", [None, -0.5, 0.0])
def test_values_and_gradients(heads, scale, backend):
    q, k, v, index_map = case(heads)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    got = results(*dsa_attn_func(q, k, v, index_map, scale, backend), leaves)
    want = results(*one_by_one(q, k, v, index_map, 8**-0.5 if scale is None else scale), leaves)
    assert torch.isneginf(got[1][3]).all()
    assert (got[0][3] == 0).all()
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_the_default_on_a_cpu_is_the_reference():
    q, k, v, index_map = case()
    for a, b in zip(dsa_attn_func(q, k, v, index_map), dsa_attn_func(q, k, v, index_map, None, "reference")):
        assert torch.equal(a, b)


@pytest.mark.parametrize("heads", [(1, 1), (6, 2)], ids=str)
def test_flex_forward(heads):
    q, k, v, index_map = case(heads, dims=(16, 16), dtype=torch.float32)
    got = dsa_attn_func(q, k, v, index_map, None, "flex")
    for a, b in zip(got, one_by_one(q.double(), k.double(), v.double(), index_map, 16**-0.5)):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    with pytest.raises(NotImplementedError, match='"flex" has no backward on the CPU'):
        dsa_attn_func(q.requires_grad_(), k, v, index_map, None, "flex")


@interpreted
@pytest.mark.parametrize(
    ("heads", "dims", "topk"),
    [((1, 1), (8, 8), 5), ((6, 2), (16, 24), 70), ((34, 1), (36, 32), 33), ((4, 4), (64, 40), 1)],
    ids=str,
)
def test_triton_kernels_in_the_interpreter(heads, dims, topk):
    q, k, v, index_map = case(heads, 7, 21, topk, dims, torch.float32)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    exact_leaves = [tensor.detach().double().requires_grad_() for tensor in leaves]
    got = results(*dsa_attn_func(q, k, v, index_map, backend="triton"), leaves)
    want = results(*one_by_one(*exact_leaves, index_map, dims[0] ** -0.5), exact_leaves)
    for a, b in zip(got, want):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


@interpreted
def test_triton_skips_what_is_past_the_keys_and_takes_strides():
    q, k, v, index_map = case(dtype=torch.float32)
    q, k = torch.stack((q, q), 2)[:, :, 0], k.transpose(0, 1).contiguous().transpose(0, 1)
    far = torch.where(index_map == 2, 1000, index_map)
    got = kernel.forward(q, k, v, far.contiguous(), 0.3)
    for a, b in zip(got, one_by_one(q.double(), k.double(), v.double(), far, 0.3)):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("backend", ["sdpa", "reference", pytest.param("triton", marks=interpreted)])
def test_compiled_without_a_graph_break(backend):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: dsa_attn_func(*x, backend=backend), fullgraph=True, backend="aot_eager")
    q, k, v, index_map = case(dtype=torch.float32)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    got, want = (results(*f(q, k, v, index_map), leaves)
                 for f in (compiled, lambda *x: dsa_attn_func(*x, backend=backend)))  # fmt: skip
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_low_precision_keeps_its_dtype(backend):
    q, k, v, index_map = case(dtype=torch.bfloat16)
    out, lse = dsa_attn_func(q, k, v, index_map, backend=backend)
    want, _ = one_by_one(q.double(), k.double(), v.double(), index_map, 8**-0.5)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert (out.double() - want).abs().max() <= torch.finfo(torch.bfloat16).eps * want.abs().max()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a: a.update(backend="dense"), ValueError, "backend must be None or one of triton, .* got 'dense'"),
        (lambda a: a.update(backend="triton"), NotImplementedError, '"triton" takes float16 and bfloat16 on cuda'),
        (lambda a: a.update(backend="flex", deterministic=True), NotImplementedError, "no deterministic backward"),
        (lambda a: a.update(q=a["q"][0]), ValueError, "q must have 3 dims"),
        (lambda a: a.update(k=a["k"].float()), TypeError, "one floating point dtype"),
        (lambda a: a.update(index_map=a["index_map"].float()), TypeError, "index_map must hold integers"),
        (lambda a: a.update(v=a["v"][1:]), ValueError, "k and v must fit q"),
        (lambda a: a.update(q=a["q"][:, :5]), ValueError, r"num_heads_kv must divide num_heads_q \(5\), got 2"),
        (lambda a: a.update(index_map=a["index_map"][:, 1:]), ValueError, r"index_map must have shape \(2, 11, topk\)"),
        (lambda a: a.update(index_map=a["index_map"] + 17), ValueError, "index_map must list keys below 17"),
    ],
)
def test_bad_arguments(change, error, message):
    arguments = dict(zip(("q", "k", "v", "index_map"), case()))
    change(arguments)
    with pytest.raises(error, match=message):
        dsa_attn_func(**arguments)


def indexer_case(total_q=9, total_k=13, heads=3, dim=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (total_q, heads, dim), (total_k, dim), (total_q, heads)
    return [torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def test_indexer_scores_by_hand():
    q, k, w = indexer_case(2, 3)
    got = indexer_scores(q, k, w)
    for t in range(2):
        for s in range(3):
            want = sum(w[t, h] * max(q[t, h] @ k[s], torch.zeros(())) for h in range(3))
            torch.testing.assert_close(got[t, s], want)


@pytest.mark.parametrize("bounds", ["causal", "all", "documents"])
@pytest.mark.parametrize("topk", [1, 4, 20])
def test_indexer_finds_the_best_keys(topk, bounds, monkeypatch):
    from magi_attn_extensions.dsa import indexer

    monkeypatch.setattr(indexer, "_BLOCK_ELEMENTS", 40)  # several blocks of rows
    q, k, w = indexer_case()
    options = {"causal": {}, "all": {"causal": False}}.get(bounds)
    rows = torch.arange(9)
    begin, end = torch.zeros_like(rows), rows + 5 if bounds == "causal" else torch.full_like(rows, 13)
    if options is None:
        begin, end = rows // 3 * 4, rows // 3 * 4 + rows % 3  # the first of a document sees nothing
        options = {"k_begin": begin, "k_end": end}
    index, scores = lightning_indexer(q, k, w, topk, **options)
    assert (index.shape, index.dtype) == ((1, 9, topk), torch.int32)
    every = indexer_scores(q, k, w)
    for t in range(9):
        best = sorted(range(int(begin[t]), int(end[t])), key=lambda s: -every[t, s].item())[:topk]
        found = index[0, t].tolist()
        assert found[len(best) :] == [-1] * (topk - len(best))
        found = found[: len(best)]
        assert len(set(found)) == len(found) and all(begin[t] <= s < end[t] for s in found)
        assert every[t, found].tolist() == pytest.approx(every[t, best].tolist())  # equal scores may change places
    chosen = every.gather(1, index[0].clamp_min(0).long()).masked_fill(index[0] < 0, -torch.inf)
    torch.testing.assert_close(scores, chosen)
    slope = torch.linspace(-1, 1, scores.numel(), dtype=torch.float64).view_as(scores)
    losses = [(torch.where(x.isfinite(), x, 0.0) * slope).sum() for x in (scores, chosen)]
    got, want = (torch.autograd.grad(loss, (q, k, w), retain_graph=True) for loss in losses)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


def test_indexer_feeds_sparse_attention():
    q, k, w = indexer_case(6, 6)
    index, _ = lightning_indexer(q, k, w, 6)
    x = torch.randn(6, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out, _ = dsa_attn_func(x, x, x, index.expand(2, -1, -1))  # as many keys as there are: plain causal attention
    want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1),) * 3, is_causal=True)
    torch.testing.assert_close(out, want.transpose(0, 1))


@interpreted
def test_indexer_kernel_in_the_interpreter():
    q, k, w = (x.detach() for x in indexer_case(70, 131, 3, 20, torch.float32))
    torch.testing.assert_close(indexer_kernel.scores(q, k, w), indexer_scores(q, k, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"topk": 0}, ValueError, "topk must be a positive int, got 0"),
        ({"weights": torch.zeros(9, 2)}, ValueError, r"weights must have shape \(9, 3\)"),
        ({"k_index": torch.zeros(13, 7)}, ValueError, "q_index must have shape"),
        ({"k_index": torch.zeros(13, 8)}, TypeError, "one floating point dtype"),
        ({"k_end": torch.zeros(9)}, ValueError, r"k_end must hold integers of shape \(9,\)"),
    ],
)
def test_bad_arguments_of_the_indexer(change, error, message):
    arguments = dict(zip(("q_index", "k_index", "weights"), indexer_case()), topk=3)
    with pytest.raises(error, match=message):
        lightning_indexer(**{**arguments, **change})
