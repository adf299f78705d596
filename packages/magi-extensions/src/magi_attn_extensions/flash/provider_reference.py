"""Plain torch, any device and dtype: a block of query rows of one sequence at a time, dropout from a kept seed.

Semantics of FlashAttention-2: causal and windows are aligned to the bottom right corner; alibi adds
``-slope * |i + seqlen_k - seqlen_q - j|`` after softcap; dropout acts on the probabilities, after their sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .call import Extras, Forward, Options, refuse

EMPTY_IS_PLUS_INF = False
_BLOCK_ELEMENTS = 1 << 22  # scores of one block: num_heads_q * rows * seqlen_k


def _accumulate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def check(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options, needs_grad: bool) -> None:
    if extras.block_table is not None:
        refuse("reference", "block_table", 'gather the pages, or use_provider("fa2", "flash_attn")')
    for name in ("qv", "q_descale", "k_descale", "v_descale"):
        if getattr(extras, name) is not None:
            refuse("reference", name, "leave it None")
    if options.attention_chunk != 0:
        refuse("reference", "attention_chunk", "pass attention_chunk=0")


@dataclass(frozen=True)
class _Sequence:
    """Views of one sequence, rows first, and where its rows are."""

    batch: int
    q: slice
    k: slice


def _lengths(cu: Tensor | None, used: Tensor | None, batch: int, seqlen: int) -> list[tuple[int, int]]:
    starts = [i * seqlen for i in range(batch + 1)] if cu is None else cu.tolist()
    ends = starts[1:] if used is None else [begin + int(n) for begin, n in zip(starts, used.tolist())]
    return list(zip(starts, ends))


def _sequences(q: Tensor, k: Tensor, extras: Extras) -> list[_Sequence]:
    batch = q.shape[0] if extras.cu_q is None else extras.cu_q.shape[0] - 1
    rows_q = _lengths(extras.cu_q, extras.seqused_q, batch, q.shape[1])
    rows_k = _lengths(extras.cu_k, extras.seqused_k, batch, k.shape[1])
    return [_Sequence(i, slice(*a), slice(*b)) for i, (a, b) in enumerate(zip(rows_q, rows_k))]


def _flat(x: Tensor) -> Tensor:
    """``(batch * seqlen, heads, dim)``, or packed rows as they are."""
    return x.reshape(-1, *x.shape[-2:])


@dataclass(frozen=True)
class _Block:
    """One block of rows: its scores ``(num_heads_q, rows, seqlen_k)`` with -inf where unseen, and d score / d raw."""

    sequence: _Sequence
    rows: slice  # of the flat tensors
    local: slice  # of the sequence
    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    slope: Tensor | None
    keep: Tensor | None  # dropout: 1 where kept


def _seed(rng_state: Tensor) -> int:
    return int(rng_state.reshape(-1)[0])


def _blocks(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options, rng_state: Tensor) -> Iterator[_Block]:
    dtype, heads = _accumulate(q.dtype), q.shape[-2]
    group = heads // k.shape[-2]
    flat_q, flat_k, flat_v = _flat(q), _flat(k), _flat(v)
    generator = None
    if options.dropout_p > 0:
        generator = torch.Generator(q.device).manual_seed(_seed(rng_state))
    for sequence in _sequences(q, k, extras):
        seqlen_q = sequence.q.stop - sequence.q.start
        seqlen_k = sequence.k.stop - sequence.k.start
        if seqlen_q == 0 or seqlen_k == 0:
            continue
        b_k, b_v = (x[sequence.k].to(dtype).repeat_interleave(group, 1).transpose(0, 1) for x in (flat_k, flat_v))
        step = max(1, _BLOCK_ELEMENTS // (heads * seqlen_k))
        columns = torch.arange(seqlen_k, device=q.device)
        for begin in range(0, seqlen_q, step):
            local = slice(begin, min(begin + step, seqlen_q))
            rows = slice(sequence.q.start + local.start, sequence.q.start + local.stop)
            b_q = flat_q[rows].to(dtype).transpose(0, 1)
            s = options.softmax_scale * (b_q @ b_k.transpose(1, 2))
            slope = None
            if options.softcap > 0:
                s = torch.tanh(s / options.softcap)
                slope = 1 - s * s
                s = options.softcap * s
            diagonal = torch.arange(local.start, local.stop, device=q.device) + seqlen_k - seqlen_q
            distance = columns[None, :] - diagonal[:, None]
            if extras.alibi_slopes is not None:
                slopes = extras.alibi_slopes.to(dtype)
                slopes = slopes if slopes.dim() == 1 else slopes[sequence.batch]
                s = s - slopes[:, None, None] * distance.abs().to(dtype)
            right = 0 if options.causal else options.window_right
            unseen = torch.zeros_like(distance, dtype=torch.bool)
            if right >= 0:
                unseen |= distance > right
            if options.window_left >= 0:
                unseen |= distance < -options.window_left
            keep = None
            if generator is not None:
                draw = torch.rand(s.shape, generator=generator, device=q.device, dtype=torch.float32)
                keep = (draw >= options.dropout_p).to(dtype)
            s = s.masked_fill(unseen, -torch.inf)
            yield _Block(sequence, rows, local, b_q, b_k, b_v, s, slope, keep)


def forward(q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> Forward:
    dtype, heads = _accumulate(q.dtype), q.shape[-2]
    out = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    flat_out = out.view(-1, *out.shape[-2:])
    lse = torch.full((flat_out.shape[0], heads), -torch.inf, dtype=dtype, device=q.device)
    rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if options.dropout_p > 0:
        rng_state[:1].random_()
    probs = None
    if options.return_probs and options.dropout_p > 0:
        batch = q.shape[0] if extras.cu_q is None else extras.cu_q.shape[0] - 1
        probs = torch.zeros((batch, heads, options.max_q, options.max_k), dtype=q.dtype, device=q.device)
    for block in _blocks(q, k, v, extras, options, rng_state):
        m = block.scores.amax(2, keepdim=True)
        p = torch.exp(block.scores - torch.where(m == -torch.inf, 0.0, m))
        total = p.sum(2, keepdim=True)
        empty = total == 0
        safe = torch.where(empty, 1.0, total)
        lse[block.rows] = torch.where(empty, -torch.inf, m + safe.log()).squeeze(2).t()
        p = p / safe
        if probs is not None and block.keep is not None:  # a dropped pair is negative, as in FlashAttention-2
            signed = (p * (2 * block.keep - 1)).to(probs.dtype)
            probs[block.sequence.batch, :, block.local, : signed.shape[2]] = signed
        if block.keep is not None:
            p = p * block.keep / (1 - options.dropout_p)
        flat_out[block.rows] = (p.to(q.dtype).to(dtype) @ block.v).transpose(0, 1).to(out.dtype)
    if extras.cu_q is None:
        lse = lse.view(q.shape[0], q.shape[1], heads).transpose(1, 2).contiguous()
    else:
        lse = lse.t().contiguous()
    return Forward(out, lse, rng_state, probs)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rng_state: Tensor,
    extras: Extras, options: Options,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dtype, heads = _accumulate(q.dtype), q.shape[-2]
    dq = torch.zeros((_flat(q).shape), dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(_flat(x).shape, dtype=dtype, device=x.device) for x in (k, v))
    flat_dout, flat_out = _flat(dout).to(dtype), _flat(out).to(dtype)
    rows_lse = lse.transpose(1, 2).reshape(-1, heads) if lse.dim() == 3 else lse.t()
    rows_lse = torch.where(rows_lse == -torch.inf, torch.inf, rows_lse)  # no key: p = exp(-inf)
    delta = (flat_dout * flat_out).sum(2)
    heads_kv = k.shape[-2]
    for block in _blocks(q, k, v, extras, options, rng_state):
        b_dout = flat_dout[block.rows].transpose(0, 1)
        p = torch.exp(block.scores - rows_lse[block.rows].t()[:, :, None])
        dp = b_dout @ block.v.transpose(1, 2)
        dropped = p
        if block.keep is not None:
            kept = block.keep / (1 - options.dropout_p)
            dp, dropped = dp * kept, p * kept
        ds = p * (dp - delta[block.rows].t()[:, :, None])
        if block.slope is not None:
            ds = ds * block.slope
        dq[block.rows] = (options.softmax_scale * (ds @ block.k)).transpose(0, 1).to(q.dtype)
        # Heads of one kv head are neighbours.
        for grad, part in (
            (dk, options.softmax_scale * (ds.transpose(1, 2) @ block.q)),
            (dv, dropped.transpose(1, 2) @ b_dout),
        ):
            grad[block.sequence.k] += part.unflatten(0, (heads_kv, -1)).sum(1).transpose(0, 1)
    return dq.view(q.shape), dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype)
