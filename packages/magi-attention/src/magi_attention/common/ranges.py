"""Lists of half-open intervals; the class of ``magi_core``."""

from magi_core.ranges import AttnRanges, check_valid_cu_seqlens, is_valid_cu_seqlens

__all__ = ["AttnRanges", "check_valid_cu_seqlens", "is_valid_cu_seqlens"]
