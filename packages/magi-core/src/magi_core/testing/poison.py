"""Fresh memory that cannot pass for a result."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

__all__ = ["poisoned_empty"]


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(allocate)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        x = allocate(*args, **kwargs)
        if x.dtype.is_floating_point or x.dtype.is_complex:
            with torch.no_grad():
                x.fill_(float("nan"))
        return x

    return wrapper


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """While open, ``torch.empty``, ``empty_like``, ``empty_strided`` and ``Tensor.new_empty`` give NaN.

    An element that is never written then shows in any comparison. Only calls from Python are caught.
    """
    with contextlib.ExitStack() as stack:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (Tensor, "new_empty"),
        ):
            stack.enter_context(mock.patch.object(owner, name, _poisoned(getattr(owner, name))))
        yield
