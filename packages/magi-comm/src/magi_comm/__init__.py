"""Group collectives over ``torch.distributed``: cast ranges of rows to any set of ranks, and reduce them back."""

from .groups import Communicator, GroupCommunicator, SingleCommunicator, Work, as_communicator

__all__ = ["Communicator", "GroupCommunicator", "SingleCommunicator", "Work", "as_communicator"]
