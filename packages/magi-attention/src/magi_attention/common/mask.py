"""Masks of slices; the classes of ``magi_core``."""

from magi_core.mask import Mask
from magi_core.rectangles import AttnMask

__all__ = ["AttnMask", "Mask"]
