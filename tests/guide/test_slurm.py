"""The commands for Slurm on the pages, run as they are printed on two emulated hosts of this machine."""

import re
from pathlib import Path

import pytest

from tests.guide.blocks import BLOCKS
from tests.guide.reader import shell, write_project
from tests.launch import netcluster
from tests.launch.test_slurm import PROGRAMS, command_in, wait_for

pytestmark = [pytest.mark.netcluster, pytest.mark.timeout(600)]
COMMANDS = [command for block in BLOCKS for command in block.commands]


@pytest.fixture(scope="module")
def slurm():
    with netcluster.hosts(2, "--slurm", needs=PROGRAMS) as env:
        yield env


@pytest.fixture
def printed(slurm, tmp_path):
    """What the pages' command that begins so prints, in a folder with the small project."""
    write_project(tmp_path)

    def run(beginning: str) -> str:
        (command,) = {each for each in COMMANDS if each.startswith(beginning)}
        return shell(command, tmp_path, slurm).stdout

    return run


def test_the_doctor_sees_the_ranks_of_srun_and_names_what_is_missing(printed):
    assert "a world of 4 as started" in printed("srun -N 2 -n 4 --mpi=pmix")
    assert "it started 4 ranks, and each sees a world of 1" in printed("srun -n 4 hybridpipe doctor")


@pytest.mark.parametrize("beginning", ["hybridpipe slurm --nodes 2 --ntasks-per-node 4 --submit", "sbatch "])
def test_a_submitted_training_ends(printed, slurm, tmp_path: Path, beginning):
    said = printed(beginning)
    (job,) = re.findall(r"^Submitted batch job (\d+)$", said, re.M) or pytest.fail(said)
    ended = ("", "COMPLETED")
    log = tmp_path / f"hybridpipe-{job}.log"
    wait_for("the end", 300, lambda: command_in(slurm, "squeue", "-h", "-j", job, "-o", "%T") in ended, log)
    assert (tmp_path / "runs/digits/summary.json").exists(), log.read_text()
