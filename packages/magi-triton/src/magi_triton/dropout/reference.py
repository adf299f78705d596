"""Philox 4x32 in PyTorch integers: slow, plain, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIER_A, _MULTIPLIER_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85


def _multiply(x: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32-bit by 32-bit product, in int64 that never passes 2**63."""
    low_half, high_half = x & 0xFFFF, x >> 16
    low, high = low_half * multiplier, high_half * multiplier
    total = low + ((high & 0xFFFF) << 16)
    return ((high >> 16) + (total >> 32)) & _LOW, total & _LOW


def philox(index: Tensor, seed: int, rounds: int) -> Tensor:
    """First of the four 32-bit words that Philox draws for each 64-bit index, as int64 in ``[0, 2**32)``."""
    c0, c1 = index & _LOW, (index >> 32) & _LOW
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(rounds):
        high_a, low_a = _multiply(c0, _MULTIPLIER_A)
        high_b, low_b = _multiply(c2, _MULTIPLIER_B)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + _WEYL_A) & _LOW, (k1 + _WEYL_B) & _LOW
    return c0


def philox_keep_mask(
    B: int, H: int, M: int, N: int, dropout_p: float, seed: int, offset: int, rounds: int = 6
) -> Tensor:
    """What :func:`magi_triton.testing.recompute_mask` must return, on the CPU.

    A word ``w`` becomes a uniform number as Triton makes it: read as int32, mapped to ``[0, 2**31)`` by ``-w - 1``
    where negative, and scaled by 4.6566127342e-10 in float32.
    """
    word = philox(offset + torch.arange(B * H * M * N, dtype=torch.int64), seed, rounds)
    positive = torch.where(word >= 2**31, 2**32 - word - 1, word)
    uniform = positive.float() * torch.tensor(4.6566127342e-10, dtype=torch.float32)
    return (uniform > torch.tensor(dropout_p, dtype=torch.float32)).view(B, H, M, N)
