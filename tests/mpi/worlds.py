"""Worlds: ranks that live through a session of tests, and run one program after the other.

A rank of a process of its own imports torch for seconds before its first update. Invariant: a world in which
a program has failed, or has taken too long, is ended; the next program starts another.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hybridpipe.launch import mpirun

# Programs that may run in a process after others: they close what they make, and measure no process.
SHARED = {
    "any_model.py",
    "any_model_state.py",
    "as_it_is.py",
    "asynchronous.py",
    "batchnorm.py",
    "changing_shapes.py",
    "collectives.py",
    "cuts.py",
    "deferred_init.py",
    "differing.py",
    "exactness.py",
    "splitting.py",
    "exporting.py",
    "precision.py",
    "resuming.py",
    "sharded.py",
    "shared_parameters.py",
    "target.py",
    "trees.py",
    "unsplittable.py",
    "updates.py",
    "weighted.py",
}
MOST = 4  # ranks of a world
GRACE_SECONDS = 5.0  # for the other ranks, once one has failed


class World:
    """A job of ranks that wait for programs."""

    def __init__(self, num_ranks: int) -> None:
        self._folder, self._number = Path(tempfile.mkdtemp(prefix="hybridpipe-world-")), 0
        self._ranks = range(num_ranks)
        for rank in self._ranks:
            os.mkfifo(self._folder / f"tasks.{rank}")
        # opened for reading, too, so that it does not wait for a rank that never comes
        self._tasks = [os.open(self._folder / f"tasks.{rank}", os.O_RDWR) for rank in self._ranks]
        command = [sys.executable, "-m", "tests.mpi.server", str(self._folder)]
        argv, added = mpirun.mpirun_command(num_ranks, command, os.environ)
        with (self._folder / "printed").open("wb") as printed:
            self._job = mpirun.start(argv, os.environ | added, stdout=printed, stderr=subprocess.STDOUT)

    def run(self, program: Path, arguments: tuple[str, ...], timeout_seconds: float) -> tuple[int, str]:
        """Run a program on all ranks; return the largest exit code, and what they have printed."""
        self._number += 1
        task = {"number": self._number, "program": str(program), "arguments": arguments}
        for pipe in self._tasks:
            os.write(pipe, f"{json.dumps(task)}\n".encode())
        code = self._wait(time.monotonic() + timeout_seconds)
        printed = [self._folder / f"printed.{rank}" for rank in self._ranks]
        if code:
            printed.append(self._folder / "printed")
        return code, "".join(file.read_text(errors="replace") for file in printed if file.exists())

    def _wait(self, deadline: float) -> int:
        codes: dict[int, int] = {}
        while len(codes) < len(self._ranks):
            for rank in self._ranks:
                if (file := self._folder / f"done.{self._number}.{rank}").exists():
                    codes[rank] = int(file.read_text())
            if time.monotonic() > deadline:
                return max(codes.values(), default=0) or mpirun.TIMED_OUT
            if self._job.process.poll() is not None:
                return self._job.process.returncode or 1
            if any(codes.values()):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            time.sleep(0.01)
        return max(codes.values())

    def end(self) -> None:
        """End the job."""
        for pipe in self._tasks:
            os.close(pipe)
        self._job.end()
        shutil.rmtree(self._folder)


class Worlds:
    """A world for each number of ranks."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def run(
        self, num_ranks: int, program: Path, arguments: tuple[str, ...], timeout_seconds: float
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program as `mpirun.run` does, with each rank's output in one piece."""
        if num_ranks not in self._worlds:
            self._worlds[num_ranks] = World(num_ranks)
        code = 1  # unless the test's own time limit comes first
        try:
            code, printed = self._worlds[num_ranks].run(program, arguments, timeout_seconds)
        finally:
            if code:
                self._worlds.pop(num_ranks).end()
        return subprocess.CompletedProcess([str(program), *arguments], code, printed)

    def end(self) -> None:
        """End all."""
        while self._worlds:
            self._worlds.popitem()[1].end()
