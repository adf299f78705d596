"""A persistent pool of real processes on a gloo group, for tests that threads cannot stand in for.

Importing torch in each of eight processes takes minutes on a busy machine. So one server process imports it once and
forks the ranks (`pool_server`); they stay alive from one ``run`` to the next, and are forked anew after a failure.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from .threads import RankFailure

__all__ = ["ProcessPool", "process_pool"]

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.readline()); "
    "from magi_comm.testing.pool_server import serve; serve()"
)
_is_rank = False  # set in the processes of a pool
_GRACE_S = 2.0  # after a failure, how long the other ranks may take to report their own


class ProcessPool:
    """``size`` gloo processes: ``pool.run(fn, *args, world_size=4)`` calls ``fn(comm, *args)`` on ranks 0 to 3.

    Processes start with the first ``run`` and end with ``close``, with the pool itself, or with the interpreter.
    Each runs its operators on one thread.

    Args:
        size: number of processes.
        world_sizes: sizes of subgroups (ranks 0 to n-1) to make; the powers of two up to ``size`` when None.
        timeout_s: longest duration of one ``run``, and of a collective inside it, in seconds.
        start_timeout_s: longest duration of the start, in seconds.
        preload: modules to import once, before forking.
    """

    def __init__(
        self,
        size: int,
        *,
        world_sizes: Iterable[int] | None = None,
        timeout_s: float = 120.0,
        start_timeout_s: float = 300.0,
        preload: Iterable[str] = (),
    ) -> None:
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"size must be a positive number of processes, got {size!r}")
        powers = [2**i for i in range(size.bit_length()) if 2**i <= size]
        self.world_sizes = sorted({size, *(powers if world_sizes is None else world_sizes)})
        if self.world_sizes[0] < 1 or self.world_sizes[-1] > size:
            raise ValueError(f"world_sizes must lie in 1 to {size}, got {self.world_sizes}")
        self.size = size
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self.preload = list(preload)
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._ranks: list[Connection] = []
        self._finalizer: Callable[[], Any] | None = None

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. A later ``run`` starts new ones."""
        with self._lock:
            self._stop_ranks()
            if self._finalizer is not None:
                self._finalizer()
            self._server = self._finalizer = None

    def run(
        self,
        fn: Callable[..., Any] | str,
        *args: Any,
        world_size: int | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(comm, *args, **kwargs)`` on ranks 0 to ``world_size - 1``; their results in rank order.

        Args:
            fn: a function at the top level of a module or script, or ``"package.module:function"``. It is found by
                name (by file where its module cannot be imported), arguments and results travel by pickle.
            world_size: one of ``world_sizes``; ``size`` when None.
            timeout_s: instead of the pool's.

        Raises:
            RankFailure: a rank raised (from its exception, where that could be pickled), died, or was late; its
            message has the traceback. The processes are replaced before the next ``run``.
        """
        world_size = self.size if world_size is None else world_size
        if world_size not in self.world_sizes:
            raise ValueError(f"world_size must be one of {self.world_sizes}, got {world_size!r}")
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        if _is_rank:
            raise RuntimeError(
                "a process of a pool cannot run a pool; a script that does so at its top level needs "
                'if __name__ == "__main__":'
            )
        task = pickle.dumps((world_size, *_reference(fn), pickle.dumps((args, kwargs))))
        with self._lock:
            if not self._ranks:
                self._start_ranks()
            for connection in self._ranks[:world_size]:
                connection.send_bytes(task)
            try:
                return self._collect(world_size, time.monotonic() + timeout_s, timeout_s)
            except BaseException:
                self._stop_ranks()
                raise

    # -- inside -----------------------------------------------------------------------------------------------------

    def _collect(self, world_size: int, deadline: float, timeout_s: float) -> list[Any]:
        results: list[Any] = [None] * world_size
        missing = set(range(world_size))
        failure: RankFailure | None = None
        while missing:
            ready = wait([self._ranks[r] for r in missing], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [r for r in sorted(missing) if self._ranks[r] in ready]:
                missing.discard(rank)
                try:
                    kind, *parts = pickle.loads(self._ranks[rank].recv_bytes())
                except (EOFError, ConnectionError):
                    kind, parts = "error", ["the process died", "", None]
                if kind == "result":
                    results[rank] = pickle.loads(parts[0])
                elif failure is None:
                    error, details, exception = parts
                    failure = RankFailure(rank, world_size, error, details)
                    with contextlib.suppress(Exception):
                        failure.__cause__ = pickle.loads(exception) if exception else None
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if failure is not None:
            raise failure
        if missing:
            assert self._server is not None
            late = sorted(missing)
            stacks = self._server.stacks(late)
            raise RankFailure(late[0], world_size, f"ranks {late} were not done in {timeout_s:g} s", stacks)
        return results

    def _start_ranks(self) -> None:
        if self._server is None or not self._server.is_alive():
            self._server = _Server(self.preload)
            self._finalizer = weakref.finalize(self, self._server.close)
        try:
            self._ranks = self._server.fork(self.size, self.world_sizes, self.timeout_s, self.start_timeout_s)
        except BaseException:
            self._server.kill()
            raise

    def _stop_ranks(self) -> None:
        for connection in self._ranks:
            connection.close()
        self._ranks = []
        if self._server is not None:
            self._server.kill()


class _Server:
    """The parent's side of `pool_server`: commands by lines of JSON, one connection per rank."""

    def __init__(self, preload: list[str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="magi-pool-"))
        self._process = subprocess.Popen([sys.executable, "-c", _BOOTSTRAP], stdin=subprocess.PIPE, text=True)
        self._generation = 0
        self._command(["" if p == "" else os.path.abspath(p) for p in sys.path])
        self._command({"preload": preload, "folder": str(self._folder)})

    def _command(self, value: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, size: int, world_sizes: list[int], timeout_s: float, start_timeout_s: float) -> list[Connection]:
        """Fork ``size`` ranks and wait until each has joined its groups."""
        self._generation += 1
        prefix = self._folder / str(self._generation)
        address = f"{prefix}.sock"
        deadline = time.monotonic() + start_timeout_s
        found: dict[int, Connection] = {}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(size)
            listener.settimeout(0.2)
            self._command(
                {"fork": size, "prefix": str(prefix), "world_sizes": world_sizes, "timeout_s": timeout_s,
                 "start_timeout_s": start_timeout_s}
            )  # fmt: skip
            while len(found) < size:
                if not self.is_alive():
                    raise RuntimeError(f"the pool's server ended with status {self._process.returncode}")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{size - len(found)} of {size} ranks did not start in {start_timeout_s:g} s")
                try:
                    accepted, _ = listener.accept()
                except TimeoutError:
                    continue
                accepted.setblocking(True)
                connection = Connection(accepted.detach())
                found[int(pickle.loads(connection.recv_bytes()))] = connection
        ranks = [found[r] for r in range(size)]
        for rank, connection in enumerate(ranks):
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank} of {size} did not join the gloo group in {start_timeout_s:g} s")
            try:
                error = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionError):
                error = "the process died while it joined the gloo group"
            if error is not None:
                raise RankFailure(rank, size, "start", error)
        return ranks

    def stacks(self, ranks: list[int]) -> str:
        """Where the given ranks are, as Python tracebacks."""
        self._command({"stacks": ranks})
        time.sleep(0.5)
        texts = []
        for rank in ranks:
            path = Path(f"{self._folder / str(self._generation)}.stack{rank}")
            texts.append(f"rank {rank}:\n{path.read_text() if path.exists() else '(no stack)'}")
        return "\n".join(texts)

    def kill(self) -> None:
        """End all ranks at once."""
        with contextlib.suppress(OSError):
            self._command({"kill": True})

    def close(self) -> None:
        """End the server, and with it all ranks."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _reference(fn: Callable[..., Any] | str) -> tuple[str, str, str | None]:
    """(module, qualified name, file) by which a rank finds ``fn``."""
    if isinstance(fn, str):
        module, colon, name = fn.partition(":")
        if not (module and colon and name):
            raise ValueError(f"fn must be a function or 'package.module:function', got {fn!r}")
        return module, name, None
    path: str | None = getattr(fn, "__qualname__", None)
    if path is None or "<" in path:
        raise ValueError(f"fn must be a function at the top level of a module (a rank finds it by name), got {fn!r}")
    return fn.__module__, path, inspect.getsourcefile(fn)


@functools.cache
def process_pool(size: int = 8) -> ProcessPool:
    """The pool of this process that all tests share; it ends with the interpreter."""
    return ProcessPool(size, preload=["magi_comm"])
