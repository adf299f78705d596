"""Group collectives, as ``magi_comm`` has them, under the public package."""

from magi_comm import (
    Communicator,
    GroupReduceOp,
    WorkWithPostProcessFn,
    as_communicator,
    group_cast,
    group_reduce,
)

from ..env.comm import dsink_all_reduce_op  # the name under which the public quickstart looks it up

__all__ = [
    "Communicator",
    "GroupReduceOp",
    "WorkWithPostProcessFn",
    "as_communicator",
    "dsink_all_reduce_op",
    "group_cast",
    "group_reduce",
]
