"""A process group from what the launcher says and the machine has."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from .. import env
from .seeds import set_random_seed


def _choose_backend(backend: str | None) -> str:
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    if backend is None:
        return "nccl" if has_nccl else "gloo"
    if "nccl" in backend and not has_nccl:
        what = "torch was built without NCCL" if torch.cuda.is_available() else "torch.cuda sees no device"
        raise ValueError(f"backend={backend!r} cannot run here: {what}; pass None to take what is there, or 'gloo'")
    return backend


def setup_dist_env(
    backend: str | None = None, base_seed: int | None = None, seed_bias: Callable[[int], int] = lambda rank: 0
) -> tuple[int, int, int, int, int, dist.ProcessGroup, torch.device, int | None]:
    """Join the world that torchrun describes, or make a world of one.

    Args:
        backend: of ``torch.distributed``; None takes NCCL where there are CUDA devices and gloo elsewhere.
        base_seed: seed the generators with ``base_seed + seed_bias(rank)``; None leaves them alone.
        seed_bias: what a rank adds; nothing by default, so that all ranks draw the same.

    Returns:
        ``(rank, local_rank, world_size, num_nodes, num_local_ranks, world_group, device, seed)``; ``device`` is
        ``cuda:local_rank`` (made current), or ``cpu``; ``seed`` is what was set, or None.

    Raises:
        ValueError: the backend cannot run here, or another one is already initialised.
        RuntimeError: a world of several ranks without an address to meet at.

    Source: the public interface, with the backend chosen instead of fixed.
    """
    launch = env.launch()
    chosen = _choose_backend(backend)
    uses_cuda = "nccl" in chosen or (torch.cuda.is_available() and "gloo" not in chosen)
    device = torch.device("cuda", launch.local_rank) if uses_cuda else torch.device("cpu")
    if uses_cuda:
        if launch.local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"LOCAL_RANK must be below the number of CUDA devices ({torch.cuda.device_count()}), "
                f"got {launch.local_rank}"
            )
        torch.cuda.set_device(device)
    if dist.is_initialized():
        if backend is not None and dist.get_backend() != backend:
            raise ValueError(f"backend must be {dist.get_backend()!r}, which is initialised already, got {backend!r}")
    elif launch.has_address:
        dist.init_process_group(chosen, rank=launch.rank, world_size=launch.world_size)
    elif launch.world_size == 1:
        dist.init_process_group(chosen, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    else:
        raise RuntimeError(
            f"WORLD_SIZE={launch.world_size} needs MASTER_ADDR and MASTER_PORT: start the program with torchrun"
        )
    group = dist.group.WORLD
    assert group is not None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seed = None if base_seed is None else base_seed + seed_bias(rank)
    if seed is not None:
        set_random_seed(seed)
    return rank, launch.local_rank, world_size, launch.num_nodes, launch.num_local_ranks, group, device, seed


def clearup_dist_env() -> None:
    """Leave the world: destroys all process groups. Does nothing when there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()
