"""The one reader of the environment in this package.

| name | type | default | meaning |
|---|---|---|---|
| ``TRITON_INTERPRET`` | flag | 0 | Triton's own: kernels run in its interpreter, on CPU tensors too |
"""

from __future__ import annotations

import os

NAMES = ("TRITON_INTERPRET",)


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter. Triton reads the same variable when it decorates a kernel."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
