"""The FlashAttention-2 inside torch (``aten::_flash_attention_forward``): CUDA, float16 and bfloat16, packed or not.

It has no softcap and no alibi in the backward; head dims that are not a multiple of 8 cost one padded copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from .call import Extras, Forward, Options, refuse

EMPTY_IS_PLUS_INF = True
_INSTEAD = 'install the flash_attn package (pip install \'magi-extensions[fa2]\') or use_provider("fa2", "reference")'


def check(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options, needs_grad: bool) -> None:
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError(
            f"provider 'torch' takes float16 and bfloat16 on cuda, got {q.dtype} on {q.device}; "
            'use_provider("fa2", "reference") takes them'
        )
    if q.shape[-1] > 256:
        raise NotImplementedError(f"provider 'torch' takes head_dim <= 256, got {q.shape[-1]}")
    if options.softcap != 0.0:
        refuse("torch", "softcap", _INSTEAD)
    for name in ("alibi_slopes", "block_table", "seqused_q", "seqused_k"):
        if getattr(extras, name) is not None:
            refuse("torch", name, _INSTEAD)


def _padded(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Last dim contiguous and a multiple of 8; zeros change neither scores nor values."""
    missing = -tensors[0].shape[-1] % 8
    if missing:
        return tuple(torch.nn.functional.pad(x, (0, missing)) for x in tensors)
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def _window(options: Options) -> dict[str, int | None]:
    left = options.window_left if options.window_left >= 0 else None
    right = 0 if options.causal else options.window_right
    return dict(window_size_left=left, window_size_right=right if right >= 0 else None)


@contextlib.contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """ATen's backward takes its order of additions from torch's global switch."""
    if not wanted or torch.are_deterministic_algorithms_enabled():
        yield
        return
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def forward(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> Forward:
    dim = q.shape[-1]
    p_q, p_k, p_v = _padded(q, k, v)
    returns_probs = options.return_probs and options.dropout_p > 0
    out, lse, rng_state, _, probs = torch.ops.aten._flash_attention_forward(
        *(p_q, p_k, p_v, extras.cu_q, extras.cu_k, options.max_q, options.max_k, options.dropout_p, options.causal),
        *(returns_probs,),
        scale=options.softmax_scale,
        **_window(options),
    )
    out = out[..., :dim].contiguous() if out.shape[-1] != dim else out
    return Forward(out, lse, rng_state, probs if returns_probs else None)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rng_state: Tensor,
    extras: Extras, options: Options,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dim = q.shape[-1]
    p_dout, p_q, p_k, p_v, p_out = _padded(dout, q, k, v, out)
    unused = torch.empty(0, dtype=rng_state.dtype, device=q.device)
    with _deterministic(options.deterministic):
        grads = torch.ops.aten._flash_attention_backward(
            *(p_dout, p_q, p_k, p_v, p_out, lse, extras.cu_q, extras.cu_k, options.max_q, options.max_k),
            *(options.dropout_p, options.causal, rng_state, unused),
            scale=options.softmax_scale,
            **_window(options),
        )
    dq, dk, dv = (x[..., :dim] for x in grads)
    return dq, dk, dv
