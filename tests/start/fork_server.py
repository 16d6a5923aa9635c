"""A process that has imported torch, and forks: ranks that tests start begin as its forks.

    python -m tests.start.fork_server SOCKET        until its standard input ends

An import of torch takes two seconds of a core, and the tests start hundreds of ranks. Knows nothing of MPI:
forks initialize it. Invariant: a fork ends with the process that it stands for.
"""

import gc
import importlib
import json
import os
import pkgutil
import random
import resource
import runpy
import selectors
import signal
import socket
import sys
import types
from contextlib import suppress
from importlib.abc import MetaPathFinder
from io import TextIOWrapper
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

import hybridpipe
from hybridpipe.health import faults
from tests.start.forked import surroundings

HERE = surroundings()


class _WithoutMPI(MetaPathFinder):
    """Refuses the import that initializes MPI."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Raise ImportError for mpi4py.MPI."""
        if fullname == "mpi4py.MPI":
            raise ImportError(fullname)


def _import_what_needs_no_mpi() -> None:
    sys.meta_path.insert(0, refusing := _WithoutMPI())
    for module in pkgutil.walk_packages(hybridpipe.__path__, "hybridpipe.", onerror=lambda name: None):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ImportError as error:
                if str(error) != "mpi4py.MPI":
                    raise
    sys.meta_path.remove(refusing)


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return what a process asks for, or None if it has ended meanwhile, and its standard files."""
    files: list[int] = []
    try:
        size, files, _, _ = socket.recv_fds(connection, 8, 3)
        text = connection.makefile("rb").read(int.from_bytes(size, "big"))
        return json.loads(text), files
    except (OSError, ValueError):
        return None, files


def _reply(connection: socket.socket, number: int) -> None:
    with suppress(OSError):  # the process has been killed
        connection.sendall(b"%d\n" % number)


class Server:
    """Forks, and the connections of the processes that they stand for."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._forks: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._ended, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        signal.set_wakeup_fd(self._woken.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for source in (self._listener, self._ended, sys.stdin):
            self._selector.register(source, selectors.EVENT_READ)

    def serve(self) -> dict[str, Any] | None:
        """Return in each fork, with its task; in the server return None, at the end of its input."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is sys.stdin:
                    signal.set_wakeup_fd(-1)
                    for process in self._forks:
                        os.killpg(process, signal.SIGKILL)
                    return None
                if key.fileobj is self._listener:
                    task = self._fork()
                    if task is not None:
                        return task
                elif key.fileobj is self._ended:
                    self._ended.recv(64)
                    self._reap()
                elif key.fileobj in self._forks.values():
                    self._end(cast(socket.socket, key.fileobj))

    def _fork(self) -> dict[str, Any] | None:
        connection, _ = self._listener.accept()
        connection.settimeout(10)  # a stopped process must not stop the others
        task, files = _receive(connection)
        if task is None or task["surroundings"] != HERE:
            _reply(connection, 0)
            connection.close()
        elif (process := os.fork()) == 0:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            self._selector.close()
            for each in (self._listener, self._ended, connection, *self._forks.values()):
                each.close()
            for i, file in enumerate(files):
                os.dup2(file, i)
                os.close(file)
            return task
        else:
            with suppress(OSError):  # it has done so itself
                os.setpgid(process, process)
            _reply(connection, process)
            self._forks[process] = connection
            self._selector.register(connection, selectors.EVENT_READ)
        for file in files:
            os.close(file)
        return None

    def _reap(self) -> None:
        while self._forks:
            process, status = os.waitpid(-1, os.WNOHANG)
            if not process:
                return
            connection = self._forks.pop(process)
            self._selector.unregister(connection)
            with connection:
                _reply(connection, os.waitstatus_to_exitcode(status))

    def _end(self, connection: socket.socket) -> None:
        """Kill the fork of a process that is gone."""
        for process, each in self._forks.items():
            if each is connection:
                os.killpg(process, signal.SIGKILL)


def _become(task: dict[str, Any]) -> None:
    """Take over what the process has that the server has not."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.umask(task["umask"])
    os.chdir(task["folder"])
    os.environ.clear()
    os.environ.update(task["environment"])
    for name, limits in task["limits"].items():
        resource.setrlimit(getattr(resource, name), limits)
    os.sched_setaffinity(0, task["cores"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "").partition(",")[0] or len(task["cores"])))
    faults._faults = faults.from_environment()  # as when the module is imported
    random.seed()
    np.random.seed()
    cast(TextIOWrapper, sys.stdout).reconfigure(line_buffering=os.isatty(1))


def _run(words: list[str]) -> None:
    """Run what Python's command line says: `-m NAME ...` or `PATH ...`."""
    sys.orig_argv = words
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[1] == "-m":
        sys.argv, sys.path[0] = words[2:], os.getcwd()
        runpy._run_module_as_main(words[2])
        return
    sys.argv, sys.path[0] = words[1:], str(Path(words[1]).resolve().parent)
    main.__file__, main.__builtins__ = words[1], __builtins__
    exec(compile(Path(words[1]).read_bytes(), words[1], "exec"), main.__dict__)


if __name__ == "__main__":
    _import_what_needs_no_mpi()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot fork"
    gc.collect()
    gc.freeze()
    task = Server(sys.argv[1]).serve()
    if task is not None:
        _become(task)
        _run(task["words"])
