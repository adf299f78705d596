"""Settings of the tests of magi-core."""

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("default", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("nightly", max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def fresh_memory_is_nan():
    """An element that is never written shows as NaN. Tests that run without torch stay without it."""
    if "torch" not in sys.modules:
        yield
        return
    from magi_core.testing.poison import poisoned_empty

    with poisoned_empty():
        yield
