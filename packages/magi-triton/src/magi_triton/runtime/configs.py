"""Tile sizes by architecture: data, with a line on how it was found."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .device import backend_info


@dataclass(frozen=True)
class Tile:
    """Rows and keys of a tile, software pipeline stages, warps."""

    block_m: int
    block_n: int
    num_stages: int
    num_warps: int


Table = dict[int, Tile]  # padded head dim (16, 32, 64, 128, 256) -> tile; the next larger key serves

_SMALL = Tile(32, 32, 1, 4)
# Interpreter: small tiles, so that small shapes still cross tile borders.
_INTERPRETER = {256: _SMALL}
# Ampere: fits 163 KiB of shared memory (8.6, 8.9: 99 KiB); not measured here.
_AMPERE: dict[str, Table] = {
    "fwd": {64: Tile(128, 64, 3, 4), 128: Tile(128, 64, 2, 8), 256: Tile(64, 32, 2, 8)},
    "dkdv": {64: Tile(64, 64, 2, 4), 128: Tile(32, 64, 2, 4), 256: Tile(32, 32, 1, 8)},
    "dq": {64: Tile(64, 64, 2, 4), 128: Tile(64, 32, 2, 4), 256: Tile(32, 32, 1, 8)},
    "piecewise_fwd": {64: Tile(64, 64, 2, 4), 128: Tile(64, 32, 2, 4), 256: Tile(32, 32, 1, 8)},
    "piecewise_dkdv": {64: Tile(32, 64, 2, 4), 128: Tile(32, 32, 1, 4), 256: Tile(16, 32, 1, 8)},
    "forget_fwd": {64: Tile(128, 64, 2, 4), 128: Tile(64, 64, 2, 4), 256: Tile(64, 32, 1, 8)},
    "forget_dkdv": {64: Tile(64, 64, 2, 4), 128: Tile(32, 64, 1, 4), 256: Tile(32, 32, 1, 8)},
    "forget_dq": {64: Tile(64, 64, 2, 4), 128: Tile(64, 32, 1, 4), 256: Tile(32, 32, 1, 8)},
    "sage": {64: Tile(128, 64, 2, 4), 128: Tile(128, 64, 2, 8), 256: Tile(64, 32, 2, 8)},
    "piecewise_dq": {64: Tile(64, 32, 2, 4), 128: Tile(32, 32, 1, 4), 256: Tile(32, 16, 1, 8)},
}
# Hopper: tools/tune.py on an H200, 8192 tokens, 32:4 heads, bf16, full mask; 256 by what fits 227 KiB, not measured.
_HOPPER: dict[str, Table] = {
    "fwd": {64: Tile(64, 64, 3, 4), 128: Tile(128, 128, 2, 8), 256: Tile(128, 64, 2, 8)},
    "dkdv": {64: Tile(64, 64, 3, 4), 128: Tile(64, 64, 2, 4), 256: Tile(32, 64, 1, 8)},
    "dq": {64: Tile(128, 64, 3, 8), 128: Tile(128, 128, 2, 8), 256: Tile(64, 32, 1, 8)},
    "piecewise_fwd": {64: Tile(128, 64, 3, 8), 128: Tile(128, 64, 2, 8), 256: Tile(64, 32, 1, 8)},
    "piecewise_dkdv": {64: Tile(64, 64, 2, 4), 128: Tile(64, 64, 1, 8), 256: Tile(32, 32, 1, 8)},
    "forget_fwd": {64: Tile(64, 64, 3, 4), 128: Tile(128, 64, 2, 8), 256: Tile(64, 32, 1, 8)},
    "forget_dkdv": {64: Tile(64, 64, 2, 4), 128: Tile(64, 64, 1, 8), 256: Tile(32, 32, 1, 8)},
    "forget_dq": {64: Tile(64, 64, 2, 4), 128: Tile(64, 64, 1, 8), 256: Tile(32, 32, 1, 8)},
    "sage": {64: Tile(128, 64, 3, 4), 128: Tile(128, 64, 3, 8), 256: Tile(64, 64, 2, 8)},
    "piecewise_dq": {64: Tile(128, 64, 2, 8), 128: Tile(64, 64, 2, 8), 256: Tile(32, 32, 1, 8)},
}
# Blackwell: Hopper's, which fit the same shared memory; not measured here.
_TABLES = {"ampere": _AMPERE, "hopper": _HOPPER, "blackwell": _HOPPER}


@functools.cache
def architecture() -> str:
    """``"ampere"``, ``"hopper"``, ``"blackwell"``, or ``"interpreter"``."""
    info = backend_info()
    if info.interpreted or info.capability is None:
        return "interpreter"
    major = info.capability[0]
    return "ampere" if major <= 8 else "hopper" if major == 9 else "blackwell"


def tile(kind: str, padded_head_dim: int) -> Tile:
    """The tile of a kernel (``"fwd"``, ``"piecewise_dq"``, …) on this machine."""
    arch = architecture()
    table = _INTERPRETER if arch == "interpreter" else _TABLES[arch][kind]
    return next(found for size, found in sorted(table.items()) if padded_head_dim <= size)
