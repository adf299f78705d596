"""What tests of this and of other packages compare against: the fp64 reference, budgets, masks, poisoned memory."""

from . import masks
from .budget import assert_within_budget
from .case import AttentionCase, check_attention
from .poison import poisoned_empty
from .reference import dense_counts, reference_attention, same_precision_attention

__all__ = [
    "AttentionCase",
    "assert_within_budget",
    "check_attention",
    "dense_counts",
    "masks",
    "poisoned_empty",
    "reference_attention",
    "same_precision_attention",
]
