"""Shared by the tests across packages: filters from the environment, worlds of ranks, one thread per operator."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # pipeline_cases and env_filter, which worker processes import too

import env_filter

torch.set_num_threads(1)
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("default", max_examples=15, **_COMMON)
settings.register_profile("nightly", max_examples=500, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "nightly" if env_filter.is_nightly() else "default"))


@pytest.hookimpl(tryfirst=True)  # before ``-m`` looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts processes; deselect what ``MAGI_ATTENTION_TEST_<DIMENSION>`` does not choose."""
    for item in items:
        if "process_pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.distributed)
    chosen = env_filter.filters()
    if not chosen:
        return
    kept, dropped = [], []
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        (kept if env_filter.is_chosen(params, chosen) else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.fixture(scope="session")
def thread_world() -> Callable[[int], object]:
    """``thread_world(n)``: the session's world of ``n`` ranks as threads."""
    from magi_comm.testing import ThreadWorld

    worlds: dict[int, ThreadWorld] = {}

    def get(size: int) -> ThreadWorld:
        return worlds.setdefault(size, ThreadWorld(size))

    return get


@pytest.fixture(scope="session")
def process_pool() -> Iterator[object]:
    """Eight persistent gloo processes, started when a test first asks."""
    from magi_comm.testing import ProcessPool

    with ProcessPool(8, preload=["magi_attention.api", "magi_core.testing", "torch._dynamo"]) as pool:
        yield pool
