"""Benchmarks: one registry of cases and one driver. ``python -m benchmarks --help``."""
