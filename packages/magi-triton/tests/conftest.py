"""Fixtures of the operator tests. Without a GPU every kernel runs in Triton's interpreter."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from magi_triton import backend_info


@pytest.fixture
def device():
    """Where kernels run; skips where none can."""
    if backend_info.why_not() is not None:
        pytest.skip(backend_info.why_not())
    return backend_info.device


@pytest.fixture(autouse=True)
def nan_memory(monkeypatch):
    """Fresh memory is NaN: an element that no kernel writes cannot pass."""

    def poisoned(make):
        def wrapped(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() and type(x) is torch.Tensor else x

        return wrapped

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
