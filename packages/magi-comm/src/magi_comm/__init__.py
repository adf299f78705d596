"""Group collectives over ``torch.distributed``: cast ranges of rows to any set of ranks, and reduce them back."""

from ._version import __version__
from .counting import CountingCommunicator, Traffic
from .group_collective import GroupReduceOp, group_cast, group_reduce
from .groups import Communicator, GroupCommunicator, GroupLike, SingleCommunicator, Work, as_communicator
from .range_exchange import RangeExchange
from .range_ops import range_fill_, range_gather, range_reduce
from .states import merge_states
from .two_level import TwoLevelCommunicator, TwoLevelExchange, make_exchange
from .work import ExchangeWork, WorkWithPostProcessFn

__all__ = [
    "Communicator",
    "CountingCommunicator",
    "ExchangeWork",
    "GroupCommunicator",
    "GroupLike",
    "GroupReduceOp",
    "RangeExchange",
    "SingleCommunicator",
    "Traffic",
    "TwoLevelCommunicator",
    "TwoLevelExchange",
    "Work",
    "WorkWithPostProcessFn",
    "__version__",
    "as_communicator",
    "group_cast",
    "group_reduce",
    "make_exchange",
    "merge_states",
    "range_fill_",
    "range_gather",
    "range_reduce",
]
