"""The only reader of the environment. Read once, at the first use, and from then on a value: a frozen, hashable
``EnvSnapshot`` that keys contain. Changing ``os.environ`` later changes nothing until ``reload()``.
"""

import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal, TypeVar, cast

from ..common.enum import MagiAttentionKernelBackend, MagiAttentionPrecision
from .table import PREFIX, VARIABLES, Status, find

_Choice = TypeVar("_Choice", bound=Enum)


class EnvWarning(UserWarning):
    """A variable is set that does not do what whoever set it may expect."""


@dataclass(frozen=True)
class EnvSnapshot:
    """What the environment asks for. Equality and hash cover what changes behaviour; the rest is marked.

    Args:
        kernel_backend: which implementation computes attention.
        precision: what ``calc_attn`` computes in; None keeps the dtype of its inputs.
        deterministic_mode: bitwise repeatable backward.
        sanity_check: verify plans by brute force.
        min_chunks_per_rank: chunks per rank when no chunk size is configured.
        ffa_forward_sm_margin, ffa_backward_sm_margin: SMs left to communication.
        dsink_all_reduce_op: reduction of a sink's gradient over the group, where the configuration leaves it open.
        dist_attn_runtime_dict_size: plans kept per group (not compared).
        profile_mode: name ranges for a profiler (not compared).
        log_level: of the package's logger (not compared).
    """

    kernel_backend: MagiAttentionKernelBackend = MagiAttentionKernelBackend.FFA
    precision: MagiAttentionPrecision | None = None
    deterministic_mode: bool = False
    sanity_check: bool = False
    min_chunks_per_rank: int = 8
    ffa_forward_sm_margin: int = 4
    ffa_backward_sm_margin: int = 4
    dsink_all_reduce_op: Literal["none", "sum", "avg"] = "none"
    dist_attn_runtime_dict_size: int = field(default=1000, compare=False)
    profile_mode: bool = field(default=False, compare=False)
    log_level: str = field(default="WARNING", compare=False)

    @property
    def core_backend(self) -> str | None:
        """``backend`` of ``magi_core``'s operators: None is the fastest of the device, ``"reference"`` is torch."""
        is_reference = self.kernel_backend in (MagiAttentionKernelBackend.SDPA, MagiAttentionKernelBackend.SDPA_OL)
        return "reference" if is_reference else None


def _flag(name: str, text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{name} must be 0 or 1, got {text!r}")


def _integer(minimum: int | None) -> Callable[[str, str], int]:
    def parse(name: str, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{name} must be an integer, got {text!r}") from None
        if minimum is not None and value < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {value}")
        return value

    return parse


def _choice(kind: type[_Choice]) -> Callable[[str, str], _Choice]:
    def parse(name: str, text: str) -> _Choice:
        try:
            return kind(text.strip().lower())
        except ValueError:
            expected = ", ".join(member.value for member in kind)
            raise ValueError(f"{name} must be one of {expected}, got {text!r}") from None

    return parse


def _reduce_op(name: str, text: str) -> Literal["none", "sum", "avg"]:
    lowered = text.strip().lower()
    if lowered not in ("none", "sum", "avg"):
        raise ValueError(f"{name} must be one of none, sum, avg, got {text!r}")
    return cast(Literal["none", "sum", "avg"], lowered)


def _log_level(name: str, text: str) -> str:
    level = logging.getLevelName(text.strip().upper())  # the number of a name
    if not isinstance(level, int):
        raise ValueError(f"{name} must be a level of logging (DEBUG, INFO, WARNING, ERROR, CRITICAL), got {text!r}")
    return logging.getLevelName(level)  # WARN becomes WARNING


# Field of EnvSnapshot -> how the text of its variable is read. The variable is the prefix and the upper-case field.
_PARSERS: dict[str, Callable[[str, str], object]] = {
    "kernel_backend": _choice(MagiAttentionKernelBackend),
    "precision": _choice(MagiAttentionPrecision),
    "deterministic_mode": _flag,
    "sanity_check": _flag,
    "min_chunks_per_rank": _integer(1),
    "ffa_forward_sm_margin": _integer(0),
    "ffa_backward_sm_margin": _integer(0),
    "dsink_all_reduce_op": _reduce_op,
    "dist_attn_runtime_dict_size": _integer(None),
    "profile_mode": _flag,
    "log_level": _log_level,
}
_OLD_BACKENDS = {
    PREFIX + "SDPA_BACKEND": MagiAttentionKernelBackend.SDPA,
    PREFIX + "FA4_BACKEND": MagiAttentionKernelBackend.FA4,
}


def parse(environ: Mapping[str, str]) -> tuple[EnvSnapshot, dict[str, str]]:
    """Read a mapping of variables; an empty value counts as unset.

    Returns:
        The snapshot, and by variable what has to be said about it: mapped, without effect, or unknown.

    Raises:
        ValueError: a value that cannot be read, or two variables that contradict each other. Names them.
    """
    given = {name: text for name, text in environ.items() if text.strip()}
    values: dict[str, Any] = {}
    for name, read in _PARSERS.items():
        variable = PREFIX + name.upper()
        if variable in given:
            values[name] = read(variable, given[variable])

    chosen = {
        variable: backend for variable, backend in _OLD_BACKENDS.items() if _flag(variable, given.get(variable, "0"))
    }
    if "kernel_backend" in values:
        chosen[PREFIX + "KERNEL_BACKEND"] = values["kernel_backend"]
    if len(set(chosen.values())) > 1:
        raise ValueError(
            "the kernel backend must be chosen once, got "
            + " and ".join(f"{name}={given[name]}" for name in sorted(chosen))
        )
    if chosen:
        values["kernel_backend"] = next(iter(chosen.values()))

    remarks: dict[str, str] = {}
    for name in sorted(given):
        entry = find(name)
        if entry is None and name.startswith(PREFIX):
            remarks[name] = f"{name} is not a variable of magi_attention and has no effect"
        elif entry is not None and entry.status is Status.MAPPED:
            remarks[name] = f"{name} is an old name: {entry.meaning}"
        elif entry is not None and entry.status is Status.NO_EFFECT:
            remarks[name] = f"{name} has no effect here: {entry.meaning}"
    return EnvSnapshot(**values), remarks


_lock = threading.RLock()
_current: EnvSnapshot | None = None
_warned: set[str] = set()
_handler: logging.Handler | None = None


def _configure_logging(level: str, is_set: bool) -> None:
    global _handler
    logger = logging.getLogger("magi_attention")
    if not is_set:
        return  # the application's configuration stands
    logger.setLevel(level)
    if _handler is None:
        _handler = logging.StreamHandler()
        _handler.setFormatter(logging.Formatter("[%(asctime)s %(levelname)s %(name)s] %(message)s"))
        logger.addHandler(_handler)


def _read() -> EnvSnapshot:
    snapshot, remarks = parse(os.environ)
    for name, remark in remarks.items():
        if name not in _warned:
            _warned.add(name)
            warnings.warn(remark, EnvWarning, stacklevel=4)
    _configure_logging(snapshot.log_level, bool(os.environ.get(PREFIX + "LOG_LEVEL", "").strip()))
    return snapshot


def snapshot() -> EnvSnapshot:
    """What the environment asked for when it was first read: now, or at an earlier call.

    Raises:
        ValueError: a variable cannot be read; names it and what came.

    Warns:
        EnvWarning: once per process for every variable that is mapped, without effect or unknown.
    """
    global _current
    current = _current
    if current is None:
        with _lock:
            if _current is None:
                _current = _read()
            current = _current
    return current


def reload() -> EnvSnapshot:
    """Read the environment again. Existing keys keep the snapshot they were made with."""
    global _current
    with _lock:
        _current = _read()
        return _current


@contextmanager
def override(**changes: Any) -> Iterator[EnvSnapshot]:
    """Within the block, the snapshot has these fields changed. For tests; concerns the whole process.

    Raises:
        TypeError: a field that ``EnvSnapshot`` does not have.
    """
    global _current
    with _lock:
        before = snapshot()
        _current = replace(before, **changes)
    try:
        yield _current
    finally:
        with _lock:
            _current = before


@dataclass(frozen=True)
class LaunchEnv:
    """What ``torchrun`` says about this process.

    Args:
        rank, world_size: of this process among all; 0 of 1 when nobody launched it.
        local_rank, num_local_ranks: the same within its node.
        num_nodes: nodes.
        has_address: whether a rendezvous address is set, so that ``init_process_group`` needs nothing else.
    """

    rank: int
    world_size: int
    local_rank: int
    num_local_ranks: int
    num_nodes: int
    has_address: bool


def launch() -> LaunchEnv:
    """Read torchrun's variables: ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``NPROC_PER_NODE`` (or
    ``LOCAL_WORLD_SIZE``, which torchrun sets), ``NNODES``.

    Raises:
        ValueError: a value that is not an integer, or a rank outside its world.
    """

    def number(names: tuple[str, ...], default: int, minimum: int) -> int:
        for name in names:
            text = os.environ.get(name, "").strip()
            if text:
                return _integer(minimum)(name, text)
        return default

    world_size = number(("WORLD_SIZE",), 1, 1)
    rank = number(("RANK",), 0, 0)
    num_nodes = number(("NNODES",), 1, 1)
    num_local_ranks = number(("NPROC_PER_NODE", "LOCAL_WORLD_SIZE"), max(1, world_size // num_nodes), 1)
    local_rank = number(("LOCAL_RANK",), rank % num_local_ranks, 0)
    if rank >= world_size:
        raise ValueError(f"RANK must be below WORLD_SIZE={world_size}, got {rank}")
    return LaunchEnv(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        num_local_ranks=num_local_ranks,
        num_nodes=max(num_nodes, -(-world_size // num_local_ranks)),
        has_address=bool(os.environ.get("MASTER_ADDR")),
    )


def variables_set() -> dict[str, str]:
    """Variables of the table, and others with our prefix, that are set now: for ``python -m magi_attention env``."""
    names = {variable.name for variable in VARIABLES}
    return {name: text for name, text in sorted(os.environ.items()) if name in names or name.startswith(PREFIX)}
