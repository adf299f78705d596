"""What the environment asked for, by the public names: communication.

Each is read from the one snapshot; those whose variable has no effect here say what is in force.
"""

from typing import Literal

from .reader import snapshot

__all__ = [
    "dsink_all_reduce_op",
    "ffa_bwd_sm_margin_save_for_comm",
    "ffa_fwd_sm_margin_save_for_comm",
    "is_bwd_hide_tail_reduce_enable",
    "is_bwd_high_precision_reduce_enable",
    "is_fwd_high_precision_reduce_enable",
    "is_hierarchical_comm_enable",
    "is_native_grpcoll_enable",
    "is_qo_comm_enable",
]


def dsink_all_reduce_op() -> Literal["none", "sum", "avg"]:
    """Reduction of a sink's gradient over the group, where ``DistAttnConfig.dsink_reduce`` leaves it open."""
    return snapshot().dsink_all_reduce_op


def ffa_fwd_sm_margin_save_for_comm() -> int:
    """SMs the forward kernel leaves to communication."""
    return snapshot().ffa_forward_sm_margin


def ffa_bwd_sm_margin_save_for_comm() -> int:
    """SMs the backward kernel leaves to communication."""
    return snapshot().ffa_backward_sm_margin


def is_hierarchical_comm_enable() -> bool:
    """False: a 2-D mesh is asked for by passing one."""
    return False


def is_qo_comm_enable() -> bool:
    """False: queries stay where they are dispatched."""
    return False


def is_native_grpcoll_enable() -> bool:
    """False: the transport is torch.distributed's."""
    return False


def is_fwd_high_precision_reduce_enable() -> bool:
    """False: no partial out travels; the stages of a rank share a float32 one."""
    return False


def is_bwd_high_precision_reduce_enable() -> bool:
    """False: partial gradients travel in the dtype of k, and are summed in float32."""
    return False


def is_bwd_hide_tail_reduce_enable() -> bool:
    """False: the order of backward stages is the plan's."""
    return False
