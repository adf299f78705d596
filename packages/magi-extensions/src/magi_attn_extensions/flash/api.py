"""The public functions: check, choose the provider, call."""

from __future__ import annotations

from typing import Any

import torch
from magi_core.sink import check_sink
from torch import Tensor

from ..providers import choose, forced
from . import run
from .call import Extras, Options

__all__ = [
    "fa2_func_with_sink",
    "fa2_kvpacked_func_with_sink",
    "fa2_qkvpacked_func_with_sink",
    "fa2_varlen_func_with_sink",
    "fa2_varlen_kvpacked_func_with_sink",
    "fa2_varlen_qkvpacked_func_with_sink",
    "fa3_func_with_sink",
    "fa3_qkvpacked_func_with_sink",
    "fa3_varlen_func_with_sink",
    "fa4_func_with_sink",
    "fa4_varlen_func_with_sink",
]

# Looking for packages is not traced. What is forced is an argument, so that a graph is guarded by it.
_choose = torch.compiler.assume_constant_result(choose)

Result = Any  # out, or (out, lse, S_dmask) or (out, lse) with return_attn_probs


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, extras: Extras, is_packed: bool) -> None:
    dims = 3 if is_packed else 4
    layout = "(total, heads, head_dim)" if is_packed else "(batch, seqlen, heads, head_dim)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        is_paged = name != "q" and extras.block_table is not None
        if x.dim() != (4 if is_paged else dims):
            raise ValueError(f"{name} must have shape {layout}, got {tuple(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q ({q.device}), got {x.device}")
    if not q.is_floating_point() or k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(f"q, k and v must have one floating point dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if k.shape[:-1] != v.shape[:-1] or k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k and v must fit q {tuple(q.shape)}, got k {tuple(k.shape)} and v {tuple(v.shape)}")
    if not is_packed and k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have the batch size of q ({q.shape[0]}), got {k.shape[0]}")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2] != 0:
        raise ValueError(f"num_heads_kv must divide num_heads_q ({q.shape[-2]}), got {k.shape[-2]}")
    _check_lengths(extras, q, is_packed)


def _check_lengths(extras: Extras, q: Tensor, is_packed: bool) -> None:
    for name, x in (("cu_seqlens_q", extras.cu_q), ("cu_seqlens_k", extras.cu_k)) if is_packed else ():
        if not isinstance(x, Tensor) or x.dtype != torch.int32:
            came = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} must be an int32 tensor, got {came}")
        if x.dim() != 1 or x.shape[0] < 1 or x.device != q.device:
            raise ValueError(f"{name} must have shape (batch + 1,) on {q.device}, got {tuple(x.shape)} on {x.device}")
    if is_packed and extras.cu_q is not None and extras.cu_k is not None and extras.cu_q.shape != extras.cu_k.shape:
        raise ValueError(
            f"cu_seqlens_k must have the length of cu_seqlens_q ({extras.cu_q.shape[0]}), got {extras.cu_k.shape[0]}"
        )


def _check_sink(sink: Tensor | None, layout: Any, q: Tensor, is_packed: bool) -> None:
    if layout == "shd":
        raise NotImplementedError("sink_layout 'shd' is not implemented, use 'sh' or 'ssh'")
    if layout not in ("sh", "ssh"):
        raise ValueError(f"sink_layout must be one of sh, ssh, got {layout!r}")
    if sink is None:
        return
    rows = sink
    if layout == "ssh" and not is_packed and isinstance(sink, Tensor):
        if sink.dim() != 4 or sink.shape[:2] != q.shape[:2]:
            raise ValueError(
                f"sink of layout 'ssh' must have shape (batch={q.shape[0]}, seqlen_q={q.shape[1]}, s_sink, "
                f"num_heads_q={q.shape[2]}), got {tuple(sink.shape)}"
            )
        rows = sink.flatten(0, 1)
    total = q.shape[0] if is_packed else q.shape[0] * q.shape[1]
    check_sink(rows, layout, total, q.shape[-2], q.device)


def _window(window_size: Any) -> tuple[int, int]:
    try:
        left, right = (-1 if side is None else int(side) for side in window_size)
    except (TypeError, ValueError):
        raise ValueError(f"window_size must be two integers (left, right), got {window_size!r}") from None
    if left < -1 or right < -1:
        raise ValueError(f"window_size must be at least -1 (open) on both sides, got {window_size!r}")
    return left, right


def _length(value: Any, name: str) -> Any:
    """An int, or what torch.compile stands for one."""
    if isinstance(value, Tensor):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    return value


def _attend(
    family: str,
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    extras: Extras,
    *,
    lengths: tuple[Any, Any] | None,
    sink_layout: str,
    softmax_scale: float | None,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    return_attn_probs: bool,
    **options: Any,
) -> Result:
    is_packed = lengths is not None
    _check_tensors(q, k, v, extras, is_packed)
    _check_sink(sink, sink_layout, q, is_packed)
    choice = _choose(family, q.is_cuda, function, forced(family))
    if family == "fa2" and v.shape[-1] != q.shape[-1]:
        raise ValueError(f"v must have the head_dim of q ({q.shape[-1]}), got {v.shape[-1]}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    if softcap < 0:
        raise ValueError(f"softcap must be 0 (none) or positive, got {softcap}")
    left, right = _window(window_size)
    if lengths is None:
        max_q, max_k = q.shape[1], k.shape[1]
    else:
        max_q, max_k = _length(lengths[0], "max_seqlen_q"), _length(lengths[1], "max_seqlen_k")
    call = Options(
        provider=choice,
        max_q=max_q,
        max_k=max_k,
        softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale),
        window_left=left,
        window_right=right,
        softcap=float(softcap),
        dropout_p=float(dropout_p),
        return_probs=return_attn_probs and dropout_p > 0,
        sink_layout=sink_layout,
        **options,
    )
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sink))
    run.provider_module(choice).check(q, k, v, extras, call, needs_grad)
    if torch.compiler.is_compiling():
        from . import ops

        out, lse, probs = ops.flash(q, k, v, sink, extras, call)
    else:
        out, lse, probs = run.FlashWithSink.apply(q, k, v, sink, extras, call)
    if not return_attn_probs:
        return out
    return (out, lse, probs) if family == "fa2" else (out, lse)


def fa2_func_with_sink(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """FlashAttention-2 with attention sink: extra logits of the denominator that carry no value.

    Differentiable in q, k, v and sink, through ``out`` and through ``lse``. Exact under every option.

    Args:
        q: ``(batch, seqlen_q, num_heads_q, head_dim)``, float16 or bfloat16 on CUDA; any floating dtype on the CPU.
        k, v: ``(batch, seqlen_k, num_heads_kv, head_dim)``; ``num_heads_kv`` divides ``num_heads_q``.
        sink: float32; layout ``"sh"`` ``(s_sink, num_heads_q)``, or ``"ssh"`` ``(batch, seqlen_q, s_sink,
            num_heads_q)``; None is plain FlashAttention. Any ``s_sink >= 1``.
        dropout_p: probability of dropping a weight, after the softmax.
        softmax_scale: factor on ``q @ k^T``; ``head_dim ** -0.5`` when None.
        causal, window_size: aligned to the bottom right corner; ``(left, right)``, -1 is open.
        softcap: ``softcap * tanh(s / softcap)`` on the scores when positive.
        alibi_slopes: float32 ``(num_heads_q,)`` or ``(batch, num_heads_q)``.
        deterministic: a bitwise repeatable backward.
        return_attn_probs: also return lse and, with dropout, the probabilities (negative where dropped).

    Returns:
        ``out`` like ``q``; with ``return_attn_probs`` ``(out, lse, S_dmask)``: lse ``(batch, num_heads_q, seqlen_q)``
        float32, natural log, the sink in it, -inf where a row sees nothing; ``S_dmask`` None without dropout.

    Raises:
        ValueError, TypeError: an argument does not fit. NotImplementedError: the provider lacks an option, or layout
        ``"shd"``. ProviderNotInstalledError: a forced provider is missing.

    Which kernels run: :func:`magi_attn_extensions.provider`. Does not synchronise on CUDA. Source: arXiv:2307.08691;
    semantics of the public function (reference, section 7.1).
    """
    return _attend(
        *("fa2", "fa2_func_with_sink", q, k, v, sink, Extras(alibi_slopes=alibi_slopes)),
        lengths=None,
        sink_layout=sink_layout,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        dropout_p=dropout_p,
        return_attn_probs=return_attn_probs,
        causal=causal,
        deterministic=deterministic,
    )


def _unpacked(packed: Tensor, parts: int, dims: int, name: str) -> tuple[Tensor, ...]:
    if not isinstance(packed, Tensor) or packed.dim() != dims or packed.shape[-3] != parts:
        came = tuple(packed.shape) if isinstance(packed, Tensor) else type(packed).__name__
        rows = "total" if dims == 4 else "batch, seqlen"
        raise ValueError(f"{name} must have shape ({rows}, {parts}, heads, head_dim), got {came}")
    return packed.unbind(-3)


def fa2_qkvpacked_func_with_sink(
    qkv: Tensor,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`fa2_func_with_sink` of ``qkv (batch, seqlen, 3, heads, head_dim)``."""
    q, k, v = _unpacked(qkv, 3, 5, "qkv")
    return fa2_func_with_sink(
        *(q, k, v, sink, sink_layout, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes),
        *(deterministic, return_attn_probs),
    )


def fa2_kvpacked_func_with_sink(
    q: Tensor,
    kv: Tensor,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`fa2_func_with_sink` of ``kv (batch, seqlen_k, 2, num_heads_kv, head_dim)``."""
    k, v = _unpacked(kv, 2, 5, "kv")
    return fa2_func_with_sink(
        *(q, k, v, sink, sink_layout, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes),
        *(deterministic, return_attn_probs),
    )


def fa2_varlen_func_with_sink(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """:func:`fa2_func_with_sink` within packed sequences.

    Args:
        q: ``(total_q, num_heads_q, head_dim)``. k, v: ``(total_k, num_heads_kv, head_dim)``, or pages ``(num_pages,
            page_size, num_heads_kv, head_dim)`` with ``block_table`` (provider ``flash_attn``, forward only).
        cu_seqlens_q, cu_seqlens_k: ``(batch + 1,)`` int32, on the device of ``q``. Empty sequences are allowed.
        max_seqlen_q, max_seqlen_k: longest sequence, in tokens. Too small is not detected.
        sink: ``(s_sink, num_heads_q)``, or ``"ssh"`` ``(total_q, s_sink, num_heads_q)``.

    Returns:
        As :func:`fa2_func_with_sink`, lse ``(num_heads_q, total_q)``.
    """
    return _attend(
        *("fa2", "fa2_varlen_func_with_sink", q, k, v, sink),
        Extras(cu_q=cu_seqlens_q, cu_k=cu_seqlens_k, alibi_slopes=alibi_slopes, block_table=block_table),
        lengths=(max_seqlen_q, max_seqlen_k),
        sink_layout=sink_layout,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        dropout_p=dropout_p,
        return_attn_probs=return_attn_probs,
        causal=causal,
        deterministic=deterministic,
    )


def fa2_varlen_qkvpacked_func_with_sink(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`fa2_varlen_func_with_sink` of ``qkv (total, 3, heads, head_dim)``."""
    q, k, v = _unpacked(qkv, 3, 4, "qkv")
    return fa2_varlen_func_with_sink(
        *(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, sink, sink_layout, dropout_p, softmax_scale),
        *(causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs),
    )


def fa2_varlen_kvpacked_func_with_sink(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`fa2_varlen_func_with_sink` of ``kv (total_k, 2, num_heads_kv, head_dim)``."""
    k, v = _unpacked(kv, 2, 4, "kv")
    return fa2_varlen_func_with_sink(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sink, sink_layout, dropout_p),
        *(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs),
    )


def _pack_gqa(value: bool | None) -> int:
    return -1 if value is None else int(bool(value))


def fa3_func_with_sink(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """FlashAttention-3 with attention sink. Arguments as :func:`fa2_func_with_sink`; further ones go to the library.

    Args:
        attention_chunk: must be 0 for a backward. num_splits, pack_gqa, sm_margin: tune the kernel.

    Returns:
        ``out``, or ``(out, lse)`` with ``return_attn_probs``; lse ``(batch, num_heads_q, seqlen_q)``.

    Raises:
        ProviderNotInstalledError: ``flash_attn_interface`` is missing; names what to install.
    """
    return _attend(
        *("fa3", "fa3_func_with_sink", q, k, v, sink),
        Extras(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale),
        lengths=None,
        sink_layout=sink_layout,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        return_attn_probs=return_attn_probs,
        causal=causal,
        deterministic=deterministic,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=_pack_gqa(pack_gqa),
        sm_margin=sm_margin,
    )


def fa3_varlen_func_with_sink(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`fa3_func_with_sink` within packed sequences; lse ``(num_heads_q, total_q)``.

    Args:
        seqused_q, seqused_k: int32 ``(batch,)``: tokens of a sequence that count, from its start.
    """
    return _attend(
        *("fa3", "fa3_varlen_func_with_sink", q, k, v, sink),
        Extras(
            *(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k),
            qv=qv,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
        ),
        lengths=(max_seqlen_q, max_seqlen_k),
        sink_layout=sink_layout,
        softmax_scale=softmax_scale,
        window_size=window_size,
        softcap=softcap,
        return_attn_probs=return_attn_probs,
        causal=causal,
        deterministic=deterministic,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=_pack_gqa(pack_gqa),
        sm_margin=sm_margin,
    )


def fa3_qkvpacked_func_with_sink(
    qkv: Tensor,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`fa3_func_with_sink` of ``qkv (batch, seqlen, 3, heads, head_dim)``, or of ``(batch, seqlen, num_heads_q +
    2 * num_heads_kv, head_dim)`` with ``num_heads_q`` given."""
    if isinstance(qkv, Tensor) and qkv.dim() == 4:
        rest = -1 if num_heads_q is None else qkv.shape[2] - num_heads_q
        if num_heads_q is None or rest <= 0 or rest % 2:
            raise ValueError(
                "num_heads_q must be given for a qkv of 4 dims and leave an even number of heads, "
                f"got {num_heads_q} of {qkv.shape[2]}"
            )
        q, k, v = qkv.split([num_heads_q, rest // 2, rest // 2], dim=-2)
    else:
        q, k, v = _unpacked(qkv, 3, 5, "qkv")
    return fa3_func_with_sink(
        *(q, k, v, sink, sink_layout, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size),
        *(attention_chunk, softcap),
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


def fa4_func_with_sink(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """FlashAttention-4 with attention sink. Arguments and returns as :func:`fa3_func_with_sink`.

    Raises:
        ProviderNotInstalledError: ``flash_attn.cute`` is missing; names what to install.
    """
    return _attend(
        *("fa4", "fa4_func_with_sink", q, k, v, sink, Extras()),
        lengths=None,
        sink_layout=sink_layout,
        softmax_scale=softmax_scale,
        softcap=softcap,
        return_attn_probs=return_attn_probs,
        causal=causal,
        deterministic=deterministic,
        num_splits=num_splits,
        pack_gqa=_pack_gqa(pack_gqa),
    )


def fa4_varlen_func_with_sink(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    sink: Tensor | None = None,
    sink_layout: str = "sh",
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """:func:`fa4_func_with_sink` within packed sequences; ``max_seqlen_q`` and ``max_seqlen_k`` are hints."""
    return _attend(
        *("fa4", "fa4_varlen_func_with_sink", q, k, v, sink, Extras(cu_q=cu_seqlens_q, cu_k=cu_seqlens_k)),
        lengths=(
            q.shape[0] if max_seqlen_q is None else max_seqlen_q,
            k.shape[0] if max_seqlen_k is None else max_seqlen_k,
        ),
        sink_layout=sink_layout,
        softmax_scale=softmax_scale,
        softcap=softcap,
        return_attn_probs=return_attn_probs,
        causal=causal,
        deterministic=deterministic,
        num_splits=num_splits,
        pack_gqa=_pack_gqa(pack_gqa),
    )
