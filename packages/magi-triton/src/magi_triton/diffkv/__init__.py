"""Decode attention over a paged cache whose keys and values differ in head dim."""
