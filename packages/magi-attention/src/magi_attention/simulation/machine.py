"""The cost model: a kernel's time from its tiles, a transfer's from bytes per link, a rank's from its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

TILE = 128


@dataclass(frozen=True)
class Work:
    """One kernel over all heads of a share ``heads`` of the model.

    Attributes:
        pairs: (query, key) pairs in touched tiles, masked ones included.
        rows, cols: rows and columns of touched tiles, segment by segment: each costs a prologue and an epilogue.
        heads: share of the heads, 0 to 1.
        merge_rows: rows whose output is merged with an earlier step's in device memory.
        segments: documents in the call.
        grid: thread blocks a head that a varlen backward starts: longest document in tiles, times documents.
    """

    pairs: float = 0.0
    rows: float = 0.0
    cols: float = 0.0
    heads: float = 1.0
    merge_rows: float = 0.0
    segments: float = 0.0
    grid: float = 0.0


@dataclass(frozen=True)
class Step:
    """Work, and what moves with it.

    Attributes:
        nvlink_bytes, network_bytes: the larger of received and sent, forward.
        is_hidden: the transfer is in flight while this step computes; otherwise it is waited for.
        backward_bytes: how often the forward's bytes move in the backward pass.
        is_alltoall: heads against tokens, in many small pieces.
        count: how often the step is taken.
    """

    work: Work = field(default_factory=Work)
    nvlink_bytes: float = 0.0
    network_bytes: float = 0.0
    is_hidden: bool = False
    backward_bytes: float = 2.0
    is_alltoall: bool = False
    count: float = 1.0


@dataclass(frozen=True)
class Prediction:
    """Seconds of the slowest rank: all, and the part in which it only waits."""

    total_s: float
    exposed_s: float


@dataclass(frozen=True)
class Machine:
    """Speeds of a GPU and its links. Rates are achieved ones, fitted to published figures (see ``published``).

    Attributes:
        forward_tflops, backward_tflops: of a kernel over full tiles.
        row_cost, col_cost, backward_row_cost, backward_col_cost: a row or column of a touched tile, in pairs.
        segment_us, backward_segment_us: of a document in a call.
        block_ns: of a started thread block with nothing to do, over all SMs.
        nvlink_gbs, network_gbs: achieved GB/s of one GPU, one way.
        alltoall_share: of those, what a blocking all-to-all of heads achieves.
        memory_gbs: achieved GB/s of device memory in unfused merges.
        launch_us: a kernel and its transfer started.
        gpus_per_node: that share NVLink.
    """

    forward_tflops: float
    backward_tflops: float
    row_cost: float
    col_cost: float
    backward_row_cost: float
    backward_col_cost: float
    segment_us: float
    backward_segment_us: float
    block_ns: float
    nvlink_gbs: float
    network_gbs: float
    alltoall_share: float
    memory_gbs: float
    launch_us: float
    gpus_per_node: int = 8
    num_heads_q: int = 64
    num_heads_kv: int = 8
    head_dim: int = 128
    item_bytes: int = 2

    @property
    def kv_bytes(self) -> int:
        """Of one token of keys and values."""
        return 2 * self.num_heads_kv * self.head_dim * self.item_bytes

    @property
    def q_bytes(self) -> int:
        """Of one token of queries, or of outputs."""
        return self.num_heads_q * self.head_dim * self.item_bytes

    @property
    def pair_flops(self) -> float:
        """Forward, of one pair over all heads."""
        return 4.0 * self.num_heads_q * self.head_dim

    def kernel_s(self, work: Work, backward: bool) -> float:
        """Seconds of one kernel; 0 for none."""
        if work.rows == 0:
            return 0.0
        row, col = (self.backward_row_cost, self.backward_col_cost) if backward else (self.row_cost, self.col_cost)
        rate = 1e12 * (self.backward_tflops / 2.5 if backward else self.forward_tflops)
        compute = work.heads * self.pair_flops * (work.pairs + row * work.rows + col * work.cols) / rate
        merge = 3 * 4 / self.item_bytes * work.heads * self.q_bytes * work.merge_rows  # fp32 out or dq: two in, one out
        segment = self.backward_segment_us if backward else self.segment_us
        idle = 1e-9 * self.block_ns * work.grid * work.heads * self.num_heads_q if backward else 0.0
        return compute + idle + merge / (1e9 * self.memory_gbs) + 1e-6 * (self.launch_us + segment * work.segments)

    def transfer_s(self, step: Step, backward: bool) -> float:
        """Seconds of a step's transfer: both links work at once."""
        share = self.alltoall_share if step.is_alltoall else 1.0
        slowest = max(step.nvlink_bytes / self.nvlink_gbs, step.network_bytes / self.network_gbs) / 1e9 / share
        return slowest * (step.backward_bytes if backward else 1.0) + (1e-6 * self.launch_us if slowest else 0.0)

    def rank(self, steps: Sequence[Step], backward: bool) -> Prediction:
        """One rank's steps, one after another."""
        total = computing = 0.0
        for step in steps:
            kernel, transfer = self.kernel_s(step.work, backward), self.transfer_s(step, backward)
            total += step.count * (max(kernel, transfer) if step.is_hidden else kernel + transfer)
            computing += step.count * kernel
        return Prediction(total, total - computing)


# Fitted by published.fit(packs=6): median error 3.8 %, worst 29 % over the 192 figures. Some stand for what the model
# leaves out (launch_us holds the host's time between the steps of a ring), so do not read them as measurements.
H100 = Machine(
    forward_tflops=666.6, backward_tflops=596.8, row_cost=32.99, col_cost=16.11, backward_row_cost=462.4,
    backward_col_cost=81.53, segment_us=0.11, backward_segment_us=0.77, block_ns=5.894, nvlink_gbs=178.7,
    network_gbs=49.98, alltoall_share=0.567, memory_gbs=625.6, launch_us=177.7,
)  # fmt: skip
# The same chip and links with faster memory.
H200 = Machine(**{**vars(H100), "memory_gbs": H100.memory_gbs * 4.8 / 3.35})
