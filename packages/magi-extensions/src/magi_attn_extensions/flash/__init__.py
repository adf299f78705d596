"""FlashAttention 2, 3 and 4 with attention sink: one correction around each library's own kernels.

``api`` (public functions) -> ``run`` (forward and backward: provider, then sink) -> one module a provider.
"""

from .api import (
    fa2_func_with_sink,
    fa2_kvpacked_func_with_sink,
    fa2_qkvpacked_func_with_sink,
    fa2_varlen_func_with_sink,
    fa2_varlen_kvpacked_func_with_sink,
    fa2_varlen_qkvpacked_func_with_sink,
    fa3_func_with_sink,
    fa3_qkvpacked_func_with_sink,
    fa3_varlen_func_with_sink,
    fa4_func_with_sink,
    fa4_varlen_func_with_sink,
)

__all__ = [
    "fa2_func_with_sink",
    "fa2_kvpacked_func_with_sink",
    "fa2_qkvpacked_func_with_sink",
    "fa2_varlen_func_with_sink",
    "fa2_varlen_kvpacked_func_with_sink",
    "fa2_varlen_qkvpacked_func_with_sink",
    "fa3_func_with_sink",
    "fa3_qkvpacked_func_with_sink",
    "fa3_varlen_func_with_sink",
    "fa4_func_with_sink",
    "fa4_varlen_func_with_sink",
]

NAMES = tuple(__all__)
