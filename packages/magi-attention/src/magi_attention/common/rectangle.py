"""A slice with a diagonal band; the class of ``magi_core``."""

from magi_core.rectangles import AttnRectangle

__all__ = ["AttnRectangle"]
