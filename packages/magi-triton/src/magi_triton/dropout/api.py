"""``recompute_mask``: the keep mask that a forward call with a given seed and offset used."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.device import backend_info

PHILOX_ROUNDS = 6
_BLOCK = 1024


def recompute_mask(
    B: int, H: int, M: int, N: int, dropout_p: float, seed: int, offset: int, device: torch.device | str
) -> Tensor:
    """The dropout mask of attention, again.

    Element ``(b, h, m, n)`` has index ``offset + ((b * H + h) * M + m) * N + n`` and is kept when the uniform number
    that Philox (6 rounds, key ``seed``) draws for that index is above ``dropout_p``.

    Args:
        B, H, M, N: batch, query heads, query length, key length.
        dropout_p: probability to drop, in ``[0, 1)``.
        seed, offset: as the forward call returned them; non-negative, below 2**63.
        device: where the mask is made: a GPU, or a CPU under ``TRITON_INTERPRET=1``.

    Returns:
        bool ``(B, H, M, N)``, True where the element is kept; all True for ``dropout_p == 0``.

    Raises:
        ValueError: a size is negative, or ``dropout_p``, ``seed`` or ``offset`` is out of range.
        RuntimeError: no kernel can run here; says what to do.

    Source: semantics of the public operator set (reference, section 3.1); generator: Salmon et al., SC 2011.
    """
    sizes = {"B": B, "H": H, "M": M, "N": N}
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name} must not be negative, got {size}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    for name, value in (("seed", seed), ("offset", offset)):
        if not 0 <= value < 2**63:
            raise ValueError(f"{name} must be in [0, 2**63), got {value}")
    num_elements = B * H * M * N
    if dropout_p == 0.0 or num_elements == 0:
        return torch.ones((B, H, M, N), dtype=torch.bool, device=device)
    reason = backend_info().why_not()
    if reason is not None:
        raise RuntimeError(f"recompute_mask cannot run here: {reason}")
    from .kernel import keep_mask_kernel

    keep = torch.empty((B, H, M, N), dtype=torch.int8, device=device)
    grid = (-(-num_elements // _BLOCK),)
    keep_mask_kernel[grid](keep, seed, offset, num_elements, dropout_p, BLOCK=_BLOCK, ROUNDS=PHILOX_ROUNDS)
    return keep.bool()
