"""Backends of the attention operators: ``reference`` (blockwise torch, any device) and ``arch`` (compiled kernels)."""
