"""Decode attention over a paged cache."""
