"""Attention with one pair of queries and keys for near positions and another for far ones."""
