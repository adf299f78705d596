"""Padding, batches, and the slices of windows and packed documents, against dense masks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from magi_attention.api import (
    AttnMaskType,
    AttnRanges,
    compute_pad_size,
    infer_attn_mask_from_cu_seqlens,
    infer_attn_mask_from_sliding_window,
    infer_varlen_mask_from_batch,
    squash_batch_dim,
)
from magi_attention.api.functools import apply_padding, pad_at_dim, unpad_at_dim
from magi_attention.common import AttnRange
from magi_core.testing import dense_counts


def counts_of(slices, total_q: int, total_k: int) -> np.ndarray:
    q, k, types = slices
    rows = [(a.start, a.end, b.start, b.end, t.to_int_type()) for a, b, t in zip(q, k, types, strict=True)]
    return dense_counts(rows, total_q, total_k).numpy()


def window_mask(sq: int, sk: int, left: int, right: int) -> np.ndarray:
    """Straight from the definition: p = i + sk - sq sees p - left .. p + right; rows with p < 0 see nothing."""
    p = np.arange(sq)[:, None] + sk - sq
    j = np.arange(sk)[None, :]
    seen = p >= 0
    seen = seen & (j >= p - left if left != -1 and left < sk - 1 else True)
    return (seen & (j <= p + right if right != -1 and right < sk - 1 else True)).astype(np.int64)


def test_every_small_window_is_covered_once() -> None:
    for sq, sk in itertools.product(range(7), range(7)):
        for left, right in itertools.product(range(-1, 8), range(-1, 8)):
            slices = infer_attn_mask_from_sliding_window(AttnRange(2, 2 + sq), AttnRange(3, 3 + sk), (left, right))
            counts = counts_of(slices, 2 + sq, 3 + sk)
            expected = np.zeros_like(counts)
            expected[2:, 3:] = window_mask(sq, sk, left, right)
            assert np.array_equal(counts, expected), (sq, sk, left, right)
            assert len(slices[0]) <= 3


def test_a_window_of_exactly_w_keys_is_inclusive_and_one_sided() -> None:
    # W keys, the row's own included: (W - 1, 0).
    counts = counts_of(infer_attn_mask_from_sliding_window(AttnRange(0, 10), AttnRange(0, 10), (3, 0)), 10, 10)
    assert counts.sum(1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]
    assert counts[7].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0]
    counts = counts_of(infer_attn_mask_from_sliding_window(AttnRange(0, 10), AttnRange(0, 10), (0, 3)), 10, 10)
    assert counts.sum(1).tolist() == [4, 4, 4, 4, 4, 4, 4, 3, 2, 1]
    counts = counts_of(infer_attn_mask_from_sliding_window(AttnRange(0, 6), AttnRange(0, 6), (-1, 0)), 6, 6)
    assert np.array_equal(counts, np.tril(np.ones((6, 6))))


def test_order_and_types_of_a_windows_slices() -> None:
    q, k, types = infer_attn_mask_from_sliding_window(AttnRange(0, 10), AttnRange(0, 10), (2, 1))
    assert types == [AttnMaskType.CAUSAL, AttnMaskType.BICAUSAL, AttnMaskType.INVCAUSAL]
    assert q.to_naive_ranges() == [(0, 2), (2, 9), (9, 10)]
    assert k.to_naive_ranges() == [(0, 3), (0, 10), (7, 10)]


@pytest.mark.parametrize("window", [(-2, 0), (0, -3), (1,)])
def test_a_negative_window_is_refused(window) -> None:
    with pytest.raises(ValueError, match=r"window_size must be two integers of at least -1"):
        infer_attn_mask_from_sliding_window(AttnRange(0, 4), AttnRange(0, 4), window)


lengths = st.lists(st.integers(0, 9), min_size=0, max_size=4)


@given(lengths, st.integers(-1, 6), st.integers(-1, 6), st.integers(0, 5))
def test_leading_keys_join_the_window_without_covering_a_pair_twice(lengths, left, right, leading) -> None:
    cu = [0, *itertools.accumulate(lengths)]
    *slices, total_q, total_k = infer_attn_mask_from_cu_seqlens(
        cu, cu, window_size=(left, right), global_window_size=leading
    )
    counts = counts_of(slices, total_q, total_k)
    expected = np.zeros_like(counts)
    for a, b in itertools.pairwise(cu):
        n = b - a
        if (left, right) == (-1, -1):
            expected[a:b, a:b] = 1
            continue
        i, j = np.arange(n)[:, None], np.arange(n)[None, :]
        reach = n if right == -1 or right >= n - 1 else right
        expected[a:b, a:b] = window_mask(n, n, left, right) | ((j < leading) & (j <= i + reach))
    assert np.array_equal(counts, expected)


@given(lengths, st.booleans())
def test_documents_are_one_slice_each_even_empty_ones(lengths, causal) -> None:
    cu = [0, *itertools.accumulate(lengths)]
    q, k, types, total_q, total_k = infer_attn_mask_from_cu_seqlens(torch.tensor(cu, dtype=torch.int32), cu, causal)
    assert (total_q, total_k) == (cu[-1], cu[-1])
    assert q.to_naive_ranges() == k.to_naive_ranges() == list(itertools.pairwise(cu))
    assert types == [AttnMaskType.CAUSAL if causal else AttnMaskType.FULL] * len(lengths)


def test_cu_seqlens_are_read_when_called_and_results_are_not_shared() -> None:
    cu = torch.tensor([0, 4, 8], dtype=torch.int32)
    first = infer_attn_mask_from_cu_seqlens(cu, cu)
    cu[1] = 2
    second = infer_attn_mask_from_cu_seqlens(cu, cu)
    assert second[0].to_naive_ranges() == [(0, 2), (2, 8)]
    first[0].append(AttnRange(0, 1))
    assert len(infer_attn_mask_from_cu_seqlens(cu, cu)[0]) == 2


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "options", "message"),
    [
        ([1, 4], [0, 4], {}, r"cu_seqlens_q must start at 0 and never fall, got \[1, 4\]"),
        ([0, 4], [0, 5, 4], {}, r"cu_seqlens_k must start at 0 and never fall"),
        ([], [], {}, r"cu_seqlens_q must start at 0"),
        ([0, 4], [0, 2, 4], {}, r"must describe the same number of documents, got 1 and 2"),
        ([0, 4], [0, 4], {"causal": True, "window_size": (1, 1)}, r"causal must be False when window_size is given"),
        ([0, 4], [0, 4], {"window_size": (-2, 1)}, r"window_size must be two integers"),
        ([0, 4], [0, 4], {"global_window_size": -1}, r"global_window_size must not be negative"),
    ],
)
def test_wrong_cu_seqlens_are_refused(cu_q, cu_k, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        infer_attn_mask_from_cu_seqlens(cu_q, cu_k, **options)


def test_cu_seqlens_must_be_integers() -> None:
    with pytest.raises(TypeError, match=r"cu_seqlens_q must be one-dimensional and of integers, got .*float64"):
        infer_attn_mask_from_cu_seqlens([0.0, 4.0], [0, 4])


def test_pad_size_completes_equal_numbers_of_chunks() -> None:
    for total, cp, chunk in itertools.product(range(20), range(1, 5), range(1, 5)):
        pad = compute_pad_size(total, cp, chunk)
        assert 0 <= pad < cp * chunk and (total + pad) % (cp * chunk) == 0
    with pytest.raises(ValueError, match="cp_size must be at least 1, got 0"):
        compute_pad_size(7, 0, 4)
    with pytest.raises(ValueError, match="total_seqlen_q must be at least 0, got -1"):
        compute_pad_size(-1, 2, 4)
    with pytest.raises(TypeError, match="chunk_size must be an integer, got float 4.5"):
        compute_pad_size(8, 2, 4.5)


def test_padding_and_unpadding_follow_their_dim() -> None:
    x = torch.arange(6).view(2, 3)
    assert pad_at_dim(x, 1, 2, value=9).tolist() == [[0, 1, 2, 9, 9], [3, 4, 5, 9, 9]]
    assert pad_at_dim(x, 0, 1, value=9, side="left").tolist() == [[9, 9, 9], [0, 1, 2], [3, 4, 5]]
    assert torch.equal(unpad_at_dim(pad_at_dim(x, 1, 2), 1, 2), x)
    assert torch.equal(unpad_at_dim(pad_at_dim(x, 0, 2), 0, 2), x)
    with pytest.raises(ValueError, match=r"pad_size must be within \[0, 3\], the length of dim 1, got 4"):
        unpad_at_dim(x, 1, 4)
    with pytest.raises(ValueError, match=r"side must be 'left' or 'right', got 'top'"):
        pad_at_dim(x, 0, 1, side="top")


def test_batches_squash_and_have_their_cu_seqlens() -> None:
    x = torch.randn(2, 3, 4)
    assert torch.equal(squash_batch_dim(x), x.view(6, 4))
    with pytest.raises(ValueError, match=r"x must have at least 2 dims"):
        squash_batch_dim(torch.zeros(3))
    cu_q, cu_k = infer_varlen_mask_from_batch(3, 5, device="cpu")
    assert cu_q is cu_k and cu_q.dtype == torch.int32 and cu_q.tolist() == [0, 5, 10, 15]


def test_applied_padding_is_a_slice_of_queries_that_see_nothing() -> None:
    q, k = AttnRanges.from_ranges([(0, 5)]), AttnRanges.from_ranges([(0, 5)])
    padded_q, padded_k, types = apply_padding(q, k, [AttnMaskType.CAUSAL], 5, 3)
    assert padded_q.to_naive_ranges() == [(0, 5), (5, 8)] and padded_k.to_naive_ranges() == [(0, 5), (0, 0)]
    assert types == [AttnMaskType.CAUSAL, AttnMaskType.FULL] and len(q) == 1
    assert len(apply_padding(q, k, [AttnMaskType.CAUSAL], 5, 0)[0]) == 1
