"""Sinks where heads are shared out over ranks: tensor parallel, Ulysses."""

from __future__ import annotations

from torch import Tensor

__all__ = ["slice_sink_heads"]


def slice_sink_heads(sink: Tensor, rank: int, world_size: int, *, num_heads_kv: int | None = None) -> Tensor:
    """The sinks of the query heads that ``rank`` computes: a view, so that gradients flow to the whole sink.

    Tensor parallelism and Ulysses both give rank ``r`` of ``n`` the ``r``-th of ``n`` equal runs of query heads. The
    gradient of the whole sink is the sum over the ranks: each fills its own heads.

    Args:
        sink: ``(..., s_sink, num_heads_q)`` of any layout, or ``(num_heads_q,)``. For layout ``ssh`` under Ulysses, the
            rows must be those that the rank computes: all of the sequence, after the all-to-all.
        num_heads_kv: when given, must be divisible by ``world_size`` or divide it, so that every rank's query heads
            read whole kv heads.

    Raises:
        ValueError: ``rank`` is outside ``[0, world_size)``, or heads cannot be shared out evenly.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, world_size={world_size}), got {rank}")
    num_heads = sink.shape[-1]
    if num_heads % world_size != 0:
        raise ValueError(f"world_size must divide the {num_heads} heads of sink, got {world_size}")
    if num_heads_kv is not None and num_heads_kv % world_size != 0 and world_size % num_heads_kv != 0:
        raise ValueError(f"world_size must divide num_heads_kv ({num_heads_kv}) or be a multiple, got {world_size}")
    share = num_heads // world_size
    return sink[..., rank * share : (rank + 1) * share]
