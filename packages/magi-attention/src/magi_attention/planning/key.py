"""The identity of a plan: everything that changes what the distributed calls do, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from magi_comm.groups import Communicator
from magi_core.mask import Mask
from magi_core.mask_type import AttnMaskType
from magi_core.ranges import AttnRanges
from torch import Tensor

from ..config import DistAttnConfig
from ..env import EnvSnapshot


@dataclass(frozen=True, eq=False)
class DistAttnRuntimeKey:
    """What ``dispatch``, ``calc_attn`` and the other calls take. Made by ``magi_attn_flex_key`` and its relatives.

    Two keys are equal when they behave the same: equal masks (however they were written as slices), totals, heads,
    placements of queries and keys, options, environment snapshot, reduction of dsink, and the same group.

    Attributes:
        mask: the mask over true tokens, without padding.
        total_seqlen_q, total_seqlen_k: true tokens.
        num_heads_q, num_heads_kv, head_dim: sizes that ``calc_attn`` checks.
        pad_size: tokens of padding over all ranks, queries.
        chunk_size: tokens of a chunk, the unit of placement of queries.
        cp_group: the communicator of the ranks that share the work.
        cp_group_or_mesh: what the caller named it by.
        dist_attn_config: the options.
        uneven_shard: shards without padding.
        env: what the environment asked for when the key was made.
        dsink_reduce: reduction of a sink's gradient over the group.
        placement: digests of the placements of queries and of keys.
        shard_q, shard_k: length of this rank's local tensors, padding included.
        padded_q, padded_k: lengths of all ranks' local tensors together.
        handle: 0-d int64 CPU tensor, the plan's name in this process; what torch operators receive.
    """

    mask: Mask
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    pad_size: int
    chunk_size: int
    cp_group: Communicator
    cp_group_or_mesh: Any
    dist_attn_config: DistAttnConfig
    env: EnvSnapshot
    dsink_reduce: Literal["none", "sum", "avg"]
    placement: tuple[int, int]
    total_seqlen_q: int
    total_seqlen_k: int
    shard_q: int
    shard_k: int
    padded_q: int
    padded_k: int
    handle: Tensor = field(repr=False)
    _identity: tuple[Any, ...] = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        identity = (
            self.mask.digest,
            self.total_seqlen_q,
            self.total_seqlen_k,
            self.num_heads_q,
            self.num_heads_kv,
            self.head_dim,
            self.placement,
            self.dist_attn_config,
            self.env,
            self.dsink_reduce,
            self.cp_group,
        )
        object.__setattr__(self, "_identity", identity)
        object.__setattr__(self, "_hash", hash(identity))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DistAttnRuntimeKey):
            return NotImplemented
        return self is other or (self._hash == other._hash and self._identity == other._identity)

    def __hash__(self) -> int:
        return self._hash

    def __deepcopy__(self, memo: dict[int, Any]) -> DistAttnRuntimeKey:
        return self  # names a plan of this process; a copy would name the same

    def __reduce__(self) -> Any:
        raise TypeError("DistAttnRuntimeKey cannot be pickled: it names a plan of this process; make it on every rank")

    @property
    def uneven_shard(self) -> bool:
        """Whether shards may differ in length instead of being padded."""
        return self.dist_attn_config.dispatch_config.uneven_shard

    @property
    def cp_size(self) -> int:
        """Ranks that share the work."""
        return self.cp_group.size

    @property
    def cp_rank(self) -> int:
        """This rank among them."""
        return self.cp_group.rank

    @property
    def q_ranges(self) -> AttnRanges:
        """Query ranges of the mask's slices."""
        return _ranges(self.mask.slices()[0])

    @property
    def k_ranges(self) -> AttnRanges:
        """Key ranges of the mask's slices."""
        return _ranges(self.mask.slices()[1])

    @property
    def attn_mask_type(self) -> tuple[AttnMaskType, ...]:
        """Types of the mask's slices."""
        return tuple(AttnMaskType.from_int_type(int(t)) for t in self.mask.slices()[2])


def _ranges(pairs: Any) -> AttnRanges:
    return AttnRanges.from_ranges([(int(start), int(end)) for start, end in pairs])


__all__ = ["DistAttnRuntimeKey"]
