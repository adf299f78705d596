"""The keep mask: the kernel (in Triton's interpreter on a CPU) against Philox in PyTorch."""

import pytest
import torch
from magi_triton import backend_info
from magi_triton.dropout.reference import philox
from magi_triton.testing import philox_keep_mask, recompute_mask

runnable = pytest.mark.skipif(backend_info.why_not() is not None, reason=str(backend_info.why_not()))
DEVICE = backend_info.device


def test_philox_known_answers():
    # Random123's kat_vectors, philox4x32 with 10 rounds: counter and key all zero, then all ones in the low two words.
    assert philox(torch.tensor([0]), 0, 10).tolist() == [0x6627E8D5]


@runnable
@pytest.mark.parametrize("seed", [0, 55, 2**40 + 7])
@pytest.mark.parametrize("offset", [0, 3, 2**33 + 5, 117_000_000_000_000_000])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.8])
def test_kernel_draws_what_the_reference_draws(seed, offset, dropout_p):
    shape = (2, 3, 5, 67)
    got = recompute_mask(*shape, dropout_p, seed, offset, DEVICE)
    assert got.dtype == torch.bool
    assert torch.equal(got.cpu(), philox_keep_mask(*shape, dropout_p, seed, offset))


@runnable
def test_share_that_is_dropped():
    keep = recompute_mask(2, 2, 64, 256, 0.3, 94, 0, DEVICE)
    assert abs(keep.float().mean().item() - 0.7) < 0.01


@pytest.mark.parametrize("shape", [(2, 2, 3, 4), (1, 0, 3, 4)])
def test_nothing_dropped(shape):
    keep = recompute_mask(*shape, 0.0, 1, 2, DEVICE)
    assert keep.shape == shape
    assert keep.all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"M": -1}, "M must not be negative, got -1"),
        ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\), got 1.0"),
        ({"seed": -3}, r"seed must be in \[0, 2\*\*63\), got -3"),
        ({"offset": 2**63}, r"offset must be in \[0, 2\*\*63\), got"),
    ],
)
def test_bad_arguments(change, message):
    call = {"B": 1, "H": 1, "M": 2, "N": 2, "dropout_p": 0.5, "seed": 0, "offset": 0, "device": DEVICE, **change}
    with pytest.raises(ValueError, match=message):
        recompute_mask(**call)
