"""The ``flash_attn`` package (FlashAttention-2, 2.7 and later)."""

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

    return importlib.import_module("flash_attn.flash_attn_interface")


def check(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options, needs_grad: bool) -> None:
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError(
            f"provider 'flash_attn' takes float16 and bfloat16 on cuda, got {q.dtype} on {q.device}; "
            'use_provider("fa2", "reference") takes them'
        )
    if extras.block_table is not None and needs_grad:
        refuse("flash_attn", "backward with block_table", "call it under torch.no_grad()")


def _padded(*tensors: Tensor) -> tuple[Tensor, ...]:
    missing = -tensors[0].shape[-1] % 8
    return tuple(torch.nn.functional.pad(x, (0, missing)) for x in tensors) if missing else tensors


def _common(extras: Extras, options: Options) -> dict[str, Any]:
    return dict(
        dropout_p=options.dropout_p,
        softmax_scale=options.softmax_scale,
        causal=options.causal,
        window_size_left=options.window_left,
        window_size_right=options.window_right,
        softcap=options.softcap,
        alibi_slopes=extras.alibi_slopes,
    )


def forward(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> Forward:
    dim = q.shape[-1]
    p_q, p_k, p_v = _padded(q, k, v)
    returns_probs = options.return_probs and options.dropout_p > 0
    common = dict(_common(extras, options), return_softmax=returns_probs)
    if extras.cu_q is None:
        out, lse, probs, rng_state = _interface()._flash_attn_forward(p_q, p_k, p_v, **common)
    else:
        out, lse, probs, rng_state = _interface()._flash_attn_varlen_forward(
            *(p_q, p_k, p_v, extras.cu_q, extras.cu_k, options.max_q, options.max_k),
            **common,
            block_table=extras.block_table,
        )
    out = out[..., :dim].contiguous() if out.shape[-1] != dim else out
    return Forward(out, lse, rng_state, probs if returns_probs else None)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rng_state: Tensor,
    extras: Extras, options: Options,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dim = q.shape[-1]
    p_dout, p_q, p_k, p_v, p_out = _padded(dout.contiguous(), q, k, v, out)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (p_q, p_k, p_v))
    common = dict(_common(extras, options), deterministic=options.deterministic, rng_state=rng_state)
    if extras.cu_q is None:
        _interface()._flash_attn_backward(p_dout, p_q, p_k, p_v, p_out, lse, dq, dk, dv, **common)
    else:
        _interface()._flash_attn_varlen_backward(
            *(p_dout, p_q, p_k, p_v, p_out, lse, dq, dk, dv, extras.cu_q, extras.cu_k, options.max_q, options.max_k),
            **common,
        )
    return dq[..., :dim], dk[..., :dim], dv[..., :dim]
