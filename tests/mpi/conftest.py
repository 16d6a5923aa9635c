"""Jobs under mpirun from plain pytest: time limits, every rank's output on failure, nothing left behind."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridpipe.launch import mpirun

PROGRAMS = Path(__file__).parent / "programs"

Job = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def job() -> Job:
    """`job(ranks, "program.py", *arguments)` runs one of tests/mpi/programs and returns what it printed.

    `fails=True` expects an exit code other than 0; `timeout_seconds` and `env` as in `mpirun.run`.
    """

    def run(
        ranks: int,
        program: str,
        *arguments: str,
        fails: bool = False,
        timeout_seconds: float = 90.0,
        env: dict[str, str] | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        path = PROGRAMS / program
        command = [sys.executable, str(path)] if path.is_file() else [program]
        done = mpirun.run(
            ranks,
            [*command, *arguments],
            timeout_seconds=timeout_seconds,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if (done.returncode != 0) != fails or done.returncode == mpirun.TIMED_OUT:
            what = f"{program} {' '.join(arguments)} on {ranks} ranks"
            pytest.fail(f"{what}: exit code {done.returncode}\n{done.stdout}", pytrace=False)
        return done

    return run
