"""The processes of a `ProcessPool`: a server that imports torch once, and the ranks that it forks."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import importlib.util
import json
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ..groups import as_communicator
from . import processes

__all__ = ["serve"]


def serve() -> None:
    """Follow the commands on standard input until it ends, then end all ranks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; Ctrl-C reaches the whole process group
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    pids: list[int] = []
    folder: str | None = None
    alive, here = os.pipe()  # the server alone keeps the second end open: its end is the ranks' end
    while line := sys.stdin.readline():
        command = json.loads(line)
        if "preload" in command:
            folder = command["folder"]
            for name in command["preload"]:
                importlib.import_module(name)
        if "fork" in command:
            for rank in range(command["fork"]):
                pid = os.fork()
                if pid == 0:
                    os.close(here)
                    _rank_main(rank, command, alive)
                pids.append(pid)
        if "stacks" in command:
            for rank in command["stacks"]:
                with contextlib.suppress(OSError):
                    os.kill(pids[rank], signal.SIGUSR1)
        if "kill" in command:
            _end(pids)
    _end(pids)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _end(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.waitpid(pid, 0)
    pids.clear()


def _end_with_server(alive: int) -> None:
    """Wait for the end of the server, however it comes, and end this process."""
    os.read(alive, 1)
    os._exit(1)


def _rank_main(rank: int, command: dict[str, Any], alive: int) -> None:
    """A rank, from fork to exit; never returns."""
    status = 1
    try:
        threading.Thread(target=_end_with_server, args=(alive,), daemon=True).start()
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)  # the commands are the server's
        faulthandler.register(signal.SIGUSR1, file=open(f"{command['prefix']}.stack{rank}", "w"))  # noqa: SIM115
        torch.set_num_threads(1)
        processes._is_rank = True
        client = socket.socket(socket.AF_UNIX)
        client.connect(f"{command['prefix']}.sock")
        connection = Connection(client.detach())
        connection.send_bytes(pickle.dumps(rank))
        try:
            groups = _join(rank, command)
        except BaseException:
            connection.send_bytes(pickle.dumps(traceback.format_exc()))
            raise
        connection.send_bytes(pickle.dumps(None))
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                connection.send_bytes(_perform(connection.recv_bytes(), groups))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # no exit handlers of the server, no waiting for gloo threads


def _join(rank: int, command: dict[str, Any]) -> dict[int, dist.ProcessGroup]:
    size = command["fork"]
    store = dist.FileStore(f"{command['prefix']}.store", size)  # type: ignore[attr-defined]
    start = datetime.timedelta(seconds=command["start_timeout_s"])
    store.set_timeout(start)
    timeout = datetime.timedelta(seconds=command["timeout_s"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    world = dist.group.WORLD
    assert world is not None
    groups: dict[int, dist.ProcessGroup] = {size: world}
    for n in command["world_sizes"]:
        if n != size:
            group = dist.new_group(list(range(n)), timeout=timeout)
            if rank < n:
                groups[n] = group
    dist.barrier()
    return groups


def _perform(task: bytes, groups: dict[int, dist.ProcessGroup]) -> bytes:
    """Run one task and return the answer: a result, or an error with its traceback and (if it can be) the exception."""
    try:
        world_size, module, name, file, arguments = pickle.loads(task)
        fn = _find(module, name, file)
        args, kwargs = pickle.loads(arguments)  # after the module is there: it may define their classes
        result = fn(as_communicator(groups[world_size]), *args, **kwargs)
        return pickle.dumps(("result", pickle.dumps(result)))
    except BaseException as error:
        exception = None
        with contextlib.suppress(Exception):
            exception = pickle.dumps(error)
            pickle.loads(exception)
        return pickle.dumps(("error", f"{type(error).__name__}: {error}", traceback.format_exc(), exception))


def _find(module: str, name: str, file: str | None) -> Callable[..., Any]:
    found: Any = _module(module, file)
    for part in name.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def _module(name: str, file: str | None) -> ModuleType:
    """The module called ``name`` that lies in ``file``; loaded from there where the name does not lead to it."""
    known = sys.modules.get(name)
    if known is None and name != "__main__":
        with contextlib.suppress(ImportError):
            known = importlib.import_module(name)
    if known is not None and (file is None or _is_file(known, file)):
        return known
    if file is None:
        return importlib.import_module(name)  # raises what there is to say
    alias = "__magi_pool_main__" if name == "__main__" else name
    known = sys.modules.get(alias)
    if known is not None and _is_file(known, file):
        return known
    spec = importlib.util.spec_from_file_location(alias, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {name} from {file}")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[alias] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def _is_file(module: ModuleType, file: str) -> bool:
    path = getattr(module, "__file__", None)
    return path is not None and os.path.exists(file) and os.path.samefile(path, file)
