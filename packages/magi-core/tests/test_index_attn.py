"""Index attention against the fp64 reference with the listed pairs as a dense count."""

import pytest
import torch
from magi_core.flex_attn import flex_flash_attn_func
from magi_core.testing import reference_attention


@pytest.fixture(autouse=True)
def few_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def problem(dtype=torch.float64, tokens=5, kv_heads=3, topk=7, rows_k=20, group=2, dim=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, rows_k, (tokens, kv_heads, topk), generator=generator, dtype=torch.int32)
    lengths = torch.randint(0, topk + 1, (tokens, kv_heads, 1), generator=generator)
    indices[torch.arange(topk).expand_as(indices) >= lengths] = -1
    flat = indices.reshape(-1, topk)
    counts = torch.zeros(len(flat), rows_k, dtype=torch.int64)
    for row, listed in enumerate(flat.tolist()):
        for column in listed:
            if column >= 0:
                counts[row, column] += 1
    q, k, v = (
        torch.randn(n, h, dim, generator=generator, dtype=torch.float64).to(dtype)
        for n, h in ((tokens * kv_heads, group), (rows_k, 1), (rows_k, 1))
    )
    k[(counts == 0).all(0)] = v[(counts == 0).all(0)] = torch.nan
    return indices, counts, q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("layout", [None, "sh", "ssh"])
@pytest.mark.parametrize("is_blocked", [False, True])
def test_matches_reference(softcap, layout, is_blocked, monkeypatch):
    if is_blocked:
        monkeypatch.setattr("magi_core.index_attn._BLOCK_ELEMENTS", 120)
    indices, counts, q, k, v = problem()
    sink = None if layout is None else torch.randn((2, 2) if layout == "sh" else (15, 2, 2), requires_grad=True)
    keywords = dict(softcap=softcap, sink=sink, sink_layout=layout or "sh")
    out, meta = flex_flash_attn_func(q, k, v, index_attn_indices=indices, return_max_logits=True, **keywords)
    exact, lse, max_logits = reference_attention(q, k, v, counts, **keywords)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    dlse[~lse.isfinite()] = 0
    leaves = [x for x in (q, k, v, sink) if x is not None]
    got = torch.autograd.grad((out, meta.lse), leaves, (dout, dlse))
    expected = torch.autograd.grad((exact, lse), leaves, (dout, dlse))
    for a, b in zip((out, meta.lse, meta.max_logits, *got), (exact, lse, max_logits, *expected), strict=True):
        torch.testing.assert_close(a, b)


def test_long_lists_of_all_keys_are_full_attention():
    _, _, q, k, v = problem(topk=20)
    k, v = torch.randn_like(k), torch.randn_like(v)
    everything = torch.arange(20, dtype=torch.int32).expand(5, 3, 20)
    a, _ = flex_flash_attn_func(q, k, v, index_attn_indices=everything, index_attn=True)
    b, _ = flex_flash_attn_func(q, k, v, [[0, 15]], [[0, 20]])
    torch.testing.assert_close(a, b)


def test_no_keys():
    q, k = torch.randn(4, 2, 8), torch.randn(0, 1, 8)
    out, meta = flex_flash_attn_func(q, k, k, index_attn_indices=torch.full((4, 1, 3), -1, dtype=torch.int32))
    assert (out == 0).all() and (meta.lse == -torch.inf).all()


def test_errors():
    indices, _, q, k, v = problem()
    for wrong, error, match in (
        (indices.long(), TypeError, "index_attn_indices must be an int32 tensor, got torch.int64"),
        (indices[0], ValueError, "index_attn_indices must have 3 dims"),
        (indices[:4], ValueError, "index_attn_indices must have tokens \\* kv heads = 15 rows"),
        (torch.full_like(indices, 20), ValueError, "index_attn_indices must be below the 20 rows of k, got 20"),
    ):
        with pytest.raises(error, match=match):
            flex_flash_attn_func(q, k, v, index_attn_indices=wrong)
    with pytest.raises(ValueError, match="k and v must have one head with index_attn_indices"):
        flex_flash_attn_func(q, *(x.expand(20, 2, 8) for x in (k, v)), index_attn_indices=indices)
    with pytest.raises(NotImplementedError, match="q_block_size and k_block_size must be 1"):
        flex_flash_attn_func(q, k, v, index_attn_indices=indices, k_block_size=8)
    with pytest.raises(ValueError, match="attn_type_map must be None when index_attn_indices is given"):
        flex_flash_attn_func(q, k, v, None, None, [0], index_attn_indices=indices)
