"""Worlds for tests: ranks as threads (`ThreadWorld`) and as persistent gloo processes (`ProcessPool`)."""

from .thread_world import RankAborted, RankFailure, ThreadCommunicator, ThreadWorld

__all__ = ["RankAborted", "RankFailure", "ThreadCommunicator", "ThreadWorld"]
