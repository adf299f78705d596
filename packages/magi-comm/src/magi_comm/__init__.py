"""Group collectives over ``torch.distributed``: cast ranges of rows to any set of ranks, and reduce them back."""

from .groups import Communicator, GroupCommunicator, SingleCommunicator, Work, as_communicator
from .range_exchange import RangeExchange
from .states import merge_states
from .work import ExchangeWork, WorkWithPostProcessFn

__all__ = [
    "Communicator",
    "ExchangeWork",
    "GroupCommunicator",
    "RangeExchange",
    "SingleCommunicator",
    "Work",
    "WorkWithPostProcessFn",
    "as_communicator",
    "merge_states",
]
