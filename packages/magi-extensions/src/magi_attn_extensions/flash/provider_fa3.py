"""FlashAttention-3: the module ``flash_attn_interface`` that ``hopper/`` of the flash-attention repository installs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .call import Extras, Forward, Options, refuse

EMPTY_IS_PLUS_INF = True  # some builds write +inf, others -inf


@lru_cache(maxsize=1)
def _interface() -> Any:
    import importlib

    return importlib.import_module("flash_attn_interface")


def check(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options, needs_grad: bool) -> None:
    if not q.is_cuda:
        raise NotImplementedError(f"provider 'flash_attn_3' takes cuda tensors, got {q.device}")
    if needs_grad and options.attention_chunk != 0:
        refuse("flash_attn_3", "backward with attention_chunk", "pass attention_chunk=0")
    if needs_grad and extras.qv is not None:
        refuse("flash_attn_3", "backward with qv", "call it under torch.no_grad()")
    if needs_grad and q.dtype not in (torch.float16, torch.bfloat16):
        refuse("flash_attn_3", f"backward for {q.dtype}", "call it under torch.no_grad()")


def forward(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> Forward:
    is_packed = extras.cu_q is not None
    out, lse, *_ = _interface()._flash_attn_forward(
        q,
        k,
        v,
        qv=extras.qv,
        cu_seqlens_q=extras.cu_q,
        cu_seqlens_k=extras.cu_k,
        seqused_q=extras.seqused_q,
        seqused_k=extras.seqused_k,
        max_seqlen_q=options.max_q if is_packed else None,
        max_seqlen_k=options.max_k if is_packed else None,
        q_descale=extras.q_descale,
        k_descale=extras.k_descale,
        v_descale=extras.v_descale,
        softmax_scale=options.softmax_scale,
        causal=options.causal,
        window_size_left=options.window_left,
        window_size_right=options.window_right,
        attention_chunk=options.attention_chunk,
        softcap=options.softcap,
        num_splits=options.num_splits,
        pack_gqa=None if options.pack_gqa < 0 else bool(options.pack_gqa),
        sm_margin=options.sm_margin,
    )
    return Forward(out, lse, torch.zeros(2, dtype=torch.int64, device=q.device))


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rng_state: Tensor,
    extras: Extras, options: Options,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    is_packed = extras.cu_q is not None
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    _interface()._flash_attn_backward(
        *(dout, q, k, v, out, lse, extras.cu_q, extras.cu_k, extras.seqused_q, extras.seqused_k),
        *((options.max_q, options.max_k) if is_packed else (None, None)),
        *(dq, dk, dv, options.softmax_scale, options.causal, options.window_left, options.window_right),
        *(options.softcap, options.deterministic, options.sm_margin),
    )
    return dq, dk, dv
