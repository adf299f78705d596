"""Hugging Face Transformers: the attention implementation ``"magi_sink"``, which serves gpt-oss style ``s_aux``.

``register()`` once, then ``attn_implementation="magi_sink"``. Sliding windows, softcap, dropout, GQA, padded batches
and packed sequences are served; a dense (4-dim) mask is refused, not ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..flash.api import fa2_func_with_sink, fa2_varlen_func_with_sink

__all__ = ["NAME", "magi_sink_attention_forward", "register"]

NAME = "magi_sink"


def register() -> str:
    """Add ``"magi_sink"`` to ``ALL_ATTENTION_FUNCTIONS``, and the masks of FlashAttention-2 for it; returns the name.

    Raises:
        ImportError: transformers is missing.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    AttentionInterface.register(NAME, magi_sink_attention_forward)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    return NAME


def _unpad(mask: Tensor, *tensors: Tensor) -> tuple[list[Tensor], Tensor, Tensor, int]:
    """Tokens that ``mask (batch, seqlen)`` keeps, their flat rows, cu_seqlens, and the longest length."""
    lengths = mask.sum(1, dtype=torch.int32)
    rows = mask.flatten().nonzero().flatten()
    cu = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return [x.flatten(0, 1)[rows] for x in tensors], rows, cu, int(lengths.max())


def _longest(cu: Tensor, given: int | None) -> int:
    return int((cu[1:] - cu[:-1]).max()) if given is None else int(given)


def magi_sink_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The callable that ``ALL_ATTENTION_FUNCTIONS`` expects.

    Args:
        module: the attention layer; its ``is_causal`` counts when the argument is None.
        query: ``(batch, num_heads_q, seqlen_q, head_dim)``. key, value: ``(batch, num_heads_kv, seqlen_k, head_dim)``.
        attention_mask: None, or ``(batch, seqlen_k)``, nonzero where a token counts.
        sliding_window: keys that a row sees, itself included.
        s_aux: sink logits, ``(num_heads_q,)``, or ``(s_sink, num_heads_q)``; cast to float32.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: packed sequences in a batch of one.

    Returns:
        ``(batch, seqlen_q, num_heads_q, head_dim)``, and None for the weights.

    Raises:
        NotImplementedError: a mask of other dims, or packed tokens with a padding mask.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    sink = None if s_aux is None else (s_aux if s_aux.dim() == 2 else s_aux[None]).float()
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0 if causal else sliding_window - 1)
    options: dict[str, Any] = dict(
        sink=sink,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=causal,
        window_size=window,
        softcap=softcap or 0.0,
    )
    if cu_seq_lens_q is not None:
        if attention_mask is not None or cu_seq_lens_k is None or q.shape[0] != 1:
            raise NotImplementedError(
                "packed sequences need cu_seq_lens_q and cu_seq_lens_k, a batch of one and no attention_mask"
            )
        longest_q, longest_k = _longest(cu_seq_lens_q, max_length_q), _longest(cu_seq_lens_k, max_length_k)
        cu_q, cu_k = cu_seq_lens_q.int(), cu_seq_lens_k.int()
        packed = fa2_varlen_func_with_sink(q[0], k[0], v[0], cu_q, cu_k, longest_q, longest_k, **options)
        return packed[None], None
    if attention_mask is None:
        return fa2_func_with_sink(q, k, v, **options), None
    if attention_mask.dim() != 2:
        raise NotImplementedError(
            f"attention_mask must be None or (batch, seqlen_k), got shape {tuple(attention_mask.shape)}; "
            f"register() makes transformers build it so for {NAME!r}"
        )
    batch, seqlen_q = q.shape[:2]
    seen = attention_mask[:, -k.shape[1] :] != 0
    (rows_k, rows_v), _, cu_k, longest_k = _unpad(seen, k, v)
    (rows_q,), rows, cu_q, longest_q = _unpad(seen[:, -seqlen_q:], q)
    packed = fa2_varlen_func_with_sink(rows_q, rows_k, rows_v, cu_q, cu_k, longest_q, longest_k, **options)
    out = packed.new_zeros((batch * seqlen_q, *packed.shape[1:])).index_copy(0, rows, packed)
    return out.unflatten(0, (batch, seqlen_q)), None
