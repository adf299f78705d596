"""Gather, fill and reduce rows by ranges; the operators of ``magi_comm``."""

from magi_comm.range_ops import range_fill_, range_gather, range_reduce

__all__ = ["range_fill_", "range_gather", "range_reduce"]
