"""Handles of exchanges in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from .groups import Work

__all__ = ["ExchangeWork", "WorkWithPostProcessFn"]

T = TypeVar("T")


class ExchangeWork(Generic[T]):
    """An exchange in flight; ``wait`` ends it and gives its result, each further ``wait`` the same result.

    The tensors that were handed in must stay unchanged until then; a result that was given as an argument
    (``out``, ``into``) is complete only after ``wait``.
    """

    def __init__(self, work: Work, finish: Callable[[], T]) -> None:
        self._work: Work = work
        self._finish: Callable[[], T] | None = finish
        self._result: T

    def wait(self) -> T:
        """Wait (on CUDA: order the current stream behind the exchange), unpack, and return the result."""
        if self._finish is not None:
            self._work.wait()
            finish, self._finish = self._finish, None
            self._result = finish()
        return self._result

    def is_completed(self) -> bool:
        """Whether the transfer is over (the unpacking is done by ``wait``)."""
        return self._work.is_completed()


def _wait_all(work: Any) -> None:
    """Wait for works, CUDA streams, CUDA events, and lists of them."""
    if work is None:
        return
    if isinstance(work, (list, tuple)):
        for item in work:
            _wait_all(item)
    elif hasattr(work, "wait_stream") or hasattr(work, "record_event"):  # a stream
        import torch

        torch.cuda.current_stream(work.device).wait_stream(work)
    else:
        work.wait()


class WorkWithPostProcessFn:
    """A group collective in flight: ``wait_post_process`` waits, runs the post-processing once, returns the result.

    Args:
        work: what to wait for: a work, a CUDA stream or event, or a (nested) list of them.
        post_process_fn: takes what is given to ``wait_post_process`` and returns the final tensor or tensors.
        async_op: when false, ``work`` is waited for at once.
    """

    def __init__(
        self,
        work: Work | Iterable[Any] | None = None,
        post_process_fn: Callable[..., Any] | None = None,
        async_op: bool = False,
    ) -> None:
        self.work: Any = work
        self.post_process_fn: Callable[..., Any] | None = post_process_fn or _first
        self.async_op = async_op
        if not async_op:
            _wait_all(self.work)
            self.work = None

    def wait_post_process(self, *args: Any, **kwargs: Any) -> Any:
        """Make the current stream wait for the work, post-process, and return the final tensor or tensors.

        Raises:
            RuntimeError: on the second call.
        """
        if self.post_process_fn is None:
            raise RuntimeError("wait_post_process must be called exactly once for a work, got a second call")
        _wait_all(self.work)
        post_process, self.post_process_fn, self.work = self.post_process_fn, None, None
        return post_process(*args, **kwargs)


def _first(*args: Any) -> Any:
    return args[0] if len(args) == 1 else (args or None)
