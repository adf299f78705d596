"""Small helpers on lists: lengths and prefix sums, permutations, factors."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up, in integers (exact beyond 2**53).

    Raises:
        ValueError: ``b`` is not positive.
    """
    if b <= 0:
        raise ValueError(f"b must be positive, got {b}")
    return -(-a // b)


def seqlens2cu_seqlens(seqlens: Sequence[int]) -> list[int]:
    """Lengths to prefix sums from 0: ``[3, 4]`` to ``[0, 3, 7]``.

    Raises:
        ValueError: a negative length.
    """
    if any(n < 0 for n in seqlens):
        raise ValueError(f"seqlens must not be negative, got {list(seqlens)}")
    return [0, *accumulate(seqlens)]


def cu_seqlens2seqlens(cu_seqlens: Sequence[int]) -> list[int]:
    """Prefix sums from 0 to lengths: ``[0, 3, 7]`` to ``[3, 4]``.

    Raises:
        ValueError: they do not start at 0, or fall.
    """
    if len(cu_seqlens) == 0 or cu_seqlens[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {list(cu_seqlens)}")
    seqlens = [end - start for start, end in pairwise(cu_seqlens)]
    if any(n < 0 for n in seqlens):
        raise ValueError(f"cu_seqlens must never fall, got {list(cu_seqlens)}")
    return seqlens


def flatten_nested_list(nested: Iterable[Any]) -> list[Any]:
    """The leaves of lists within lists, in order. Tuples and strings are leaves."""
    flat: list[Any] = []
    stack = [iter(nested)]
    while stack:
        for item in stack[-1]:
            if isinstance(item, list):
                stack.append(iter(item))
                break
            flat.append(item)
        else:
            stack.pop()
    return flat


def perm_idxs2unperm_idxs(perm_idxs: Sequence[int]) -> list[int]:
    """The inverse of a permutation of ``0 .. n - 1``.

    Raises:
        ValueError: it is not a permutation.
    """
    inverse = [-1] * len(perm_idxs)
    for place, index in enumerate(perm_idxs):
        if not 0 <= index < len(inverse) or inverse[index] != -1:
            raise ValueError(f"perm_idxs must be a permutation of 0 .. {len(inverse) - 1}, got {list(perm_idxs)}")
        inverse[index] = place
    return inverse


def wrap_to_list(x: Any, broadcast_to_length: int = 1) -> list[Any]:
    """A list or tuple as a list; anything else repeated ``broadcast_to_length`` times."""
    return list(x) if isinstance(x, (list, tuple)) else [x] * broadcast_to_length


def is_list_value_all(
    values: Sequence[Any], val: Any = None, just_same: bool = False, allow_empty: bool = False
) -> bool:
    """Whether every element equals ``val``, or with ``just_same`` the first element.

    An empty list gives ``allow_empty``.
    """
    if len(values) == 0:
        return allow_empty
    expected = values[0] if just_same else val
    return all(value == expected for value in values)


def is_list_value_any(
    values: Sequence[Any], val: Any = None, just_same: bool = False, allow_empty: bool = False
) -> bool:
    """Whether some element equals ``val``, or with ``just_same`` whether two elements are equal.

    An empty list gives ``allow_empty``.
    """
    if len(values) == 0:
        return allow_empty
    if just_same:
        return any(value in values[:place] for place, value in enumerate(values))
    return any(value == val for value in values)


def is_list_type_all(
    values: Sequence[Any], _type: type | None = None, just_same: bool = False, allow_empty: bool = False
) -> bool:
    """Whether every element is a ``_type``, or with ``just_same`` an instance of the first element's type.

    An empty list gives ``allow_empty``.

    Raises:
        TypeError: neither a type nor ``just_same`` is given.
    """
    if not just_same and _type is None:
        raise TypeError("_type must be given unless just_same=True, got None")
    if len(values) == 0:
        return allow_empty
    expected = type(values[0]) if just_same else _type
    assert expected is not None
    return all(isinstance(value, expected) for value in values)


def pad_and_pack_tensors(
    tensors: Sequence[Tensor], target_length: int, padding_value: float = 0.0, dtype: torch.dtype | None = None
) -> Tensor:
    """Stack one-dimensional tensors, each padded at its end: ``(len(tensors), target_length)``.

    Args:
        tensors: on one device, none longer than ``target_length``.
        padding_value: of the padding.
        dtype: of the result; that of the first tensor when None.

    Raises:
        ValueError: no tensor, one of more than one dim, or one too long.
    """
    if len(tensors) == 0:
        raise ValueError("tensors must not be empty")
    packed = tensors[0].new_full((len(tensors), target_length), padding_value, dtype=dtype or tensors[0].dtype)
    for row, tensor in zip(packed, tensors, strict=True):
        if tensor.dim() != 1 or len(tensor) > target_length:
            raise ValueError(
                f"tensors must be one-dimensional and at most {target_length} long, got shape {tuple(tensor.shape)}"
            )
        row[: len(tensor)] = tensor
    return packed


def get_factors(n: int) -> list[int]:
    """Divisors of ``n``, ascending.

    Raises:
        ValueError: ``n`` is not positive.
    """
    if n <= 0:
        raise ValueError(f"n must be positive, got {n}")
    small, large, i = [], [], 1
    while i * i <= n:
        if n % i == 0:
            small.append(i)
            if i * i != n:
                large.append(n // i)
        i += 1
    return small + large[::-1]


def find_factors_in_range(n: int, lower: int, upper: int) -> list[int]:
    """Divisors of ``n`` within ``[lower, upper]``, ascending."""
    return [factor for factor in get_factors(n) if lower <= factor <= upper]


def transpose_matrix(matrix: Sequence[Sequence[_T]]) -> list[list[_T]]:
    """Rows to columns.

    Raises:
        ValueError: rows of different length.
    """
    if any(len(row) != len(matrix[0]) for row in matrix):
        raise ValueError(f"matrix must have rows of one length, got lengths {[len(row) for row in matrix]}")
    return [list(column) for column in zip(*matrix, strict=True)]


def argmin(values: Iterable[Any], key: Callable[[Any], Any] = lambda x: x) -> int:
    """Index of the smallest element; of the first among equal ones."""
    return min(enumerate(values), key=lambda pair: key(pair[1]))[0]


def argmax(values: Iterable[Any], key: Callable[[Any], Any] = lambda x: x) -> int:
    """Index of the largest element; of the first among equal ones."""
    return max(enumerate(values), key=lambda pair: key(pair[1]))[0]


def argsort(values: Iterable[Any], key: Callable[[Any], Any] = lambda x: x) -> list[int]:
    """Indices in ascending order of the elements; equal ones keep their order."""
    return [index for index, _ in sorted(enumerate(values), key=lambda pair: key(pair[1]))]
