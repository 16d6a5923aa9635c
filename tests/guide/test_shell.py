"""Commands on the pages, run as they are printed in a folder with a small project.

What starts no job is run on every page, a job of each kind on one page: `test_blocks.py` checks the others.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.guide.blocks import PAGES, words
from tests.guide.reader import shell, write_project

# What is run wherever it stands; --submit goes to a cluster (test_slurm.py).
CHEAP = (
    "export ",
    *(f"hybridpipe {name}" for name in ("doctor", "export", "import", "inspect", "plan", "probe --flat")),
    *(f"hybridpipe {name}" for name in ("profile", "report", "simulate", "slurm")),
)
# What else a page runs, and what job: one of a kind, as others are tested where they belong.
MORE = {"docs/guide/checkpoints.md": ("hybridpipe train CONFIG --out",)}
JOBS = {"docs/guide/first-run.md": ("launch/mpirun.sh 2",)}
# What needs more than the small project has, and where it is tested.
ELSEWHERE = {"hybridpipe export runs/gpt2": "tests/cli/test_export.py"}
REMEDY = "mend the page, or name what needs more than the small project in ELSEWHERE of test_shell.py"

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(300)]


def run_in(folder: Path, commands: Sequence[str]) -> None:
    """Run the commands in a folder until one fails, which fails the test."""
    done = shell("\n".join(["set -ex", *commands]), folder)
    assert done.returncode == 0, f"{done.stdout}\n{REMEDY}"


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


def commands_of(page: str) -> list[str]:
    return [command for block in PAGES[page] for command in block.commands]


def beginning_with(page: str, beginnings: tuple[str, ...]) -> list[str]:
    """The commands of a page that begin so and can be run here."""
    found = [command for command in commands_of(page) if command.startswith(beginnings)]
    return [each for each in found if "--submit" not in each and not each.startswith(tuple(ELSEWHERE))]


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


@pytest.mark.parametrize("page", JOBS)
def test_a_job_runs_as_it_is_printed(page, folder):
    run_in(folder, beginning_with(page, JOBS[page])[:1])


@pytest.mark.parametrize("beginning", ELSEWHERE)
def test_what_is_tested_elsewhere_is_on_a_page(beginning):
    assert any(command.startswith(beginning) for page in PAGES for command in commands_of(page))
