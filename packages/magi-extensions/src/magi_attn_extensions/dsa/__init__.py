"""Token-level sparse attention: every query attends to the keys that an index map lists."""

from .api import dsa_attn_func

__all__ = ["dsa_attn_func"]
