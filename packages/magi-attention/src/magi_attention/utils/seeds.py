"""Random seeds, and whether two groups or meshes are the same."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


def str2seed(text: str) -> int:
    """A seed in ``[0, 2**32)`` from a text: the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def set_random_seed(seed: int) -> None:
    """Seed ``random``, NumPy and torch (with CUDA, where there is any).

    Raises:
        ValueError: a seed outside ``[0, 2**32)``, which NumPy would not take.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be within [0, 2**32), got {seed}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def sync_rng(seed: int) -> Iterator[None]:
    """Within the block every generator starts at ``seed``; afterwards each continues where it was before.

    What is drawn inside is therefore the same on all ranks, whatever they drew before.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    set_random_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


def is_same_process_group(group1: "dist.ProcessGroup | None", group2: "dist.ProcessGroup | None") -> bool:
    """Whether two groups have the same ranks in the same order; None equals None only."""
    import torch.distributed as dist

    if group1 is None or group2 is None:
        return group1 is group2
    return group1 is group2 or dist.get_process_group_ranks(group1) == dist.get_process_group_ranks(group2)


def is_same_device_mesh(mesh1: "DeviceMesh | None", mesh2: "DeviceMesh | None") -> bool:
    """Whether two meshes have the same ranks in the same shape, on the same kind of device, under the same names."""
    if mesh1 is None or mesh2 is None:
        return mesh1 is mesh2
    if mesh1 is mesh2:
        return True
    return (
        mesh1.device_type == mesh2.device_type
        and mesh1.mesh_dim_names == mesh2.mesh_dim_names
        and torch.equal(mesh1.mesh.cpu(), mesh2.mesh.cpu())
    )
