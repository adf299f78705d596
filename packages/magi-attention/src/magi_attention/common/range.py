"""One half-open interval; the class of ``magi_core``."""

from magi_core.ranges import AttnRange, RangeError

__all__ = ["AttnRange", "RangeError"]
