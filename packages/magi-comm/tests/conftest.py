"""Shared by the tests of magi_comm: one thread per operator, no deadlines, one pool of gloo processes."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("default", max_examples=40, **_COMMON)
settings.register_profile("nightly", max_examples=1000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN (or a large odd integer), so an element that nobody wrote cannot pass."""
    real_empty = torch.empty

    def empty(*args, **kwargs):  # type: ignore[no-untyped-def]
        tensor = real_empty(*args, **kwargs)
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif tensor.dtype == torch.uint8:
            tensor.fill_(0xFF)  # as floats of any width: NaN
        return tensor

    monkeypatch.setattr(torch, "empty", empty)
