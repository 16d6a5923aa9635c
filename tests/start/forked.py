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
from typing import Any

SOCKET = "HYBRIDPIPE_TESTS_FORK_SERVER"  # variable with the path of the server's socket
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
COMMANDS = (["train"], ["profile"], ["export"], ["probe"])  # of hybridpipe, which import torch
# What a process reads while it imports: the server's value must be the process's own.
READ_EARLY = ("PYTHON", "LD_PRELOAD", "MALLOC_", "TORCH", "MKL_", "KMP_", "GOMP_", "CUDA_", "ATEN_", "NUMPY_")


def surroundings() -> dict[str, Any]:
    """Return what a fork inherits from the server and cannot change."""
    with open("/proc/self/cgroup") as file:
        cgroup = file.read()
    return {
        "executable": sys.executable,
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(READ_EARLY)},
        "namespaces": [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid", "user")],
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
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        return True
    name, *rest = words[1:] if words[0] == "-m" else (os.path.basename(words[0]), *words[1:])
    return name == "hybridpipe" and rest[:1] in COMMANDS


def begin() -> None:
    """Run this process's program in a fork, and end as it ends; return if there is no server for it."""
    path = os.environ.get(SOCKET)
    if not path or not _imports_torch(sys.orig_argv[1:]):
        return
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        text = json.dumps(_task()).encode()
        socket.send_fds(server, [len(text).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(text)
        replies = server.makefile()
        process = int(replies.readline())
        if not process:
            return  # the server lives in other surroundings
        for number in SIGNALS:
            signal.signal(number, lambda number, _: os.kill(process, number))
        status = int(replies.readline())
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
