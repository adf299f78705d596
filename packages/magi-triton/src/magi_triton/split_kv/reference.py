"""Reference of split-KV attention: dense attention, whatever the split."""

from __future__ import annotations

from torch import Tensor

from ..flash.reference import attention


def flash_attention_split_kv(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, sm_scale: float | None = None, *, upcast: bool = False
) -> Tensor:
    """Reference of :func:`magi_triton.flash_attention_split_kv`; in float64 with ``upcast``."""
    return attention(q, k, v, causal, sm_scale, upcast=upcast)[0]
