"""What a key planned: balance per rank, bytes per rank and link, stages and their predicted overlap, and a picture."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from magi_core.planner import PlanReport, explain_plan

from .drawing import IntArray, rank_grid, to_text, write_png
from .planning.key import DistAttnRuntimeKey
from .planning.registry import dist_attn_runtime_dict_mgr
from .planning.solve import plan_options

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True, eq=False)
class Explanation:
    """The answer of ``explain``: printed, it is the table, the links and the picture.

    Attributes:
        report: the numbers (``magi_core.planner.PlanReport``), in tokens, pairs and femtoseconds.
        shard_q, shard_k: per rank the length of local tensors, padding included.
        grid: the mask in cells, each the rank that computes its rows, -1 where nothing is visible.
    """

    report: PlanReport
    shard_q: tuple[int, ...]
    shard_k: tuple[int, ...]
    grid: IntArray

    @property
    def received_bytes(self) -> list[int]:
        """Bytes of keys and values that each rank receives in a forward pass."""
        return [int(n) * self.report.bytes_per_token for n in self.report.received]

    @property
    def sent_bytes(self) -> list[int]:
        """Bytes of keys and values that each rank sends in a forward pass, one copy per destination."""
        return [int(n) * self.report.bytes_per_token for n in self.report.sent]

    @property
    def link_bytes(self) -> list[list[int]]:
        """``[source][destination]`` bytes of a forward pass; a backward pass moves them again, and as many back."""
        return [[int(n) * self.report.bytes_per_token for n in row] for row in self.report.links]

    def links(self) -> str:
        """The KiB of every link as a table, sources down, destinations across."""
        world = self.report.world_size
        header = ["KiB from\\to", *(str(rank) for rank in range(world))]
        rows = [
            [str(source), *(f"{size / 1024:.1f}" if size else "." for size in row)]
            for source, row in enumerate(self.link_bytes)
        ]
        widths = [max(len(line[i]) for line in [header, *rows]) for i in range(world + 1)]
        return "\n".join("  ".join(x.rjust(w) for x, w in zip(line, widths, strict=True)) for line in [header, *rows])

    def picture(self, *, colour: bool = False) -> str:
        """The mask as text, each cell the symbol of the rank that computes it; ``.`` where nothing is visible."""
        return to_text(self.grid, colour=colour)

    def save_png(self, path: str | os.PathLike[str], *, scale: int = 4) -> None:
        """Write the picture as a PNG, ``scale`` pixels per cell.

        Raises:
            ValueError: a mask without rows or columns has no picture.
        """
        write_png(path, self.grid, scale=scale)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for JSON."""
        return self.report.to_dict() | {
            "shard_q": list(self.shard_q),
            "shard_k": list(self.shard_k),
            "received_bytes": self.received_bytes,
            "sent_bytes": self.sent_bytes,
            "link_bytes": self.link_bytes,
        }

    def __str__(self) -> str:
        parts = [str(self.report)]
        pads = sum(self.shard_q) - self.report.total_q
        if pads:
            parts.append(f"shards of queries are padded by {pads} tokens in all")
        if self.report.world_size > 1:
            parts.append(self.links())
        return "\n\n".join([*parts, self.picture()])


def explain(
    key: DistAttnRuntimeKey,
    *,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    height: int = 32,
    width: int = 64,
) -> Explanation:
    """Balance, traffic, stages and predicted overlap of a key's plan, as a table and a picture.

    Every rank knows the whole plan: any one may ask, and nothing is communicated.

    Args:
        key: whose plan.
        head_dim_v: of the values that will travel; the key's head dim when None.
        dtype: of keys and values on the wire.
        height, width: cells of the picture.

    Returns:
        An ``Explanation``; print it, or take its numbers.

    Raises:
        ValueError: the plan was cleared or evicted.
    """
    manager = dist_attn_runtime_dict_mgr.get(key)
    plan = manager.dist_plan
    values = key.head_dim if head_dim_v is None else head_dim_v
    bytes_per_token = key.num_heads_kv * (key.head_dim + values) * dtype.itemsize
    q_placement, k_placement = (manager.transport(role).placement for role in ("q", "k"))
    grid = rank_grid(
        key.mask.bands,
        key.total_seqlen_q,
        key.total_seqlen_k,
        [np.asarray(r) for r in q_placement.ranges],
        height,
        width,
    )
    return Explanation(
        report=explain_plan(plan, bytes_per_token, plan_options(key.dist_attn_config.overlap_config)),
        shard_q=q_placement.shard_lens,
        shard_k=k_placement.shard_lens,
        grid=grid,
    )
