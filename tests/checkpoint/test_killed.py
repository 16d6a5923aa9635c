"""A kill at any moment of saving, then another one: the old checkpoint or the new one is there, whole."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.thinned import rare

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory, if there is one: a kill loses nothing there either, and fsync takes no time."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as path:
        yield Path(path)


@pytest.mark.parametrize(
    "kind, every, scenario",
    [("points", 7, "same"), ("events", 23, "next"), rare("points", 7, "next"), rare("events", 23, "same")],
)
def test_killed_while_saving_twice_in_a_row(memory, kind, every, scenario):
    program = [sys.executable, "-m", "tests.checkpoint.programs.killed"]
    run = subprocess.run(
        [*program, memory, kind, scenario, str(every)], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    moments, pairs = (int(part.split()[0]) for part in run.stdout.split(","))
    assert (moments, pairs) == (6, 6) if kind == "points" else moments > 25 and pairs > 30
