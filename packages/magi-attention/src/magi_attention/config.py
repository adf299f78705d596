"""Options of a plan: frozen, hashable dataclasses, each validated when it is made.

Two configurations that compare equal behave the same, and nothing here reads the environment or rewrites a field: what
you pass is what the key holds. Names and defaults are those of the public interface; where its behaviour was a trap
(``degree=0`` equal to ``degree=1``, an unseeded random dispatch), the docstring says what we do instead.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from .common.enum import AttnOverlapMode, DispatchAlgType, OverlapAlgType

if TYPE_CHECKING:
    import torch

__all__ = [
    "BalancedDispatchAlg",
    "BSDispatchAlg",
    "BTPDispatchAlg",
    "BatchToppHeapDispatchAlg",
    "DPDispatchAlg",
    "DispatchAlg",
    "DispatchConfig",
    "DistAttnConfig",
    "GreedyOverlapAlg",
    "GrpCollConfig",
    "LBDispatchAlg",
    "MinHeapDispatchAlg",
    "OverlapAlg",
    "OverlapConfig",
    "RandomSelectDispatchAlg",
    "SequentialDispatchAlg",
    "SortedSequentialSelectAlg",
    "ToppHeapDispatchAlg",
    "UniformOverlapAlg",
]


def _check_int(owner: str, name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{owner}.{name} must be an int, got {value!r} of type {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{owner}.{name} must be at least {minimum}, got {value}")


def _check_float(owner: str, name: str, value: object, minimum: float, maximum: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{owner}.{name} must be a number, got {value!r} of type {type(value).__name__}")
    if not (math.isfinite(value) and minimum <= value <= maximum):
        bound = f"at least {minimum:g}" if maximum == math.inf else f"within [{minimum:g}, {maximum:g}]"
        raise ValueError(f"{owner}.{name} must be finite and {bound}, got {value}")


def _check_bool(owner: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{owner}.{name} must be a bool, got {value!r} of type {type(value).__name__}")


def _check_instance(owner: str, name: str, value: object, expected: type) -> None:
    if not isinstance(value, expected):
        raise TypeError(
            f"{owner}.{name} must be a {expected.__name__}, got {value!r} of type {type(value).__name__}"
            + (" (pass an instance, not the class)" if isinstance(value, type) and issubclass(value, expected) else "")
        )


@dataclass(frozen=True)
class DispatchAlg:
    """How chunks of queries are given to ranks so that every rank has the same work. Base of the classes below."""

    type: ClassVar[DispatchAlgType]
    is_optimal: ClassVar[bool]
    """The largest load is the smallest possible."""
    is_partitions_returned: ClassVar[bool]
    """Gives a placement, not only a bound; a plan needs one."""
    is_equal_num_workloads: ClassVar[bool]
    """Insists on the same number of chunks on every rank, so it cannot serve ``uneven_shard=True``."""
    is_affinity_considered: ClassVar[bool] = False
    """Prefers a rank that already needs the keys of a chunk."""

    def __post_init__(self) -> None:
        if type(self) is DispatchAlg:
            raise TypeError(
                "DispatchAlg is the base of the dispatch algorithms; use one of them, e.g. MinHeapDispatchAlg()"
            )


@dataclass(frozen=True)
class BalancedDispatchAlg(DispatchAlg):
    """Balance and locality together, at chunk counts that differ by at most one (the default).

    A rank's work and the keys it must receive have a price each; chunks that share keys land together while the
    largest work stays within the slack. Results do not depend on the placement, traffic does.

    Args:
        balance_slack: the dial from balance to locality: the largest area over the mean, less one, that costs nothing.
            0 balances as well as it can; 0.05 trades up to 5 % of balance for less traffic.
    """

    balance_slack: float = 0.01
    type = DispatchAlgType.BALANCED
    is_optimal = False
    is_partitions_returned = True
    is_equal_num_workloads = False
    is_affinity_considered = True

    def __post_init__(self) -> None:
        _check_float(type(self).__name__, "balance_slack", self.balance_slack, 0.0, 1000.0)


@dataclass(frozen=True)
class LBDispatchAlg(DispatchAlg):
    """Min heap, then swaps of chunks until the lower bound of the largest load is met or no swap helps.

    The public class of this name gives a bound and no placement; this one gives both.
    """

    type = DispatchAlgType.LOWER_BOUND
    is_optimal = False
    is_partitions_returned = True
    is_equal_num_workloads = False


@dataclass(frozen=True)
class DPDispatchAlg(DispatchAlg):
    """The least largest load at any chunk counts: exact up to 12 chunks, a bounded search beyond.

    The public class of this name gives a bound and no placement; this one gives both.
    """

    type = DispatchAlgType.DYNAMIC_PROGRAMMING
    is_optimal = True
    is_partitions_returned = True
    is_equal_num_workloads = False


@dataclass(frozen=True)
class BSDispatchAlg(DispatchAlg):
    """Optimal by binary search on the largest load; exponential in the worst case, for few chunks."""

    type = DispatchAlgType.BINARY_SEARCH
    is_optimal = True
    is_partitions_returned = True
    is_equal_num_workloads = False


@dataclass(frozen=True)
class MinHeapDispatchAlg(DispatchAlg):
    """Largest chunk first, to the rank with the least work that still has room; blind to communication."""

    type = DispatchAlgType.MIN_HEAP
    is_optimal = False
    is_partitions_returned = True
    is_equal_num_workloads = False


@dataclass(frozen=True)
class BTPDispatchAlg(DispatchAlg):
    """Optimal under equal chunk counts by branch and bound; exponential in the worst case, for few chunks."""

    type = DispatchAlgType.BACKTRACKING_PRUNING
    is_optimal = True
    is_partitions_returned = True
    is_equal_num_workloads = True


@dataclass(frozen=True)
class ToppHeapDispatchAlg(DispatchAlg):
    """Like min heap, but among the ``max(1, ceil(world_size * top_p))`` lightest ranks takes the one that already
    needs most of the keys of the chunk.

    Args:
        top_p: share of the ranks considered, 0 to 1. 0 considers only the lightest.
    """

    top_p: float = 0.0
    type = DispatchAlgType.TOPP_HEAP
    is_optimal = False
    is_partitions_returned = True
    is_equal_num_workloads = True
    is_affinity_considered = True

    def __post_init__(self) -> None:
        _check_float(type(self).__name__, "top_p", self.top_p, 0.0, 1.0)


@dataclass(frozen=True)
class BatchToppHeapDispatchAlg(DispatchAlg):
    """``ToppHeapDispatchAlg`` that chooses the best of ``num_of_select_chunk`` chunks at a time.

    Args:
        top_p: share of the ranks considered, 0 to 1.
        num_of_select_chunk: chunks considered together, at least 1.
    """

    top_p: float = 0.0
    num_of_select_chunk: int = 1
    type = DispatchAlgType.BATCH_TOPP_HEAP
    is_optimal = False
    is_partitions_returned = True
    is_equal_num_workloads = True
    is_affinity_considered = True

    def __post_init__(self) -> None:
        _check_float(type(self).__name__, "top_p", self.top_p, 0.0, 1.0)
        _check_int(type(self).__name__, "num_of_select_chunk", self.num_of_select_chunk, 1)


@dataclass(frozen=True)
class RandomSelectDispatchAlg(DispatchAlg):
    """Shuffled chunks: a baseline. Shuffled with ``random_seed`` and never with a process-wide generator, because
    ranks that drew different placements would wait for each other for ever.

    Args:
        random_seed: the same on every rank, at least 0.
    """

    random_seed: int = 0
    type = DispatchAlgType.RANDOM_SELECT
    is_optimal = False
    is_partitions_returned = True
    is_equal_num_workloads = True

    def __post_init__(self) -> None:
        _check_int(type(self).__name__, "random_seed", self.random_seed, 0)


@dataclass(frozen=True)
class SequentialDispatchAlg(DispatchAlg):
    """Contiguous blocks of chunks: the best locality, and no balancing at all."""

    type = DispatchAlgType.SEQUENTIAL_SELECT
    is_optimal = False
    is_partitions_returned = True
    is_equal_num_workloads = False


@dataclass(frozen=True)
class SortedSequentialSelectAlg(DispatchAlg):
    """Largest slice first, its chunks poured into the lightest rank until that is full: locality before balance.

    Args:
        allocation_ratio: share of a slice's chunks given to one rank before the next lightest is taken, above 0 to 1.
    """

    allocation_ratio: float = 1.0
    type = DispatchAlgType.SORTED_SEQUENTIAL_SELECT
    is_optimal = False
    is_partitions_returned = True
    is_equal_num_workloads = True
    is_affinity_considered = True

    def __post_init__(self) -> None:
        _check_float(type(self).__name__, "allocation_ratio", self.allocation_ratio, 0.0, 1.0)
        if self.allocation_ratio == 0:
            raise ValueError("SortedSequentialSelectAlg.allocation_ratio must be above 0, got 0")


@dataclass(frozen=True)
class DispatchConfig:
    """How the sequence is cut and placed.

    Args:
        chunk_size: tokens of a chunk, the unit of placement. None takes ``ceil(total_q / (min_chunks_per_rank *
            world_size))``, a given size is an upper bound on that. With ``BalancedDispatchAlg``, None and the default
            number of chunks per rank, chunks shrink (to 64 tokens at least) while the largest holds more than four
            fifths of a rank's share of the work.
        uneven_shard: no padding: the last chunk may be short and ranks may hold different numbers of tokens.
        alg: the placement algorithm.
    """

    chunk_size: int | None = None
    uneven_shard: bool = False
    alg: DispatchAlg = field(default_factory=BalancedDispatchAlg)

    def __post_init__(self) -> None:
        if self.chunk_size is not None:
            _check_int("DispatchConfig", "chunk_size", self.chunk_size, 1)
        _check_bool("DispatchConfig", "uneven_shard", self.uneven_shard)
        _check_instance("DispatchConfig", "alg", self.alg, DispatchAlg)
        if self.uneven_shard and self.alg.is_equal_num_workloads:
            raise ValueError(
                f"DispatchConfig.uneven_shard=True needs an alg without equal chunk counts (BalancedDispatchAlg, "
                f"MinHeapDispatchAlg, BSDispatchAlg or SequentialDispatchAlg), got {type(self.alg).__name__}"
            )


@dataclass(frozen=True)
class OverlapAlg:
    """How remote keys are cut into stages. Base of the classes below."""

    type: ClassVar[OverlapAlgType]

    def __post_init__(self) -> None:
        if type(self) is OverlapAlg:
            raise TypeError(
                "OverlapAlg is the base of the overlap algorithms; use one of them, e.g. UniformOverlapAlg()"
            )


@dataclass(frozen=True)
class UniformOverlapAlg(OverlapAlg):
    """Stages of nearly equal size, in ascending order of keys.

    Args:
        random_costs: shuffle the pieces over the stages instead (a baseline for measurements).
        random_seed: of that shuffle, the same on every rank; None is seed 0, never a process-wide generator.
    """

    random_costs: bool = False
    random_seed: int | None = None
    type = OverlapAlgType.UNIFORM

    def __post_init__(self) -> None:
        _check_bool("UniformOverlapAlg", "random_costs", self.random_costs)
        if self.random_seed is not None:
            _check_int("UniformOverlapAlg", "random_seed", self.random_seed, 0)


@dataclass(frozen=True)
class GreedyOverlapAlg(OverlapAlg):
    """Stages chosen by the cost model instead of equal size."""

    type = OverlapAlgType.GREEDY


@dataclass(frozen=True)
class OverlapConfig:
    """How transfers hide behind computation.

    Args:
        mode: STATIC takes ``degree`` stages; DYNAMIC chooses their number by the cost model.
        degree: remote stages. 0 waits for everything and computes in one stage, nothing overlapped; n >= 1 computes
            the local keys first, then n remote stages; None chooses (the same as ``mode=DYNAMIC``).
        dynamic_max_degree: most stages the automatic choice may take.
        min_chunk_size: smallest piece of remote keys, in tokens.
        max_num_chunks: most pieces of remote keys; pieces grow to stay within it.
        alg: how pieces become stages.
        calc_cost_factor: microseconds per unit of mask area.
        comm_cost_factor: microseconds per key token received.

    Two configurations of different degree are never equal, and no field is rewritten. ``mode=DYNAMIC`` with a degree
    of 2 or more is a contradiction and a ValueError; with a degree of 0 or 1 it is static, as in the public interface.
    """

    mode: AttnOverlapMode = AttnOverlapMode.STATIC
    degree: int | None = 1
    dynamic_max_degree: int = 8
    min_chunk_size: int = 512
    max_num_chunks: int = 64
    alg: OverlapAlg = field(default_factory=UniformOverlapAlg)
    calc_cost_factor: float = 1.0
    comm_cost_factor: float = 1.0

    def __post_init__(self) -> None:
        _check_instance("OverlapConfig", "mode", self.mode, AttnOverlapMode)
        _check_instance("OverlapConfig", "alg", self.alg, OverlapAlg)
        if self.degree is not None:
            _check_int("OverlapConfig", "degree", self.degree, 0)
            if self.mode is AttnOverlapMode.DYNAMIC and self.degree > 1:
                raise ValueError(
                    f"OverlapConfig.degree must be None with mode=DYNAMIC, which chooses it, got {self.degree}"
                )
        _check_int("OverlapConfig", "dynamic_max_degree", self.dynamic_max_degree, 1)
        _check_int("OverlapConfig", "min_chunk_size", self.min_chunk_size, 1)
        _check_int("OverlapConfig", "max_num_chunks", self.max_num_chunks, 1)
        _check_float("OverlapConfig", "calc_cost_factor", self.calc_cost_factor, 0.0)
        _check_float("OverlapConfig", "comm_cost_factor", self.comm_cost_factor, 0.0)

    @property
    def enable(self) -> bool:
        """Whether transfers and computation overlap."""
        return self.degree != 0

    @property
    def no_overlap(self) -> bool:
        """Whether everything is received before one single computation (``degree=0``)."""
        return self.degree == 0

    @property
    def is_dynamic(self) -> bool:
        """Whether the number of stages is chosen by the cost model."""
        return self.degree is None


# Rank counts for which the public interface gives a default group collective configuration.
_INTRANODE_RANKS = (2, 4, 8)
_INTERNODE_RANKS = (16, 24, 32, 64, 128, 144, 160)


@dataclass(frozen=True)
class GrpCollConfig:
    """Sizes of the device-side group collectives: hints, without effect on results, and without any effect on the
    portable transport.

    Args:
        num_sms: SMs of a collective kernel, even: two make one channel.
        nvl_chunk_size, nvl_buffer_size: tokens sent at once, and kept per peer and channel, over NVLink.
        rdma_chunk_size, rdma_buffer_size: the same over RDMA.
        num_nvl_bytes, num_rdma_bytes: bytes of the two buffers.
    """

    num_sms: int = 24
    nvl_chunk_size: int = 8
    nvl_buffer_size: int = 256
    rdma_chunk_size: int = 16
    rdma_buffer_size: int = 128
    num_nvl_bytes: int = int(2e9)
    num_rdma_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("num_nvl_bytes", "num_rdma_bytes"):
            value = getattr(self, name)
            if isinstance(value, float) and value.is_integer():  # 2e9 is how such sizes are written
                object.__setattr__(self, name, int(value))
        for name in ("num_sms", "nvl_chunk_size", "nvl_buffer_size", "rdma_chunk_size", "rdma_buffer_size"):
            _check_int("GrpCollConfig", name, getattr(self, name), 1)
        for name in ("num_nvl_bytes", "num_rdma_bytes"):
            _check_int("GrpCollConfig", name, getattr(self, name), 0)
        if self.num_sms % 2:
            raise ValueError(f"GrpCollConfig.num_sms must be even (two SMs make a channel), got {self.num_sms}")
        if self.nvl_chunk_size >= self.nvl_buffer_size:
            raise ValueError(
                f"GrpCollConfig.nvl_chunk_size must be below nvl_buffer_size={self.nvl_buffer_size}, "
                f"got {self.nvl_chunk_size}"
            )
        if 2 * self.rdma_chunk_size > self.rdma_buffer_size:
            raise ValueError(
                f"GrpCollConfig.rdma_chunk_size must be at most half of rdma_buffer_size={self.rdma_buffer_size}, "
                f"got {self.rdma_chunk_size}"
            )

    @property
    def num_channels(self) -> int:
        """Channels of a collective kernel."""
        return self.num_sms // 2

    def to_kernel_config(self) -> dict[str, int]:
        """The sizes a collective kernel takes, by name."""
        names = ("num_sms", "nvl_chunk_size", "nvl_buffer_size", "rdma_chunk_size", "rdma_buffer_size")
        return {name: getattr(self, name) for name in names}

    def to_buffer_args(self) -> dict[str, int]:
        """The sizes a communication buffer takes, by name, in bytes."""
        return {"num_nvl_bytes": self.num_nvl_bytes, "num_rdma_bytes": self.num_rdma_bytes}

    @classmethod
    def get_default_group_cast_config(cls, num_ranks: int) -> "GrpCollConfig":
        """The default for a cast among ``num_ranks`` ranks: 2, 4, 8 (one node), 16, 24, 32, 64, 128, 144 or 160.

        Raises:
            ValueError: another number of ranks.
        """
        return cls._default_for(num_ranks)

    @classmethod
    def get_default_group_reduce_config(cls, num_ranks: int) -> "GrpCollConfig":
        """The default for a reduce among ``num_ranks`` ranks: that of the cast."""
        return cls._default_for(num_ranks)

    @classmethod
    def _default_for(cls, num_ranks: int) -> "GrpCollConfig":
        _check_int("get_default_config", "num_ranks", num_ranks, 1)
        if num_ranks in _INTRANODE_RANKS:
            return cls()
        if num_ranks in _INTERNODE_RANKS:
            return cls(num_rdma_bytes=cls.num_nvl_bytes)
        raise ValueError(f"num_ranks must be one of {_INTRANODE_RANKS + _INTERNODE_RANKS}, got {num_ranks}")

    def get_min_num_bytes_intranode(
        self, num_ranks: int, hidden_size: int, dtype: "torch.dtype", *, num_groups: int = 1, num_heads: int = 0
    ) -> int:
        """Bytes of NVLink buffer that a transfer inside one node needs at least.

        Every channel keeps ``nvl_buffer_size`` tokens per peer and transferred tensor; beside each token its source
        index (int32) and its lse per head (float32), beside each peer four int32 counters of the ring.

        Args:
            num_ranks: ranks of the node.
            hidden_size: elements of a token in one tensor.
            dtype: of the elements.
            num_groups: tensors that travel together, e.g. 2 for k and v.
            num_heads: heads whose lse travels too; 0 for none.
        """
        _check_int("get_min_num_bytes_intranode", "num_ranks", num_ranks, 1)
        _check_int("get_min_num_bytes_intranode", "hidden_size", hidden_size, 1)
        _check_int("get_min_num_bytes_intranode", "num_groups", num_groups, 1)
        _check_int("get_min_num_bytes_intranode", "num_heads", num_heads, 0)
        token_bytes = hidden_size * dtype.itemsize * num_groups + 4 + 4 * num_heads
        per_peer = self.nvl_buffer_size * token_bytes + 4 * 4
        return self.num_channels * num_ranks * per_peer

    def get_min_num_bytes_internode(
        self,
        num_ranks: int,
        hidden_size: int,
        dtype: "torch.dtype",
        *,
        num_groups: int = 1,
        num_heads: int = 0,
        num_ranks_per_node: int = 8,
    ) -> tuple[int, int]:
        """Bytes of (RDMA, NVLink) buffer that a transfer between nodes needs at least.

        Args: as for ``get_min_num_bytes_intranode``; ``num_ranks`` counts all ranks, a multiple of
            ``num_ranks_per_node``. The RDMA buffer is counted twice, to send and to receive.
        """
        _check_int("get_min_num_bytes_internode", "num_ranks_per_node", num_ranks_per_node, 1)
        _check_int("get_min_num_bytes_internode", "num_ranks", num_ranks, 1)
        if num_ranks % num_ranks_per_node:
            raise ValueError(
                f"num_ranks must be a multiple of num_ranks_per_node={num_ranks_per_node}, got {num_ranks}"
            )
        num_nodes = num_ranks // num_ranks_per_node
        nvl = self.get_min_num_bytes_intranode(
            num_ranks_per_node, hidden_size, dtype, num_groups=num_groups, num_heads=num_heads
        )
        token_bytes = hidden_size * dtype.itemsize * num_groups + 4 + 4 * num_heads
        rdma = 2 * self.num_channels * num_nodes * (self.rdma_buffer_size * token_bytes + 4 * 4)
        return rdma, nvl


@dataclass(frozen=True)
class DistAttnConfig:
    """All options of a plan. Part of the key.

    Args:
        dispatch_config: cutting and placement.
        overlap_config: stages.
        grpcoll_config: sizes of device-side collectives.
        dsink_reduce: what happens to the gradient of a sink, which on each rank is that rank's share: ``"none"`` leaves
            it (the framework sums it, as it does for every replicated parameter), ``"sum"`` and ``"avg"`` all-reduce it
            over the group. None is ``MAGI_ATTENTION_DSINK_ALL_REDUCE_OP``, and ``"none"`` without that.
    """

    dispatch_config: DispatchConfig = field(default_factory=DispatchConfig)
    overlap_config: OverlapConfig = field(default_factory=OverlapConfig)
    grpcoll_config: GrpCollConfig = field(default_factory=GrpCollConfig)
    dsink_reduce: Literal["none", "sum", "avg"] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_instance("DistAttnConfig", "dispatch_config", self.dispatch_config, DispatchConfig)
        _check_instance("DistAttnConfig", "overlap_config", self.overlap_config, OverlapConfig)
        _check_instance("DistAttnConfig", "grpcoll_config", self.grpcoll_config, GrpCollConfig)
        if self.dsink_reduce not in (None, "none", "sum", "avg"):
            raise ValueError(
                f"DistAttnConfig.dsink_reduce must be 'none', 'sum', 'avg' or None, got {self.dsink_reduce!r}"
            )
