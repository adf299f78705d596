"""The fp64 reference against cases computed by hand."""

import math

import pytest
import torch
from magi_core import testing
from magi_core.testing import masks, reference_attention


def tensors(*values):
    return [torch.tensor(v, dtype=torch.float64).reshape(-1, 1, 1).requires_grad_() for v in values]


def test_one_key_one_query_with_a_sink():
    q, k, v = tensors([1.0], [1.0], [2.0])
    sink = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    out, lse, max_logits = reference_attention(q, k, v, [(0, 1, 0, 1, 0)], softmax_scale=1.0, sink=sink)
    p = math.e / (math.e + 1)
    assert out.item() == pytest.approx(2 * p, abs=1e-15)
    assert lse.item() == pytest.approx(math.log(math.e + 1), abs=1e-15)
    assert max_logits.item() == 1.0
    out.sum().backward()
    assert q.grad.item() == pytest.approx(0.39322387, abs=5e-9) and k.grad.item() == q.grad.item()
    assert v.grad.item() == pytest.approx(p, abs=1e-15)
    assert sink.grad.item() == pytest.approx(-2 * p * (1 - p), abs=1e-15)


def test_two_keys():
    q, k, v = tensors([2.0], [0.0, math.log(3) / 2], [4.0, 8.0])
    out, lse, _ = reference_attention(q, k, v, [(0, 1, 0, 2, 0)], softmax_scale=1.0)
    assert out.item() == pytest.approx(7.0, abs=1e-14)  # weights 1/4 and 3/4
    assert lse.item() == pytest.approx(math.log(4), abs=1e-14)
    lse.sum().backward()
    assert q.grad.item() == pytest.approx(0.75 * math.log(3) / 2, abs=1e-14)
    assert v.grad is None


def test_a_pair_covered_twice_counts_twice():
    q, k, v = tensors([0.0], [0.0, 0.0], [3.0, 9.0])
    out, lse, max_logits = reference_attention(q, k, v, [(0, 1, 0, 2, 0), (0, 1, 1, 2, 0)])
    assert out.item() == pytest.approx(7.0, abs=1e-14)  # weights 1/3 and 2/3
    assert lse.item() == pytest.approx(math.log(3), abs=1e-14)
    assert max_logits.item() == 0.0


def test_softcap():
    q, k, v = tensors([5000.0], [1.0], [1.0])
    _, lse, max_logits = reference_attention(q, k, v, [(0, 1, 0, 1, 0)], softmax_scale=1.0, softcap=50.0)
    assert lse.item() == max_logits.item() == 50.0


def test_rows_and_keys_that_see_nothing():
    q, k, v = tensors([1.0, 1.0], [1.0, math.nan], [5.0, math.nan])
    sink = torch.tensor([[[math.log(2)]], [[math.log(2)]]], dtype=torch.float64, requires_grad=True)
    out, lse, _ = reference_attention(q, k, v, [(0, 1, 0, 1, 0)], sink=sink, sink_layout="ssh")
    assert out[1].item() == 0.0 and lse[1].item() == pytest.approx(math.log(2))
    (out.sum() + lse.sum()).backward()
    for x in (q, k, v, sink):
        assert x.grad.isfinite().all()
    assert sink.grad[1].item() == 1.0 and v.grad[1].item() == 0.0
    out, lse, max_logits = reference_attention(q, k, v, [])
    assert (out == 0).all() and (lse == -math.inf).all() and (max_logits == -math.inf).all()


def test_infinite_sinks():
    q, k, v = tensors([1.0], [1.0], [5.0])
    for value, expected_out, expected_lse in ((math.inf, 0.0, math.inf), (-math.inf, 5.0, 1.0)):
        sink = torch.full((2, 1), value, dtype=torch.float64, requires_grad=True)
        out, lse, _ = reference_attention(q, k, v, [(0, 1, 0, 1, 0)], sink=sink)
        assert out.item() == expected_out and lse.item() == expected_lse
        out.sum().backward()
        assert all(x.grad.isfinite().all() for x in (q, k, v, sink)) and (sink.grad == 0).all()


def test_group_reads_its_kv_head():
    q = torch.zeros(1, 6, 1, dtype=torch.float64)
    k = torch.zeros(1, 2, 1, dtype=torch.float64)
    v = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]], dtype=torch.float64)
    out, _, _ = reference_attention(q, k, v, [(0, 1, 0, 1, 0)])
    assert out[0].tolist() == [[1, 2]] * 3 + [[3, 4]] * 3


@pytest.mark.parametrize(
    ("mask_type", "shape", "expected"),
    [
        (1, (2, 3), [[1, 1, 0], [1, 1, 1]]),
        (1, (3, 2), [[0, 0], [1, 0], [1, 1]]),
        (2, (2, 3), [[1, 1, 1], [0, 1, 1]]),
        (2, (3, 2), [[1, 1], [0, 1], [0, 0]]),
        (3, (2, 3), [[1, 1, 0], [0, 1, 1]]),
        (3, (3, 2), [[0, 0], [0, 0], [0, 0]]),
        (3, (2, 2), [[1, 0], [0, 1]]),
        (0, (1, 2), [[1, 1]]),
    ],
)
def test_types(mask_type, shape, expected):
    rows, columns = shape
    counts = testing.dense_counts([(0, rows, 0, columns, mask_type)], rows, columns)
    assert counts.tolist() == expected
    assert masks.area([(0, rows, 0, columns, mask_type)]) == int(counts.sum())


@pytest.mark.parametrize("kind", masks.KINDS + masks.ODD)
def test_masks_of_the_suite_cover_no_pair_twice(kind):
    slices = masks.make(kind, 300, window=40, block=32)
    counts = testing.dense_counts(slices, 300, 300)
    assert counts.max() == 1 and int(counts.sum()) == masks.area(slices)


def test_budget_refuses_what_it_should():
    exact = torch.tensor([1.0, 2.0, -math.inf], dtype=torch.float64)
    baseline = exact.float() + torch.tensor([1e-6, 0, 0])
    testing.assert_within_budget(exact.float(), baseline, exact, name="x")
    for bad in ([1.0, 2.1, -math.inf], [1.0, 2.0, math.inf], [1.0, math.nan, -math.inf], [1.0, 2.0, 0.0]):
        with pytest.raises(AssertionError, match="x: "):
            testing.assert_within_budget(torch.tensor(bad), baseline, exact, name="x")


def test_poisoned_memory_is_nan():
    with testing.poisoned_empty():
        x = torch.empty(3)
        assert x.isnan().all() and torch.empty_like(x).isnan().all() and x.new_empty(2).isnan().all()
        assert torch.empty(2, dtype=torch.int32).dtype == torch.int32
