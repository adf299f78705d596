"""torch operator ``magi_triton::decode``: rows ``(B, Hq, M, D)`` against a cache ``(B or pages, Hkv, slots, D)``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.launch import block_dim, ceil_div, empty_like_rows, on_device, require_kernels, rows_ready
from ..runtime.device import backend_info

_DEVICES = ("cpu", "cuda")
MAX_SPLITS = 128

torch.library.define(
    "magi_triton::decode",
    "(Tensor q, Tensor k, Tensor v, Tensor? lengths, Tensor? table, Tensor? k_scale, Tensor? v_scale, SymInt max_k,"
    " SymInt num_splits, float scale, int left, int right) -> (Tensor, Tensor)",
)


def choose_num_splits(base: int, num_blocks: int, num_slots: int) -> int:
    """Splits of the keys: the fewest whose waves of programs are at least 85 % as full as the fullest choice.

    Args:
        base: programs without a split. num_blocks: key tiles. num_slots: programs that the device runs at once.
    """
    if base >= 0.8 * num_slots or num_blocks <= 1:
        return 1
    fullness = {}
    for splits in range(1, min(num_slots, num_blocks, MAX_SPLITS) + 1):
        each = ceil_div(num_blocks, splits)
        if each * splits - num_blocks < each:  # no empty split
            waves = base * splits / num_slots
            fullness[splits] = waves / ceil_div(base * splits, num_slots)
    most = max(fullness.values())
    return min(splits for splits, full in fullness.items() if full >= 0.85 * most)


def _outputs(q: Tensor, head_dim_v: int) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return empty_like_rows(q) if q.shape[3] == head_dim_v else q.new_empty((*q.shape[:3], head_dim_v)), lse


def _fold(scale: Tensor | None, heads: int, device: torch.device) -> Tensor | None:
    """One factor per kv head."""
    return None if scale is None else scale.to(device).float().reshape(-1).expand(heads).contiguous()


@torch.library.impl("magi_triton::decode", _DEVICES)
def _decode(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, table: Tensor | None, k_scale: Tensor | None,
    v_scale: Tensor | None, max_k: int, num_splits: int, scale: float, left: int, right: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    require_kernels("decode attention", q)
    from .kernel import decode_kernel, merge_kernel

    out, lse = _outputs(q, v.shape[3])
    if q.numel() == 0:
        return out, lse
    q, k, v = rows_ready(q), rows_ready(k), rows_ready(v)
    batch, heads, rows, dim = q.shape
    heads_kv, dim_v = v.shape[1], v.shape[3]
    group = heads // heads_kv
    block_r = min(64, max(16, 1 << (group * rows - 1).bit_length()))
    block_n = 32 if backend_info().interpreted else (128 if max(dim, dim_v) <= 128 else 64)
    tiles = ceil_div(group * rows, block_r)
    if num_splits == 0:
        slots = 2 * backend_info().num_sms or 1
        num_splits = choose_num_splits(batch * heads_kv * tiles, ceil_div(max_k, block_n), slots)
    if num_splits == 1:
        parts, part_lse = out.unsqueeze(0), lse.unsqueeze(0)
    else:
        parts = q.new_empty((num_splits, batch, heads, rows, dim_v), dtype=torch.float32)
        part_lse = q.new_empty((num_splits, batch, heads, rows), dtype=torch.float32)
    k_scale, v_scale = _fold(k_scale, heads_kv, q.device), _fold(v_scale, heads_kv, q.device)
    with on_device(q):
        decode_kernel[(num_splits * tiles, heads_kv, batch)](
            q, k, v, k_scale, v_scale, parts, part_lse, lengths, table, q.stride()[:3], k.stride()[:3], v.stride()[:3],
            parts.stride()[:4], part_lse.stride(), 0 if table is None else table.stride(0), group, rows, max_k,
            num_splits, scale, left, right, HEAD_DIM=dim, BLOCK_D=block_dim(dim), HEAD_DIM_V=dim_v,
            BLOCK_DV=block_dim(dim_v), BLOCK_R=block_r, BLOCK_N=block_n, PAGE_SIZE=0 if table is None else k.shape[2],
            RAGGED=lengths is not None, HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0, HAS_SCALES=k_scale is not None,
            num_warps=4, num_stages=2,
        )  # fmt: skip
        if num_splits > 1:
            merge_kernel[(rows, heads, batch)](
                parts, part_lse, out, lse, parts.stride()[:4], part_lse.stride(), out.stride()[:3], lse.stride(),
                num_splits, HEAD_DIM=dim_v, BLOCK_D=block_dim(dim_v),
                BLOCK_S=max(2, 1 << (num_splits - 1).bit_length()), CHUNK=8, num_warps=4,
            )  # fmt: skip
    return out, lse


@torch.library.register_fake("magi_triton::decode")
def _decode_fake(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, table: Tensor | None, k_scale: Tensor | None,
    v_scale: Tensor | None, max_k: int, num_splits: int, scale: float, left: int, right: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _outputs(q, v.shape[3])
