"""What the environment asked for, by the public names: computation.

Each is read from the one snapshot; those whose variable has no effect here say what is in force.
"""

from ..common.enum import MagiAttentionKernelBackend, MagiAttentionPrecision
from .reader import snapshot

__all__ = [
    "dist_attn_runtime_dict_size",
    "is_auto_range_merge_enable",
    "is_catgqa_enable",
    "is_cpp_backend_enable",
    "is_deterministic_mode_enable",
    "is_fa4_backend_enable",
    "is_flatten_head_groups_enable",
    "is_profile_mode_enable",
    "is_sanity_check_enable",
    "is_sdpa_backend_enable",
    "kernel_backend",
    "log_level",
    "min_chunks_per_rank",
    "precision",
]


def log_level() -> str:
    """Level of the logger ``magi_attention``, a name of ``logging``."""
    return snapshot().log_level


def kernel_backend() -> MagiAttentionKernelBackend:
    """Which implementation computes attention."""
    return snapshot().kernel_backend


def precision() -> MagiAttentionPrecision | None:
    """What ``calc_attn`` computes in; None keeps the dtype of its inputs."""
    return snapshot().precision


def min_chunks_per_rank() -> int:
    """Chunks per rank when no chunk size is configured."""
    return snapshot().min_chunks_per_rank


def dist_attn_runtime_dict_size() -> int:
    """Plans kept per group; 0 or less keeps the newest only."""
    return snapshot().dist_attn_runtime_dict_size


def is_sanity_check_enable() -> bool:
    """Whether plans are verified by brute force."""
    return snapshot().sanity_check


def is_deterministic_mode_enable() -> bool:
    """Whether the backward is bitwise repeatable."""
    return snapshot().deterministic_mode


def is_profile_mode_enable() -> bool:
    """Whether ranges are named for a profiler."""
    return snapshot().profile_mode


def is_sdpa_backend_enable() -> bool:
    """Whether the torch reference computes attention."""
    return snapshot().kernel_backend is MagiAttentionKernelBackend.SDPA


def is_fa4_backend_enable() -> bool:
    """Whether the backend is called fa4, which here is the fastest of the device, as ffa."""
    return snapshot().kernel_backend is MagiAttentionKernelBackend.FA4


def is_auto_range_merge_enable() -> bool:
    """True: a plan always groups the slices of a query tile."""
    return True


def is_catgqa_enable() -> bool:
    """False: the kernel packs query heads itself."""
    return False


def is_flatten_head_groups_enable() -> bool:
    """False: head groups are not laid out as sequence."""
    return False


def is_cpp_backend_enable() -> bool:
    """True: ranges and plans are always computed by the host library."""
    return True
