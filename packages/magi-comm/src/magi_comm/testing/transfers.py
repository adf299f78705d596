"""Random transfers of a whole group, to test exchanges with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Transfers", "random_transfers"]


@dataclass(frozen=True)
class Transfers:
    """Transfers of a whole group, as ranges of local rows.

    Attributes:
        sizes: local rows of each rank.
        moves: ``moves[s][r]`` are the ranges that s sends to r, in order.
        recv: per rank, rows (source, start, end) of the source's local rows, in the order in which they are laid out.
    """

    sizes: list[int]
    moves: list[list[list[tuple[int, int]]]]
    recv: list[list[tuple[int, int, int]]]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.sizes)

    def send(self, rank: int) -> list[tuple[int, int, int]]:
        """Rows (destination, start, end) of a rank."""
        return [(r, a, b) for r in range(self.world_size) for a, b in self.moves[rank][r]]

    def num_recv(self, rank: int) -> int:
        """Rows that a rank receives."""
        return sum(b - a for _, a, b in self.recv[rank])


def random_transfers(seed: int, world_size: int, longest: int, density: float, *, overlap: bool = False) -> Transfers:
    """Transfers between ranks of up to ``longest`` rows; a pair of ranks has some with probability ``density``.

    Sources are interleaved at random on the receiving side, and ranges cut at other places than on the sending side.
    With ``overlap`` some ranges go twice to the same rank.
    """
    rng = np.random.default_rng(seed)
    n = world_size
    sizes = [int(x) for x in rng.integers(0, longest + 1, n)]
    moves: list[list[list[tuple[int, int]]]] = [[[] for _ in range(n)] for _ in range(n)]
    for s in range(n):
        for r in range(n):
            if rng.random() >= density:
                continue
            cuts = np.sort(rng.integers(0, sizes[s] + 1, 2 * int(rng.integers(0, 6))))
            ranges = [(int(a), int(b)) for a, b in cuts.reshape(-1, 2)]
            if overlap and ranges:
                ranges += [ranges[i] for i in rng.integers(0, len(ranges), 2)]
            moves[s][r] = ranges
    recv: list[list[tuple[int, int, int]]] = []
    for r in range(n):
        queues = {s: list(moves[s][r]) for s in range(n) if moves[s][r]}
        rows: list[tuple[int, int, int]] = []
        while queues:  # any interleaving that keeps the order of each source, cut anywhere
            s = int(rng.choice(list(queues)))
            a, b = queues[s].pop(0)
            cut = int(rng.integers(a, b + 1)) if rng.random() < 0.3 else b
            rows.append((s, a, cut))
            if cut < b:
                queues[s].insert(0, (cut, b))
            elif not queues[s]:
                del queues[s]
        recv.append(rows)
    return Transfers(sizes, moves, recv)
