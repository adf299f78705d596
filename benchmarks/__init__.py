"""Benchmarks: one registry of cases and one driver. ``python -m benchmarks --help``."""

import os

# Before torch is imported. OpenMP threads that spin at barriers measure the neighbours: on two cores shared with
# another process the blockwise backend took 2 to 16 s instead of 1.7 s. Ours and rivals run under the same policy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
