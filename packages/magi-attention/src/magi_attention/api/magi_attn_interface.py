"""The public calls: make a key, move tensors in and out, attend.

Key functions plan; every rank plans alone, from the same arguments, without communication, and must therefore be given
equal arguments. All other functions take the key.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from magi_core.checks import check_bool
from magi_core.errors import checked_int
from magi_core.flex_attn import AttnForwardMeta
from magi_core.mask import Mask
from torch import Tensor

from ..common.enum import AttnRole
from ..config import DistAttnConfig
from ..planning.arguments import GeneralAttnMaskType, GroupLike, RangesLike, as_group, check_role
from ..planning.key import DistAttnRuntimeKey
from ..planning.manager import DistAttnRuntimeMgr, attention_arguments, position_device
from ..planning.registry import dist_attn_runtime_dict_mgr
from ..planning.solve import KeyRequest, forget_solutions, make_key, make_key_on_placement
from ..runtime.ops import NAMESPACE
from .functools import CuSeqlens, infer_attn_mask_from_cu_seqlens

_OPS = getattr(torch.ops, NAMESPACE)


def _configured(
    dist_attn_config: DistAttnConfig, chunk_size: int | None, pad_size: int | None, stacklevel: int
) -> DistAttnConfig:
    """The configuration with the deprecated arguments folded in."""
    if not isinstance(dist_attn_config, DistAttnConfig):
        raise TypeError(f"dist_attn_config must be a DistAttnConfig, got {type(dist_attn_config).__name__}")
    if pad_size is not None and checked_int(pad_size, "pad_size", minimum=0):
        warnings.warn(
            f"pad_size={pad_size} has no effect: padding is made by the key. Pass 0",
            DeprecationWarning,
            stacklevel=stacklevel,
        )
    if chunk_size is None:
        return dist_attn_config
    warnings.warn(
        "chunk_size is deprecated: set DispatchConfig.chunk_size in dist_attn_config",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
    return _with_chunk_size(dist_attn_config, chunk_size)


def _with_chunk_size(dist_attn_config: DistAttnConfig, chunk_size: int | None) -> DistAttnConfig:
    """The configuration with a chunk size given beside it. Raises ValueError when the two disagree."""
    dispatch_config = dist_attn_config.dispatch_config
    if chunk_size is None or chunk_size == dispatch_config.chunk_size:
        return dist_attn_config
    if dispatch_config.chunk_size is not None:
        raise ValueError(
            f"chunk_size must agree with DispatchConfig.chunk_size ({dispatch_config.chunk_size}), got {chunk_size}"
        )
    return replace(dist_attn_config, dispatch_config=replace(dispatch_config, chunk_size=chunk_size))


def magi_attn_flex_key(
    q_ranges: RangesLike | Mask,
    k_ranges: RangesLike | None,
    attn_mask_type: GeneralAttnMaskType | None,
    total_seqlen_q: int,
    total_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: GroupLike,
    dist_attn_config: DistAttnConfig = DistAttnConfig(),  # noqa: B008  frozen
    is_same_source: bool = True,
    is_q_permutable: bool = True,
    is_k_permutable: bool = True,
    chunk_size: int | None = None,
    *,
    allow_overlap: bool = False,
) -> DistAttnRuntimeKey:
    """Plan a mask of slices over the ranks of a group.

    Args:
        q_ranges, k_ranges: half-open ranges of the slices, global tokens: ``AttnRanges``, an ``(N, 2)`` integer array
            or tensor, or pairs. A ``Mask`` as ``q_ranges`` names all slices; the next two are then None.
        attn_mask_type: one type for all slices or one per slice; ``AttnMaskType``, its string or its integer.
        total_seqlen_q, total_seqlen_k: tokens, any numbers: there is no divisibility rule.
        num_heads_q, num_heads_kv, head_dim: sizes of q, k; the values' head dim is free.
        pad_size: has no effect, padding is internal; anything but 0 is warned about.
        cp_group_or_mesh: the ranks that share the work: a process group, a ``DeviceMesh`` of one axis or two
            (inter-node, intra-node), a ``magi_comm`` communicator; None is the default group.
        dist_attn_config: placement, overlap, reductions; part of the key.
        is_same_source: keys are the query tokens, placed where those are. Totals that differ say otherwise: keys then
            have a placement of their own (cross attention), as with False.
        is_q_permutable: tokens of queries may be placed in any order. False keeps them contiguous over ranks.
        is_k_permutable: the same for keys; without a placement of their own, both must be permutable to be permuted.
        chunk_size: deprecated, ``DispatchConfig.chunk_size``.
        allow_overlap: slices may cover a pair twice, which then counts twice.

    Returns:
        The key. Equal requests give the same key, and plan once.

    Raises:
        ValueError: a range outside its tensor, a pair that two slices cover, sizes that do not fit, an algorithm that
            gives no placement, a chunk size that disagrees. TypeError: an argument of another kind.
    """
    config = _configured(dist_attn_config, chunk_size, pad_size, stacklevel=3)
    return make_key(
        KeyRequest(
            q_ranges,
            k_ranges,
            attn_mask_type,
            total_seqlen_q,
            total_seqlen_k,
            num_heads_q,
            num_heads_kv,
            head_dim,
            cp_group_or_mesh,
            config,
            allow_overlap,
        ),
        is_same_source=is_same_source,
        is_q_permutable=is_q_permutable,
        is_k_permutable=is_k_permutable,
    )


def magi_attn_varlen_key(
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: GroupLike,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dist_attn_config: DistAttnConfig = DistAttnConfig(),  # noqa: B008  frozen
    chunk_size: int | None = None,
) -> DistAttnRuntimeKey:
    """Plan packed documents; ``magi_attn_flex_key`` of ``infer_attn_mask_from_cu_seqlens``.

    Args:
        cu_seqlens_q, cu_seqlens_k: prefix sums of the documents' lengths, from 0.
        causal: every document is causal, bottom-right aligned.
        window_size: ``(left, right)`` keys around the diagonal; -1 is no limit. Not together with ``causal``.
        others: as for ``magi_attn_flex_key``.
    """
    config = _configured(dist_attn_config, chunk_size, pad_size, stacklevel=3)
    q_ranges, k_ranges, types, total_q, total_k = infer_attn_mask_from_cu_seqlens(
        cu_seqlens_q, cu_seqlens_k, causal, window_size
    )
    return make_key(
        KeyRequest(
            q_ranges, k_ranges, types, total_q, total_k, num_heads_q, num_heads_kv, head_dim, cp_group_or_mesh, config
        )
    )


def magi_attn_flex_dispatch(
    x: Tensor,
    q_ranges: RangesLike | Mask,
    k_ranges: RangesLike | None,
    attn_mask_type: GeneralAttnMaskType | None,
    total_seqlen_q: int,
    total_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: GroupLike,
    dist_attn_config: DistAttnConfig = DistAttnConfig(),  # noqa: B008  frozen
    is_same_source: bool = True,
    is_q_permutable: bool = True,
    is_k_permutable: bool = True,
    chunk_size: int | None = None,
) -> tuple[Tensor, DistAttnRuntimeKey]:
    """Deprecated: ``magi_attn_flex_key``, then ``dispatch``. Returns ``(local_x, key)``."""
    warnings.warn(
        "magi_attn_flex_dispatch is deprecated: make a key with magi_attn_flex_key, then dispatch(x, key)",
        DeprecationWarning,
        stacklevel=2,
    )
    key = magi_attn_flex_key(
        q_ranges,
        k_ranges,
        attn_mask_type,
        total_seqlen_q,
        total_seqlen_k,
        num_heads_q,
        num_heads_kv,
        head_dim,
        pad_size,
        cp_group_or_mesh,
        dist_attn_config,
        is_same_source,
        is_q_permutable,
        is_k_permutable,
        chunk_size,
    )
    return dispatch(x, key), key


def magi_attn_varlen_dispatch(
    x: Tensor,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group_or_mesh: GroupLike,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dist_attn_config: DistAttnConfig = DistAttnConfig(),  # noqa: B008  frozen
    chunk_size: int | None = None,
) -> tuple[Tensor, DistAttnRuntimeKey]:
    """Deprecated: ``magi_attn_varlen_key``, then ``dispatch``. Returns ``(local_x, key)``."""
    warnings.warn(
        "magi_attn_varlen_dispatch is deprecated: make a key with magi_attn_varlen_key, then dispatch(x, key)",
        DeprecationWarning,
        stacklevel=2,
    )
    key = magi_attn_varlen_key(
        cu_seqlens_q,
        cu_seqlens_k,
        num_heads_q,
        num_heads_kv,
        head_dim,
        pad_size,
        cp_group_or_mesh,
        causal,
        window_size,
        dist_attn_config,
        chunk_size,
    )
    return dispatch(x, key), key


def make_flex_key_for_new_mask_after_dispatch(
    q_ranges: RangesLike | Mask,
    k_ranges: RangesLike | None,
    attn_mask_type: GeneralAttnMaskType | None,
    key_for_dispatch: DistAttnRuntimeKey,
    num_heads_q: int | None = None,
    num_heads_kv: int | None = None,
    head_dim: int | None = None,
    dist_attn_config: DistAttnConfig | None = None,
    *,
    allow_overlap: bool = False,
) -> DistAttnRuntimeKey:
    """Plan another mask for tensors that another key dispatched (layers of different masks in one model).

    Tokens stay where ``key_for_dispatch`` placed them, so the work may be less balanced. Heads and head dim default to
    that key's. Of ``dist_attn_config``, its dispatch part is replaced by that key's; the rest is honoured.

    Raises:
        ValueError: ``key_for_dispatch`` is cleared or evicted; otherwise as ``magi_attn_flex_key``.
    """
    manager = dist_attn_runtime_dict_mgr.get(key_for_dispatch)
    config = key_for_dispatch.dist_attn_config
    if dist_attn_config is not None:
        config = replace(_configured(dist_attn_config, None, None, 3), dispatch_config=config.dispatch_config)
    request = KeyRequest(
        q_ranges,
        k_ranges,
        attn_mask_type,
        key_for_dispatch.total_seqlen_q,
        key_for_dispatch.total_seqlen_k,
        key_for_dispatch.num_heads_q if num_heads_q is None else num_heads_q,
        key_for_dispatch.num_heads_kv if num_heads_kv is None else num_heads_kv,
        key_for_dispatch.head_dim if head_dim is None else head_dim,
        key_for_dispatch.cp_group,
        config,
        allow_overlap,
    )
    return make_key_on_placement(request, manager)


def make_varlen_key_for_new_mask_after_dispatch(
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    key_for_dispatch: DistAttnRuntimeKey,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dist_attn_config: DistAttnConfig | None = None,
) -> DistAttnRuntimeKey:
    """``make_flex_key_for_new_mask_after_dispatch`` for packed documents, which must have that key's totals."""
    q_ranges, k_ranges, types, total_q, total_k = infer_attn_mask_from_cu_seqlens(
        cu_seqlens_q, cu_seqlens_k, causal, window_size
    )
    dist_attn_runtime_dict_mgr.get(key_for_dispatch)
    if (total_q, total_k) != (key_for_dispatch.total_seqlen_q, key_for_dispatch.total_seqlen_k):
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must end at the totals of key_for_dispatch "
            f"({key_for_dispatch.total_seqlen_q}, {key_for_dispatch.total_seqlen_k}), got ({total_q}, {total_k})"
        )
    return make_flex_key_for_new_mask_after_dispatch(
        q_ranges, k_ranges, types, key_for_dispatch, dist_attn_config=dist_attn_config
    )


def _check_key(key: Any) -> None:
    if not isinstance(key, DistAttnRuntimeKey):
        raise TypeError(f"key must be a DistAttnRuntimeKey, got {type(key).__name__}")


def dispatch(x: Tensor, key: DistAttnRuntimeKey, pad_value: float = 0.0, *, role: str = "q") -> Tensor:
    """This rank's tokens of a tensor that every rank holds whole.

    Args:
        x: ``(total, ...)``, any dtype, equal on all ranks; ``total`` is the key's for ``role``.
        key: names the placement.
        pad_value: fills padding, which follows the last token where shards are even.
        role: ``"q"`` for queries and what goes with them (hidden states, labels), ``"k"`` for keys and values. With one
            placement for both (self attention), the same.

    Returns:
        ``(local tokens, ...)``: the rank's chunks in ascending order. Differentiable: the gradient is gathered over the
        ranks, a collective.

    Raises:
        ValueError: another length, an unknown role, a key whose plan is gone.
    """
    if torch.compiler.is_compiling():
        _check_key(key)
        check_role(role)
        return _OPS.dispatch(x, key.handle, role, float(pad_value), key.shard_q if role == "q" else key.shard_k)  # type: ignore[no-any-return]
    return dist_attn_runtime_dict_mgr.get(key).dispatch(x, pad_value, role)


def undispatch(x: Tensor, key: DistAttnRuntimeKey, is_partial_grad: bool = False, *, role: str = "q") -> Tensor:
    """The whole tensor, on every rank, of what ``dispatch`` parted. A collective; padding is dropped.

    Args:
        x: ``(local tokens, ...)``.
        key: names the placement.
        is_partial_grad: every rank's loss is a different part: the gradient is summed over ranks. False takes the
            gradient as whole and equal on every rank, and only picks the rank's tokens.
        role: as for ``dispatch``.

    Returns:
        ``(total, ...)`` in global order. Differentiable.
    """
    if torch.compiler.is_compiling():
        _check_key(key)
        check_role(role)
        total = key.total_seqlen_q if role == "q" else key.total_seqlen_k
        return _OPS.undispatch(x, key.handle, role, check_bool(is_partial_grad, "is_partial_grad"), total)  # type: ignore[no-any-return]
    return dist_attn_runtime_dict_mgr.get(key).undispatch(x, is_partial_grad, role)


def roll(
    x: Tensor, shift: int, dim: int, key: DistAttnRuntimeKey, *, role: str = "q", pad_value: float = 0.0
) -> Tensor:
    """``torch.roll`` of the true global sequence, on shards: equals undispatch, ``torch.roll``, dispatch.

    Args:
        x: shard with its tokens along ``dim``, any dtype.
        shift: tokens, any sign and size.
        dim: the token dim of ``x``.
        key, role: as for ``dispatch``.
        pad_value: fills padding.

    Returns:
        A new tensor like ``x``. Only tokens that change rank travel. Differentiable: the gradient rolls back.
    """
    if torch.compiler.is_compiling():
        _check_key(key)
        check_role(role)
        return _OPS.roll(x, key.handle, role, shift, dim, float(pad_value))  # type: ignore[no-any-return]
    return dist_attn_runtime_dict_mgr.get(key).roll(x, shift, dim, role, pad_value)


def roll_simple(
    x: Tensor, shift: int, dim: int, key: DistAttnRuntimeKey, *, role: str = "q", pad_value: float = 0.0
) -> Tensor:
    """The same as ``roll``."""
    return roll(x, shift, dim, key, role=role, pad_value=pad_value)


def calc_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key: DistAttnRuntimeKey,
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_max_logits: bool = False,
) -> tuple[Tensor, AttnForwardMeta]:
    """Attention of this rank's queries over every key that the mask shows them, wherever it lies. A collective.

    Args:
        q: ``(local queries, num_heads_q, head_dim)``, this rank's shard.
        k, v: ``(local keys, num_heads_kv, head_dim)`` and ``(local keys, num_heads_kv, head_dim_v)``.
        key: names the plan.
        sink: ``(s_sink, num_heads_q)`` float32, the same on all ranks, or ``(local queries, s_sink, num_heads_q)``. Its
            gradient is this rank's share, unless ``dsink_reduce`` of the configuration says otherwise.
        softmax_scale: factor on ``q @ k^T``; ``head_dim ** -0.5`` when None.
        softcap: above 0, a score ``s`` becomes ``softcap * tanh(s / softcap)``.
        return_max_logits: also return the largest score of each head, over all ranks.

    Returns:
        ``out (local queries, num_heads_q, head_dim_v)`` in the dtype of q, and a meta with ``lse (local queries,
        num_heads_q)``, float32 (float64 for float64), differentiable, and ``max_logits (num_heads_q,)`` or None.
        Padding rows are 0 and -inf and give no gradient.

    Raises:
        ValueError, TypeError: tensors that are not this rank's shards; a key whose plan is gone.
    """
    if torch.compiler.is_compiling():
        _check_key(key)
        *tensors, scale, cap = attention_arguments(key, q, k, v, sink, softmax_scale, softcap, return_max_logits)
        out, lse, max_logits = _OPS.calc_attn_fwd(*tensors, key.handle, scale, cap, return_max_logits)
        return out.to(q.dtype), AttnForwardMeta(lse=lse, max_logits=max_logits if return_max_logits else None)
    manager = dist_attn_runtime_dict_mgr.get(key)
    return manager.calc_attn(q, k, v, sink, softmax_scale, softcap, return_max_logits)


def get_position_ids(key: DistAttnRuntimeKey, *, role: str = "q", device: torch.device | str | None = None) -> Tensor:
    """Global position of every local token, int64 ``(local tokens,)``; padding repeats the last token's.

    Args:
        key, role: as for ``dispatch``.
        device: of the result; where the group's tensors live when None.
    """
    if torch.compiler.is_compiling():
        _check_key(key)
        check_role(role)
        shard_len = key.shard_q if role == "q" else key.shard_k
        return _OPS.position_ids(key.handle, role, shard_len, position_device(key, device))  # type: ignore[no-any-return]
    check_role(role)
    return dist_attn_runtime_dict_mgr.get(key).get_position_ids(AttnRole.QUERY if role == "q" else AttnRole.KEY, device)


def get_most_recent_key(cp_group: GroupLike) -> DistAttnRuntimeKey:
    """The key last made or used on a group.

    Raises:
        ValueError: there is none, or ``cp_group`` is None.
    """
    if cp_group is None:
        raise ValueError("cp_group must name a group, got None")
    return dist_attn_runtime_dict_mgr.most_recent(as_group(cp_group))


def clear_cache(cp_group: GroupLike = None) -> None:
    """Forget the plans of one group, or of all groups when None; their keys no longer work."""
    dist_attn_runtime_dict_mgr.clear(None if cp_group is None else as_group(cp_group))
    if cp_group is None:
        forget_solutions()


def init_dist_attn_runtime_key(
    q_ranges: RangesLike | Mask,
    k_ranges: RangesLike | None,
    attn_mask_type: GeneralAttnMaskType | None,
    total_seqlen_q: int,
    total_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    pad_size: int,
    cp_group: GroupLike,
    chunk_size: int | None = None,
    cp_mesh: GroupLike = None,
    dist_attn_config: DistAttnConfig = DistAttnConfig(),  # noqa: B008  frozen
) -> DistAttnRuntimeKey:
    """``magi_attn_flex_key`` under its older name: ``cp_mesh``, when given, stands for ``cp_group``."""
    return magi_attn_flex_key(
        q_ranges,
        k_ranges,
        attn_mask_type,
        total_seqlen_q,
        total_seqlen_k,
        num_heads_q,
        num_heads_kv,
        head_dim,
        0,
        cp_mesh if cp_mesh is not None else cp_group,
        _with_chunk_size(dist_attn_config, chunk_size),
    )


def init_dist_attn_runtime_mgr(
    q_ranges: RangesLike | Mask,
    k_ranges: RangesLike | None,
    attn_mask_type: GeneralAttnMaskType | None,
    total_seqlen_q: int,
    total_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    chunk_size: int | None,
    cp_group: GroupLike,
    is_same_source: bool = True,
    is_q_permutable: bool = True,
    is_k_permutable: bool = True,
    dist_attn_config: DistAttnConfig = DistAttnConfig(),  # noqa: B008  frozen
    cp_mesh: GroupLike = None,
) -> DistAttnRuntimeMgr:
    """Plan as ``magi_attn_flex_key`` does, and return the manager instead of its key."""
    key = magi_attn_flex_key(
        q_ranges,
        k_ranges,
        attn_mask_type,
        total_seqlen_q,
        total_seqlen_k,
        num_heads_q,
        num_heads_kv,
        head_dim,
        0,
        cp_mesh if cp_mesh is not None else cp_group,
        _with_chunk_size(dist_attn_config, chunk_size),
        is_same_source,
        is_q_permutable,
        is_k_permutable,
    )
    return dist_attn_runtime_dict_mgr.get(key)


__all__: Sequence[str] = [
    "calc_attn",
    "clear_cache",
    "dispatch",
    "get_most_recent_key",
    "get_position_ids",
    "init_dist_attn_runtime_key",
    "init_dist_attn_runtime_mgr",
    "magi_attn_flex_dispatch",
    "magi_attn_flex_key",
    "magi_attn_varlen_dispatch",
    "magi_attn_varlen_key",
    "make_flex_key_for_new_mask_after_dispatch",
    "make_varlen_key_for_new_mask_after_dispatch",
    "roll",
    "roll_simple",
    "undispatch",
]
