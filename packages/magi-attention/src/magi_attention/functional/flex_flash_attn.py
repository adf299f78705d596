"""Attention over slices on one device, under its public names."""

from magi_core.flex_attn import AttnForwardMeta, flex_flash_attn_func

from .range_merge import merge_ranges

__all__ = ["AttnForwardMeta", "flex_flash_attn_func", "merge_ranges"]
