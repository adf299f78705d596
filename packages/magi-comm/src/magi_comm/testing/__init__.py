"""Worlds for tests: ranks as threads (`ThreadWorld`) and as persistent gloo processes (`ProcessPool`)."""

from .processes import ProcessPool, process_pool
from .threads import RankAborted, RankFailure, ThreadCommunicator, ThreadWorld
from .transfers import Transfers, random_transfers

__all__ = [
    "ProcessPool",
    "RankAborted",
    "RankFailure",
    "ThreadCommunicator",
    "ThreadWorld",
    "Transfers",
    "process_pool",
    "random_transfers",
]
