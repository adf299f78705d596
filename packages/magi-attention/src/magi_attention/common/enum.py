"""Enumerations and literals of the public surface. Values are the public strings; nothing here imports torch."""

from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from magi_core.mask_type import AttnMaskType

__all__ = [
    "AttnMaskType",
    "AttnOverlapMode",
    "AttnRole",
    "AttnSinkLayout",
    "AttnType",
    "DispatchAlgType",
    "DynamicAttnAlgType",
    "GroupReduceOp",
    "GrpCollBufferName",
    "MagiAttentionKernelBackend",
    "MagiAttentionPrecision",
    "OverlapAlgType",
]

GroupReduceOp = Literal["sum", "avg", "lse"]
"""How ``group_reduce`` combines partial values; ``lse`` merges pairs (out, lse) by log-sum-exp."""

AttnSinkLayout = Literal["sh", "shd", "ssh"]
"""Layout of a sink: ``sh`` (s_sink, num_heads_q), ``ssh`` (total_q, s_sink, num_heads_q). ``shd`` is named by the
public type, and refused with NotImplementedError wherever a sink is taken."""


class AttnType(Enum):
    """Whether queries and keys are the same tokens."""

    SELF_ATTN = "self_attn"
    CROSS_ATTN = "cross_attn"


class AttnRole(Enum):
    """What a tensor is to the attention."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"


class AttnOverlapMode(Enum):
    """Who chooses the number of remote stages: the caller (static) or the cost model (dynamic)."""

    STATIC = "static"
    DYNAMIC = "dynamic"


class OverlapAlgType(Enum):
    """How the remote keys are cut into stages."""

    UNIFORM = "uniform"
    GREEDY = "greedy"


class DispatchAlgType(Enum):
    """How chunks of queries are given to ranks; see the classes in ``magi_attention.config``."""

    LOWER_BOUND = "lower_bound"
    DYNAMIC_PROGRAMMING = "dynamic_programming"
    BINARY_SEARCH = "binary_search"
    MIN_HEAP = "min_heap"
    TOPP_HEAP = "topp_heap"
    BACKTRACKING_PRUNING = "backtracing_pruning"  # the public value is spelt so
    RANDOM_SELECT = "random_select"
    SEQUENTIAL_SELECT = "sequential_select"
    BATCH_TOPP_HEAP = "batch_topp_heap"
    SORTED_SEQUENTIAL_SELECT = "sorted_sequential_select"
    BALANCED = "balanced"


class DynamicAttnAlgType(Enum):
    """How tasks are placed when queries may move too."""

    NON_COMMUNICATION_QO = "non_communication_qo"
    GREEDY_RANDOM_GRID = "greedy_random_grid"
    SIMPLEX_NETWORK_FLOW = "simplex_network_flow"
    FAST_SIMPLEX_NETWORK_FLOW = "fast_simplex_network_flow"
    BINARY_GREEDY = "binary_greedy"
    BINARY_GREEDY_PARALLEL = "binary_greedy_parallel"


class MagiAttentionKernelBackend(Enum):
    """Which implementation computes attention; values of ``MAGI_ATTENTION_KERNEL_BACKEND``."""

    FFA = "ffa"
    SDPA = "sdpa"
    SDPA_OL = "sdpa_ol"
    FA4 = "fa4"


class MagiAttentionPrecision(Enum):
    """Precision in which ``calc_attn`` computes, whatever the dtype of its inputs; ``MAGI_ATTENTION_PRECISION``."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP64 = "fp64"

    def to_torch_dtype(self) -> "torch.dtype":
        """The torch dtype of this precision."""
        import torch

        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[self.value]


class GrpCollBufferName(Enum):
    """Names of the communication buffers a group may own."""

    GROUP_CAST_DEFAULT = "group_cast_default"
    GROUP_REDUCE_DEFAULT = "group_reduce_default"
    GROUP_CAST_QO = "group_cast_qo"
    GROUP_REDUCE_QO = "group_reduce_qo"


def __getattr__(name: str) -> Any:
    if name == "AttnMaskType":
        from magi_core.mask_type import AttnMaskType

        return AttnMaskType
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
