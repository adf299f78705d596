"""Sparse attention over an index map, against attention written out one query at a time."""

import pytest
import torch
from magi_attn_extensions import dsa_attn_func


def one_by_one(q, k, v, index_map, scale):
    """(out, lse) in fp64, with a loop over queries and heads."""
    group = q.shape[1] // k.shape[1]
    out, lse = [], []
    for i in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys = sorted({j for j in index_map[h // group, i].tolist() if j >= 0})
            if not keys:
                out.append(torch.zeros(v.shape[2], dtype=q.dtype))
                lse.append(torch.tensor(float("-inf"), dtype=q.dtype))
                continue
            scores = scale * k[keys, h // group] @ q[i, h]
            out.append(torch.softmax(scores, 0) @ v[keys, h // group])
            lse.append(torch.logsumexp(scores, 0))
    return torch.stack(out).view(*q.shape[:2], -1), torch.stack(lse).view(*q.shape[:2])


def case(heads=(6, 2), total_q=11, total_k=17, topk=5, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(total_q, heads[0], 8, generator=generator, dtype=torch.float64).to(dtype)
    k = torch.randn(total_k, heads[1], 8, generator=generator, dtype=torch.float64).to(dtype)
    v = torch.randn(total_k, heads[1], 12, generator=generator, dtype=torch.float64).to(dtype)
    index_map = torch.randint(-1, total_k, (heads[1], total_q, topk), generator=generator, dtype=torch.int32)
    index_map[:, 3] = -1  # a query that lists nothing
    index_map[:, 4] = 7  # one key, listed topk times
    return q, k, v, index_map


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (7, 1)], ids=str)
@pytest.mark.parametrize("scale", [None, -0.5, 0.0])
def test_values_and_gradients(heads, scale):
    q, k, v, index_map = case(heads)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    got = dsa_attn_func(q, k, v, index_map, scale)
    want = one_by_one(q, k, v, index_map, 8**-0.5 if scale is None else scale)
    assert torch.isneginf(got[1][3]).all()
    assert (got[0][3] == 0).all()
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    seen = torch.arange(q.shape[0]) != 3
    weights = torch.linspace(-1, 1, got[0].numel(), dtype=q.dtype).view_as(got[0])
    for (out, lse), grads in ((got, []), (want, [])):
        loss = (out * weights).sum() + lse[seen].square().sum()
        grads.extend(torch.autograd.grad(loss, leaves))
        if out is got[0]:
            ours = grads
    for a, b in zip(ours, grads):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        assert a.isfinite().all()


def test_low_precision_keeps_its_dtype():
    q, k, v, index_map = case(dtype=torch.bfloat16)
    out, lse = dsa_attn_func(q, k, v, index_map)
    want, _ = one_by_one(q.double(), k.double(), v.double(), index_map, 8**-0.5)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert (out.double() - want).abs().max() <= torch.finfo(torch.bfloat16).eps * want.abs().max()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a: a.update(backend="ffa_index_attn"), NotImplementedError, "'ffa_index_attn' is not in this release"),
        (lambda a: a.update(backend="dense"), ValueError, "backend must be one of sdpa, .* got 'dense'"),
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
