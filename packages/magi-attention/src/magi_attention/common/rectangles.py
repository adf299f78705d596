"""Lists of slices with diagonal bands; the class of ``magi_core``."""

from magi_core.rectangles import AttnRectangles

__all__ = ["AttnRectangles"]
