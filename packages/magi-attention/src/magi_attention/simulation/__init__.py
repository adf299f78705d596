"""Predicted times of distributed attention: our plans and other systems' shapes on one cost model.

A prediction, never a decision: floats are fine here. ``python -m magi_attention simulate`` prints it, beside the errors
that the same model makes on published figures.
"""

from .machine import H100, H200, Machine, Prediction, Step, Work
from .masks import Documents
from .published import errors, figures
from .shapes import METHODS, ours, predict

__all__ = [
    "H100",
    "H200",
    "METHODS",
    "Documents",
    "Machine",
    "Prediction",
    "Step",
    "Work",
    "errors",
    "figures",
    "ours",
    "predict",
]
