"""Attention on tensors: one device, many ranks, and the pieces of which partial results are put together."""

from typing import TYPE_CHECKING

from .._lazy import lazy_names

if TYPE_CHECKING:
    from .dist_attn import dispatch_func as dispatch_func
    from .dist_attn import dist_attn_func as dist_attn_func
    from .dist_attn import roll_func as roll_func
    from .dist_attn import roll_simple_func as roll_simple_func
    from .dist_attn import undispatch_func as undispatch_func
    from .fa4 import ffa_fa4_func as ffa_fa4_func
    from .flex_flash_attn import flex_flash_attn_func as flex_flash_attn_func
    from .range_merge import merge_ranges as merge_ranges
    from .utils import correct_attn_lse as correct_attn_lse
    from .utils import correct_attn_lse_with_sink as correct_attn_lse_with_sink
    from .utils import correct_attn_out as correct_attn_out
    from .utils import correct_attn_out_lse as correct_attn_out_lse
    from .utils import correct_attn_out_lse_with_sink as correct_attn_out_lse_with_sink
    from .utils import correct_attn_out_with_sink as correct_attn_out_with_sink

_MODULES = {
    ".dist_attn": ("dispatch_func", "dist_attn_func", "roll_func", "roll_simple_func", "undispatch_func"),
    ".fa4": ("ffa_fa4_func",),
    ".flex_flash_attn": ("flex_flash_attn_func",),
    ".range_merge": ("merge_ranges",),
    ".utils": (
        "correct_attn_lse",
        "correct_attn_lse_with_sink",
        "correct_attn_out",
        "correct_attn_out_lse",
        "correct_attn_out_lse_with_sink",
        "correct_attn_out_with_sink",
    ),
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*_LAZY]

__getattr__, __dir__ = lazy_names(__name__, _LAZY)
