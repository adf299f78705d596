"""FlashAttention-4: ``flash_attn.cute`` of the ``flash-attn-4`` package (Hopper and Blackwell)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .call import Extras, Forward, Options, refuse

EMPTY_IS_PLUS_INF = True


@lru_cache(maxsize=1)
def _interface() -> Any:
    import importlib

    return importlib.import_module("flash_attn.cute.interface")


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    """The library asserts what it cannot do (a packed backward on Hopper, a deterministic one): here it is an error."""
    try:
        return function(*args, **kwargs)
    except AssertionError as error:
        raise NotImplementedError(f"provider 'flash_attn_4' refuses: {error}") from error


def check(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options, needs_grad: bool) -> None:
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError(
            f"provider 'flash_attn_4' takes float16 and bfloat16 on cuda, got {q.dtype} on {q.device}"
        )
    if needs_grad and options.softcap != 0.0:
        refuse("flash_attn_4", "backward with softcap", "call it under torch.no_grad(), or use fa2 or fa3 functions")


def forward(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> Forward:
    out, lse, *_ = _call(
        _interface()._flash_attn_fwd,
        q,
        k,
        v,
        cu_seqlens_q=extras.cu_q,
        cu_seqlens_k=extras.cu_k,
        softmax_scale=options.softmax_scale,
        causal=options.causal,
        softcap=options.softcap,
        num_splits=options.num_splits,
        pack_gqa=None if options.pack_gqa < 0 else bool(options.pack_gqa),
        return_lse=True,
    )
    return Forward(out, lse, torch.zeros(2, dtype=torch.int64, device=q.device))


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rng_state: Tensor,
    extras: Extras, options: Options,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv, *_ = _call(
        _interface()._flash_attn_bwd,
        *(q, k, v, out, dout.contiguous(), lse),
        softmax_scale=options.softmax_scale,
        causal=options.causal,
        softcap=options.softcap,
        cu_seqlens_q=extras.cu_q,
        cu_seqlens_k=extras.cu_k,
        deterministic=options.deterministic,
    )
    return dq, dk, dv
