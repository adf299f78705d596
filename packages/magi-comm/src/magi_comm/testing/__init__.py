"""Worlds for tests: ranks as threads (`ThreadWorld`) and as persistent gloo processes (`ProcessPool`)."""

from .process_pool import ProcessPool, process_pool
from .thread_world import RankAborted, RankFailure, ThreadCommunicator, ThreadWorld

__all__ = [
    "ProcessPool",
    "RankAborted",
    "RankFailure",
    "ThreadCommunicator",
    "ThreadWorld",
    "process_pool",
]
