"""A process that a test starts, as a fork of `fork_server`: run by Python at its start, by sitecustomize.

Knows the standard library's lightest parts only. Invariant: the process that its parent knows ends as the
fork ends: with its exit code, or by its signal.
"""

import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

SOCKETS = "HYBRIDPIPE_TESTS_FORK_SERVERS"  # variable with the folder of the servers' sockets
# Two, so that neighbouring ranks hash in different ways, as processes of their own do.
NUM_SERVERS = 2
RANK = "OMPI_COMM_WORLD_RANK"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
COMMANDS = (["train"], ["profile"], ["export"], ["probe"])  # of hybridpipe, which import torch
# What a process reads while it imports: the server's value must be the process's own.
# mpirun sets LD_LIBRARY_PATH to where mpi4py looks by itself.
READ_EARLY = (
    *("PYTHON", "PYTORCH_", "TORCH", "ATEN_", "NUMPY_", "MKL_", "KMP_", "GOMP_", "CUDA_"),
    *("LD_PRELOAD", "MALLOC_", "LC_", "LANG"),
)


def surroundings() -> dict[str, Any]:
    """Return what a fork inherits from the server and cannot change."""
    cgroup, namespaces = "", list[str]()
    with suppress(OSError), open("/proc/self/cgroup") as file:  # not every kernel has it
        cgroup = file.read()
    for name in ("mnt", "net", "pid", "user", "uts", "ipc"):
        with suppress(OSError):
            namespaces.append(os.readlink(f"/proc/self/ns/{name}"))
    return {
        "executable": sys.executable,
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(READ_EARLY)},
        "namespaces": namespaces,
        "cgroup": cgroup,
        "user": os.geteuid(),
    }


def _task() -> dict[str, Any]:
    os.umask(mask := os.umask(0))
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "words": sys.orig_argv,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "umask": mask,
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in names},
        "cores": sorted(os.sched_getaffinity(0)),
        "surroundings": surroundings(),
    }


def _imports_torch(words: list[str]) -> bool:
    """Return True for a rank's program, and for a command that imports torch."""
    if not words or (words[0][0] == "-" and (words[0] != "-m" or len(words) < 2)):
        return False
    if RANK in os.environ:
        return True
    name, *rest = words[1:] if words[0] == "-m" else (os.path.basename(words[0]), *words[1:])
    return name == "hybridpipe" and rest[:1] in COMMANDS


def begin() -> None:
    """Run this process's program in a fork, and end as it ends; return if no server can fork for it."""
    folder = os.environ.get(SOCKETS)
    if not folder or not _imports_torch(sys.orig_argv[1:]):
        return
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(f"{folder}/{int(os.environ.get(RANK, 0)) % NUM_SERVERS}")
            text = json.dumps(_task()).encode()
            socket.send_fds(server, [len(text).to_bytes(8, "big")], [0, 1, 2])
            server.sendall(text)
            replies = server.makefile()
            process = int(replies.readline() or 0)
        except OSError:
            return
        if process:
            _end_as(process, replies)


def _end_as(process: int, replies: Any) -> None:
    """Wait for the fork. From here on the program must not run in this process, whatever happens."""

    def forward(number: int, _: Any) -> None:
        with suppress(ProcessLookupError):
            os.kill(process, number)

    status = -signal.SIGKILL  # where the server is gone, and has killed its forks
    with suppress(BaseException):
        for number in SIGNALS:
            signal.signal(number, forward)
        status = int(replies.readline())
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
