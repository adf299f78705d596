"""Group collectives, as ``magi_comm`` has them, under the public package."""

from magi_comm import (
    Communicator,
    GroupReduceOp,
    WorkWithPostProcessFn,
    as_communicator,
    group_cast,
    group_reduce,
)

__all__ = [
    "Communicator",
    "GroupReduceOp",
    "WorkWithPostProcessFn",
    "as_communicator",
    "group_cast",
    "group_reduce",
]
