"""Messages that say which rank they come from."""

import sys
from pathlib import Path


def _rank() -> int:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return 0


def _is_chosen(rank: int | list[int] | None) -> bool:
    return rank is None or _rank() in (rank if isinstance(rank, (list, tuple)) else [rank])


def rprint_rank(msg: object, rank: int | list[int] | None = None) -> None:
    """Print ``[rank r] msg`` on one rank, on some, or on all (None)."""
    if _is_chosen(rank):
        # One write per message: lines of ranks that share a terminal do not mix.
        sys.stdout.write("".join(f"[rank {_rank()}] {line}\n" for line in str(msg).splitlines() or [""]))
        sys.stdout.flush()


def write_rank(msg: object, path: str | Path, rank: int | list[int] | None = None) -> None:
    """Append ``msg`` and a newline to a file, on one rank, on some, or on all (None)."""
    if _is_chosen(rank):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{msg}\n")
