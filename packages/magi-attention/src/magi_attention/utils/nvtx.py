"""Names in a profiler's timeline, when ``MAGI_ATTENTION_PROFILE_MODE`` asks for them.

Without it a named range costs one comparison, and its label is never built. Names appear in Nsight Systems (NVTX, on
CUDA) and in ``torch.profiler``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from .. import env

_P = ParamSpec("_P")
_R = TypeVar("_R")
_cuda: Any = torch.cuda  # its nvtx and profiler are not annotated


@contextmanager
def _named(name: str) -> Iterator[None]:
    is_cuda = torch.cuda.is_available()
    if is_cuda:
        _cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        if is_cuda:
            _cuda.nvtx.range_pop()


@contextmanager
def add_nvtx_event(event_name: str | Callable[[], str]) -> Iterator[None]:
    """Name the block.

    Args:
        event_name: the name, or a function that makes it, called only when profiling.
    """
    if not env.is_profile_mode_enable():
        yield
        return
    with _named(event_name() if callable(event_name) else event_name):
        yield


def instrument_nvtx(func: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: name every call after the function."""
    name = getattr(func, "__qualname__", repr(func))

    @wraps(func)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not env.is_profile_mode_enable():
            return func(*args, **kwargs)
        with _named(name):
            return func(*args, **kwargs)

    return wrapped


def switch_profile(
    iter_id: int, start: int, end: int, profile_ranks: Sequence[int], event_name: str | None = None
) -> None:
    """Call at the head of every iteration: on the given ranks, CUDA profiling runs from iteration ``start`` up to
    ``end`` (exclusive), each iteration named ``event_name`` or ``iter{iter_id}``.

    Does nothing without CUDA.

    Raises:
        ValueError: ``end`` is not after ``start``.
    """
    import torch.distributed as dist

    if end <= start:
        raise ValueError(f"end must be after start={start}, got {end}")
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if rank not in profile_ranks or not torch.cuda.is_available():
        return
    if iter_id == start:
        _cuda.profiler.start()
    if start < iter_id <= end:
        _cuda.nvtx.range_pop()
    if iter_id == end:
        _cuda.profiler.stop()
    if start <= iter_id < end:
        _cuda.nvtx.range_push(event_name or f"iter{iter_id}")
