"""What a caller may choose about stages, and the cost model that chooses the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..errors import checked_int
from ._arrays import Int64Array, int64_array

_STAGE_ALGORITHMS = {"uniform": 0, "greedy": 1}
_MAX_COST = 2**62


@dataclass(frozen=True)
class PlanOptions:
    """Options of ``plan_distributed``; integers throughout, so that every rank decides alike.

    Attributes:
        degree: stages of remote keys. 0: no overlap, all remote keys come in one blocking stage (``plan.blocking``);
            n: at most n stages; None: the cost model picks 1 .. ``max_degree``. Stages that would be empty on every
            rank do not exist.
        max_degree: largest degree tried when ``degree`` is None.
        min_chunk_size: smallest piece of remote keys, tokens; stages are made of whole pieces.
        max_num_chunks: most pieces of a rank; where there would be more, pieces grow.
        alg: ``uniform`` splits pieces near-evenly, smaller stages first; ``greedy`` takes the borders with the least
            predicted time, found exactly over at most 16 candidate borders, and may use fewer stages than ``degree``.
        shuffle_seed: deal the pieces to stages in an order drawn from this seed (``uniform`` only); None keeps
            ascending keys.
        pair_cost_fs: femtoseconds to compute one (query, key) pair over all heads.
        token_cost_fs: femtoseconds to receive one token of keys and values.
        transfer_start_fs, compute_start_fs: femtoseconds to start a transfer and a stage's kernel.

    The defaults of the costs are one H200 with 64 query and 8 kv heads of 128 in bf16: 4 * 64 * 128 flop a pair at
    650 TFLOP/s, 4096 bytes a token at 270 GB/s.
    """

    degree: int | None = 1
    max_degree: int = 8
    min_chunk_size: int = 512
    max_num_chunks: int = 64
    alg: str = "uniform"
    shuffle_seed: int | None = None
    pair_cost_fs: int = 50_000
    token_cost_fs: int = 15_000_000
    transfer_start_fs: int = 20_000_000_000
    compute_start_fs: int = 5_000_000_000

    def __post_init__(self) -> None:
        if self.degree is not None:
            checked_int(self.degree, "degree", minimum=0, maximum=1024)
        checked_int(self.max_degree, "max_degree", minimum=1, maximum=64)
        checked_int(self.min_chunk_size, "min_chunk_size", minimum=1)
        checked_int(self.max_num_chunks, "max_num_chunks", minimum=1)
        if self.alg not in _STAGE_ALGORITHMS:
            raise ValueError(f"alg must be one of {', '.join(_STAGE_ALGORITHMS)}, got {self.alg!r}")
        if self.shuffle_seed is not None:
            checked_int(self.shuffle_seed, "shuffle_seed", minimum=0, maximum=2**63 - 1)
        for name in ("pair_cost_fs", "token_cost_fs", "transfer_start_fs", "compute_start_fs"):
            checked_int(getattr(self, name), name, minimum=0, maximum=_MAX_COST)

    @staticmethod
    def cost_from_us(microseconds: float, name: str = "cost") -> int:
        """A cost in microseconds (a float, as the public factors are) as femtoseconds, rounded once, here."""
        if isinstance(microseconds, bool) or not isinstance(microseconds, (int, float)):
            raise TypeError(f"{name} must be a number, got {type(microseconds).__name__} {microseconds!r}")
        if not (math.isfinite(microseconds) and 0 <= microseconds * 10**9 <= _MAX_COST):
            raise ValueError(f"{name} must be finite, not negative and below an hour, got {microseconds}")
        return round(microseconds * 10**9)

    def to_array(self) -> Int64Array:
        """The options as the host library takes them (csrc/binding/host_planner.cc, ``stage_options``)."""
        values: list[Any] = [
            -1 if self.degree is None else self.degree,
            self.max_degree,
            self.min_chunk_size,
            self.max_num_chunks,
            _STAGE_ALGORITHMS[self.alg],
            self.shuffle_seed is not None,
            self.shuffle_seed or 0,
            self.pair_cost_fs,
            self.token_cost_fs,
            self.transfer_start_fs,
            self.compute_start_fs,
        ]
        return int64_array([int(v) for v in values], "options")
