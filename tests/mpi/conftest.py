"""Jobs under mpirun from plain pytest: time limits, every rank's output on failure, nothing left behind."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybridpipe.launch import mpirun
from tests.mpi.worlds import MOST, SHARED, Worlds

PROGRAMS = Path(__file__).parent / "programs"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what needs Horovod where it is not installed."""
    if importlib.util.find_spec("horovod") is None:
        for item in items:
            if item.path.parent == PROGRAMS.parent and "horovod" in item.name:
                item.add_marker(pytest.mark.skip(reason="Horovod is not installed"))


Job = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def worlds(fork_servers: str) -> Iterator[Worlds]:
    """Worlds of ranks that stay until the last test, and end before the servers of their forks."""
    made = Worlds()
    yield made
    made.end()


@pytest.fixture
def job(worlds: Worlds) -> Job:
    """`job(ranks, "program.py", *arguments)` runs one of tests/mpi/programs and returns what it printed.

    `fails=True` expects an exit code other than 0; `timeout_seconds` and `env` as in `mpirun.run`.
    Programs in `worlds.SHARED` run in a world that others have used, but with `fails` or `env`.
    """

    def run(
        ranks: int,
        program: str,
        *arguments: str,
        fails: bool = False,
        timeout_seconds: float = 180.0,
        env: dict[str, str] | None = None,
    ) -> "subprocess.CompletedProcess[str]":
        path = PROGRAMS / program
        if program in SHARED and ranks <= MOST and not fails and env is None:
            done = worlds.run(ranks, path, arguments, timeout_seconds)
            if done.returncode:
                what = f"{program} {' '.join(arguments)} on {ranks} ranks of a world"
                pytest.fail(f"{what}: exit code {done.returncode}\n{done.stdout}", pytrace=False)
            return done
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
