"""Everything one rank keeps for a key: placements, transports, the planned attention; and the calls on it."""

from __future__ import annotations

from typing import Any

import torch
from magi_core.backends.reference import compute_dtype
from magi_core.bands import Bands
from magi_core.checks import check_bool, check_qkv, check_score_options, check_sink
from magi_core.errors import checked_int
from magi_core.flex_attn import AttnForwardMeta
from magi_core.planner import DistPlan
from magi_core.ranges import AttnRanges
from torch import Tensor

from ..common.enum import AttnRole
from ..runtime.attention import DistAttention, DistAttnRuntime, sink_layout_of
from ..runtime.transport import Dispatch, Roll, Transport, Undispatch
from ..utils.nvtx import instrument_nvtx
from .arguments import as_mask, check_role
from .key import DistAttnRuntimeKey


class DistAttnRuntimeMgr:
    """One rank's live plan. Made by the key functions, found again through the key or its handle.

    Attributes:
        key: what names it.
        dist_plan: the whole plan, equal on every rank.
        runtime: this rank's stages and transfers.
    """

    def __init__(
        self,
        key: DistAttnRuntimeKey,
        dist_plan: DistPlan,
        runtime: DistAttnRuntime,
        q_transport: Transport,
        k_transport: Transport,
    ) -> None:
        self.key = key
        self.dist_plan = dist_plan
        self.runtime = runtime
        self._transports = {"q": q_transport, "k": k_transport}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DistAttnRuntimeMgr) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def transport(self, role: str) -> Transport:
        """The placement of queries (``"q"``) or of keys and values (``"k"``), with its collectives."""
        check_role(role)
        return self._transports[role]

    def transport_of_whole(self, x: Tensor, role: str) -> Transport:
        """``transport`` for ``x (total, ...)``; raises TypeError, ValueError when x is no such tensor."""
        transport = self.transport(role)
        _check_tensor(x)
        total = transport.placement.total
        if x.dim() == 0 or x.shape[0] != total:
            raise ValueError(f"x must have the key's total_seqlen_{role} ({total}) rows, got shape {tuple(x.shape)}")
        return transport

    def transport_of_shard(self, x: Tensor, dim: int, role: str) -> Transport:
        """``transport`` for ``x`` with this rank's tokens along ``dim``; refuses one that has not."""
        transport = self.transport(role)
        _check_tensor(x)
        if not -x.dim() <= dim < max(x.dim(), 1):
            raise ValueError(f"dim must be a dim of x, within [{-x.dim()}, {x.dim()}), got {dim}")
        if x.dim() == 0 or x.shape[dim] != transport.shard_len:
            raise ValueError(
                f"x must have this rank's {transport.shard_len} local tokens along dim {dim}, "
                f"got shape {tuple(x.shape)}"
            )
        return transport

    @instrument_nvtx
    def dispatch(self, x: Tensor, pad_value: float = 0.0, role: str = "q") -> Tensor:
        """``(total, ...)`` on every rank to this rank's shard."""
        return Dispatch.apply(x, self.transport_of_whole(x, role), float(pad_value))  # type: ignore[no-any-return]

    @instrument_nvtx
    def undispatch(self, x: Tensor, is_partial_grad: bool = False, role: str = "q") -> Tensor:
        """This rank's shard to ``(total, ...)`` on every rank."""
        transport = self.transport_of_shard(x, 0, role)
        return Undispatch.apply(x, transport, check_bool(is_partial_grad, "is_partial_grad"))  # type: ignore[no-any-return]

    @instrument_nvtx
    def roll(self, x: Tensor, shift: int, dim: int = 0, role: str = "q", pad_value: float = 0.0) -> Tensor:
        """The shard of the global tensor rolled by ``shift`` tokens along its sequence, which is ``dim`` of ``x``."""
        shift, dim = checked_int(shift, "shift", maximum=None), checked_int(dim, "dim")
        transport = self.transport_of_shard(x, dim, role)
        return Roll.apply(x, transport, shift, dim, float(pad_value))  # type: ignore[no-any-return]

    def dispatch_qo(self, x: Tensor, pad_value: float = 0.0) -> Tensor:
        """``dispatch`` of queries, out and whatever goes with them."""
        return self.dispatch(x, pad_value, "q")

    def dispatch_kv(self, x: Tensor, pad_value: float = 0.0) -> Tensor:
        """``dispatch`` of keys and values."""
        return self.dispatch(x, pad_value, "k")

    def undispatch_qo(self, x: Tensor, is_partial_grad: bool = False) -> Tensor:
        """``undispatch`` of queries, out and whatever goes with them."""
        return self.undispatch(x, is_partial_grad, "q")

    def undispatch_kv(self, x: Tensor, is_partial_grad: bool = False) -> Tensor:
        """``undispatch`` of keys and values."""
        return self.undispatch(x, is_partial_grad, "k")

    def roll_simple(self, x: Tensor, shift: int, dim: int = 0) -> Tensor:
        """The same as ``roll``."""
        return self.roll(x, shift, dim)

    @instrument_nvtx
    def calc_attn(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None = None,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        return_max_logits: bool = False,
    ) -> tuple[Tensor, AttnForwardMeta]:
        """Attention of this rank's queries over all keys that the mask shows them; see ``api.calc_attn``."""
        *tensors, scale, cap = attention_arguments(self.key, q, k, v, sink, softmax_scale, softcap, return_max_logits)
        out, lse, max_logits = DistAttention.apply(*tensors, self.runtime, scale, cap, return_max_logits)
        return out.to(q.dtype), AttnForwardMeta(lse=lse, max_logits=max_logits if return_max_logits else None)

    def get_position_ids(
        self, attn_role: AttnRole = AttnRole.QUERY, device: torch.device | str | None = None
    ) -> Tensor:
        """Global position of each token of the shard, int64; padding repeats the last token's."""
        role = "q" if attn_role is AttnRole.QUERY else "k"
        return self.transport(role).positions(position_device(self.key, device)).clone()

    def get_xattn_args(
        self, ref_xattn_q_ranges: Any, ref_xattn_k_ranges: Any, attn_mask_type: Any = "full", total_k: int | None = None
    ) -> tuple[AttnRanges, AttnRanges, list[int]]:
        """A second mask, of the same queries against keys that this rank holds whole, in local query coordinates.

        Args:
            ref_xattn_q_ranges, ref_xattn_k_ranges, attn_mask_type: the slices in global coordinates, any type.
            total_k: keys; the largest end when None.

        Returns:
            ``(q_ranges, k_ranges, mask_type_codes)`` for ``flex_flash_attn_func`` on the local queries.
        """
        transport = self.transport("q")
        if total_k is None:
            total_k = max((int(pair[1]) for pair in _pairs(ref_xattn_k_ranges)), default=0)
        mask = as_mask(ref_xattn_q_ranges, ref_xattn_k_ranges, attn_mask_type, transport.placement.total, total_k)
        codes: list[int] = []
        q_ranges, k_ranges, start = AttnRanges(), AttnRanges(), 0
        for begin, end in transport.placement.ranges[self.key.cp_rank].tolist():
            part: Bands = mask.bands.clip(q=(begin, end)).shift(start - begin, 0)
            start += end - begin
            q, k, types = part.to_slices()
            q_ranges.extend(AttnRanges.from_ranges(q.tolist()))
            k_ranges.extend(AttnRanges.from_ranges(k.tolist()))
            codes.extend(int(t) for t in types)
        return q_ranges, k_ranges, codes


def _check_tensor(x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")


def _pairs(ranges: Any) -> list[Any]:
    if isinstance(ranges, AttnRanges):
        return list(ranges.to_naive_ranges())
    return ranges.tolist() if hasattr(ranges, "tolist") else list(ranges)


def attention_arguments(
    key: DistAttnRuntimeKey,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    softmax_scale: float | None,
    softcap: float,
    return_max_logits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float, float]:
    """The arguments of ``calc_attn`` as its stages take them: checked before anything travels; q, k and v in the dtype
    that the environment asked for when the key was made, the sink in that of the scores.

    Returns:
        ``(q, k, v, sink, softmax_scale, softcap)``.

    Raises:
        ValueError, TypeError: naming the argument, what the key expects, and what came.
    """
    for name, x, heads, rows in (
        ("q", q, key.num_heads_q, key.shard_q),
        ("k", k, key.num_heads_kv, key.shard_k),
        ("v", v, key.num_heads_kv, key.shard_k),
    ):
        if not isinstance(x, Tensor) or x.dim() != 3:
            continue  # for check_qkv to refuse
        if x.shape[0] != rows or x.shape[1] != heads:
            raise ValueError(
                f"{name} must have the key's {rows} local tokens and {heads} heads on this rank, "
                f"got shape {tuple(x.shape)}"
            )
        if name != "v" and x.shape[2] != key.head_dim:
            raise ValueError(f"{name} must have the key's head_dim {key.head_dim}, got {x.shape[2]}")
    check_qkv(q, k, v)
    scale, cap = check_score_options(softmax_scale, softcap, q.shape[2])
    check_bool(return_max_logits, "return_max_logits")
    if sink is not None:
        check_sink(sink, sink_layout_of(sink), key.shard_q, key.num_heads_q, q.device)
    if key.env.precision is not None:
        dtype = key.env.precision.to_torch_dtype()
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v, None if sink is None else sink.to(compute_dtype(q.dtype)), scale, cap


def position_device(key: DistAttnRuntimeKey, device: torch.device | str | None) -> torch.device:
    """``device``, or where this group's tensors live: the current GPU for a group that moves GPU tensors, else CPU."""
    if device is not None:
        return torch.device(device)
    group: Any = key.cp_group
    while not hasattr(group, "backend") and (hasattr(group, "flat") or hasattr(group, "comm")):
        group = group.flat if hasattr(group, "flat") else group.comm  # two-level and counting wrappers
    if "nccl" in str(getattr(group, "backend", "")) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


__all__ = [
    "DistAttnRuntimeMgr",
    "attention_arguments",
    "position_device",
]
