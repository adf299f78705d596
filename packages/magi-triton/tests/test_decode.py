"""Split-KV, paged and diffkv attention against dense float64."""

import pytest
import torch
from magi_triton.decode.ops import choose_num_splits
from magi_triton.diffkv.api import diffkv_attention
from magi_triton.flash.reference import attention
from magi_triton.paged.api import paged_attention
from magi_triton.paged.reference import paged_attention as paged_reference
from magi_triton.split_kv.api import flash_attention_split_kv
from magi_triton.testing import assert_within_budget

HALF, BF16 = torch.float16, torch.bfloat16


def randn(*shape, dtype, device, seed=0, std=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(std).to(dtype).to(device)


@pytest.mark.parametrize(
    ("shape", "causal", "splits", "std"),
    [
        ((2, 4, 2, 1, 100, 32, HALF), False, 3, 1.0),
        ((1, 6, 1, 3, 70, 16, BF16), True, 4, 1.0),  # the last split is beyond the first rows
        ((1, 2, 2, 70, 70, 16, HALF), True, 2, 1.0),  # half of the rows see nothing of the second split
        ((1, 3, 1, 40, 20, 24, HALF), True, 2, 1.0),  # rows that see nothing
        ((1, 7, 1, 2, 90, 16, HALF), False, 1, 10.0),
        ((1, 2, 1, 1, 0, 16, HALF), False, 2, 1.0),
        ((1, 1, 1, 1, 40, 256, BF16), False, 8, 1.0),  # more splits than tiles
    ],
    ids=str,
)
def test_split_kv(shape, causal, splits, std, device):
    b, hq, hkv, m, n, d, dtype = shape
    q = randn(b, m, hq, d, dtype=dtype, device=device, std=std).transpose(1, 2)
    k = randn(b, hkv, n, d, dtype=dtype, device=device, seed=1, std=std)
    v = randn(b, hkv, d, n, dtype=dtype, device=device, seed=2).transpose(2, 3)  # strides unlike k's
    out = flash_attention_split_kv(q, k, v, causal, num_splits=splits)
    assert (out.dtype, out.stride()) == (q.dtype, q.stride())
    same, exact = attention(q, k, v, causal)[0], attention(q.double(), k.double(), v.double(), causal)[0]
    assert_within_budget(out, same, exact, name="out")


def test_number_of_splits():
    assert choose_num_splits(base=200, num_blocks=64, num_slots=132) == 1
    assert choose_num_splits(base=2, num_blocks=2, num_slots=132) == 2
    for base in (1, 3, 16, 64):
        for blocks in (1, 5, 64, 1024):
            splits = choose_num_splits(base, blocks, 132)
            each = -(-blocks // splits)
            assert 1 <= splits <= min(128, blocks)
            assert each * (splits - 1) < blocks


def pages(lengths, hkv, block, d, dv, dtype, device, dtype_cache=None):
    """Caches in permuted pages, and their table; unused slots hold NaN."""
    width = max(1, -(-max(lengths) // block))
    count = len(lengths) * width + 3
    table = torch.randperm(count, generator=torch.Generator().manual_seed(3))[: len(lengths) * width]
    table = table.view(len(lengths), width)
    caches = [randn(count, hkv, block, size, dtype=dtype, device="cpu", seed=i) for i, size in enumerate((d, dv))]
    used = torch.zeros(count, block, dtype=torch.bool)
    for s, length in enumerate(lengths):
        for j in range(length):
            used[table[s, j // block], j % block] = True
    for cache in caches:
        cache.masked_fill_(~used[:, None, :, None], float("nan"))
    return (*(cache.to(device) for cache in caches), torch.tensor(lengths, device=device), table.to(device))


def both(query, key, value, lengths, table, scale, **options):
    clean = [x.nan_to_num(0.0) for x in (key, value)]
    return [paged_reference(query, *clean, lengths, table, scale, upcast=up, **options) for up in (False, True)]


@pytest.mark.parametrize(
    ("hq", "hkv", "block", "d", "dtype", "lengths", "splits"),
    [
        (8, 2, 16, 32, HALF, [70, 1, 0, 33], 0),
        (6, 2, 16, 64, BF16, [40, 37], 3),
        (7, 1, 8, 16, HALF, [50], 2),
        (2, 2, 24, 24, HALF, [60, 5], 6),
    ],
    ids=str,
)
def test_paged(hq, hkv, block, d, dtype, lengths, splits, device):
    key, value, lens, table = pages(lengths, hkv, block, d, d, dtype, device)
    value = value.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)  # strides unlike the keys'
    query = randn(len(lengths), hq, d, dtype=dtype, device=device, seed=9)
    out = paged_attention(query, key, value, lens, table, d**-0.5, max(lengths), splits)
    assert_within_budget(out, *both(query, key, value, lens, table, d**-0.5), name="out")
    again = paged_attention(query, key, value, lens.int(), table.int(), d**-0.5, max(lengths), splits)
    assert torch.equal(out, again)


@pytest.mark.parametrize("per_head", [False, True])
def test_paged_fp8_cache(per_head, device):
    key, value, lens, table = pages([50, 20], 2, 16, 32, 32, HALF, device)
    query = randn(2, 4, 32, dtype=HALF, device=device, seed=9)
    scales = [torch.tensor(x if per_head else x[:1], device=device) for x in ([0.5, 0.25], [0.75, 2.0])]
    key8, value8 = (x.float().to(torch.float8_e4m3fn) for x in (key, value))
    out = paged_attention(query, key8, value8, lens, table, 0.2, 50, 2, k_scale=scales[0], v_scale=scales[1])
    plain = [x.float().half() * s.half().view(1, -1, 1, 1) for x, s in zip((key8, value8), scales)]
    assert_within_budget(out, *both(query, *plain, lens, table, 0.2), name="out")


@pytest.mark.parametrize(("window", "path", "segments"), [(-1, "2d", None), (20, "3d", 3), (7, "2d", None)])
def test_diffkv(window, path, segments, device):
    key, value, lens, table = pages([70, 0, 9], 2, 16, 48, 32, BF16, device)
    query = randn(3, 8, 48, dtype=BF16, device=device, seed=9)
    nhd = [x.transpose(1, 2).contiguous() for x in (key, value)]
    out = diffkv_attention(query, *nhd, lens, table, None, window, path, segments)
    assert_within_budget(out, *both(query, key, value, lens, table, 48**-0.5, window=window), name="out")


def test_compile_whole(device):
    q = randn(1, 2, 1, 16, dtype=HALF, device=device)
    k = randn(1, 1, 40, 16, dtype=HALF, device=device)
    step = torch.compile(lambda q, k: flash_attention_split_kv(q, k, k, True) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(step(q, k), flash_attention_split_kv(q, k, k, True) + 1)


def call(**change):
    x = {
        "query": torch.zeros(2, 4, 16, dtype=HALF),
        "key_cache": torch.zeros(5, 2, 8, 16, dtype=HALF),
        "value_cache": torch.zeros(5, 2, 8, 16, dtype=HALF),
        "context_lens": torch.ones(2, dtype=torch.int32),
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "attn_scale": 1.0,
        "max_context_len": 16,
    }
    return paged_attention(**{**x, **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"max_context_len": 17}, ValueError, "max_context_len must be in"),
        ({"context_lens": torch.ones(3, dtype=torch.int32)}, ValueError, "context_lens must have shape"),
        ({"context_lens": torch.ones(2)}, TypeError, "context_lens must be int32 or int64"),
        ({"block_tables": torch.zeros(2, dtype=torch.int32)}, ValueError, "block_tables must have shape"),
        ({"value_cache": torch.zeros(5, 2, 8, 32, dtype=HALF)}, ValueError, "value_cache must have the shape"),
        ({"key_cache": torch.zeros(5, 2, 8, 16, dtype=BF16)}, TypeError, "key_cache must have the dtype of query"),
        ({"num_splits": -1}, ValueError, "num_splits must be in"),
        ({"k_scale": torch.ones(1)}, ValueError, "k_scale must be given for a float8 cache"),
        ({"query": torch.zeros(2, 4, 16, dtype=HALF).requires_grad_()}, NotImplementedError, "no backward, and query"),
    ],
)
def test_paged_mistakes_are_named(change, error, message):
    with pytest.raises(error, match=message):
        call(**change)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"window_size": 0}, "window_size must be -1 or positive"), ({"path": "4d"}, "path must be"),
     ({"backend": "tle"}, "backend must be")],
)  # fmt: skip
def test_diffkv_mistakes_are_named(options, message):
    cache = torch.zeros(5, 8, 2, 16, dtype=HALF)
    lens, table = torch.ones(2, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        diffkv_attention(torch.zeros(2, 4, 16, dtype=HALF), cache, cache, lens, table, **options)
