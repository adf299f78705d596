"""Token-level sparse attention: an indexer chooses keys, and every query attends to those that an index map lists."""

from .api import dsa_attn_func
from .indexer import indexer_scores, lightning_indexer

__all__ = ["dsa_attn_func", "indexer_scores", "lightning_indexer"]
