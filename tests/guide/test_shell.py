"""Commands on the pages, run as they are printed in a folder with a small project.

What starts no job is run on every page, a job of each kind on one page: `test_blocks.py` checks the others.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.guide.blocks import PAGES, ROOT, words
from tests.guide.reader import write_project

# What is run wherever it stands; --submit goes to a cluster (test_slurm.py).
CHEAP = (
    "export ",
    *(f"hybridpipe {name}" for name in ("doctor", "export", "import", "inspect", "plan", "probe --flat")),
    *(f"hybridpipe {name}" for name in ("profile", "report", "simulate", "slurm")),
)
# What else a page runs, and what job: one of a kind, as others are tested where they belong.
MORE = {"docs/guide/checkpoints.md": ("hybridpipe train CONFIG --out",)}
JOBS = {"docs/guide/first-run.md": ("launch/mpirun.sh 2",)}


def run_in(folder: Path, commands: Sequence[str]) -> str:
    """What a shell prints that runs the commands in a folder until one fails, which fails the test."""
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-c", "\n".join(["set -ex", *commands])],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A folder with the small project, and what one training of it has left."""
    folder = tmp_path_factory.mktemp("project")
    write_project(folder)
    trained = "hybridpipe train CONFIG --out runs/digits", "cp runs/digits/model.safetensors ."
    run_in(folder, ["hybridpipe probe --flat 4", *trained])
    return folder


@pytest.fixture
def folder(project, tmp_path) -> Path:
    """The project for one page alone."""
    return shutil.copytree(project, tmp_path / "project", symlinks=True)


def beginning_with(page: str, beginnings: tuple[str, ...]) -> list[str]:
    """The commands of a page that begin so, submissions left out."""
    commands = [command for block in PAGES[page] for command in block.commands]
    return [command for command in commands if command.startswith(beginnings) and "--submit" not in command]


def to_run() -> dict[str, list[str]]:
    """By page, the commands to run; one that stands alone on several pages, such as doctor, on the first."""
    found = {page: beginning_with(page, (*CHEAP, *MORE.get(page, ()))) for page in PAGES}
    alone = {command: page for page in reversed(found) for command in found[page] if len(words(command)) == 2}
    kept = {page: [each for each in found[page] if alone.get(each, page) == page] for page in found}
    return {page: commands for page, commands in kept.items() if commands}


RUN = to_run()


@pytest.mark.parametrize("page", RUN)
def test_commands_run_as_they_are_printed(page, folder):
    run_in(folder, RUN[page])


@pytest.mark.jobs
@pytest.mark.parametrize("page", JOBS)
def test_a_job_runs_as_it_is_printed(page, folder):
    run_in(folder, beginning_with(page, JOBS[page])[:1])
