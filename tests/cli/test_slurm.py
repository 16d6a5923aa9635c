"""`hybridpipe slurm`: options become a script, mistakes are told in one line, and nothing is submitted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = ("--", "train", "examples/digits.toml")


def slurm(*words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "hybridpipe", "slurm", *words]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, env={**os.environ, **env}
    )


def test_ranks_are_gpus_where_nothing_else_is_said_and_the_script_names_its_command():
    words = ["--nodes", "2", "--gpus-per-node", "4", "--modules", "gcc,openmpi", *CONFIG]
    done = slurm(*words)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --ntasks-per-node=4\n" in done.stdout and "\nmodule load gcc openmpi || " in done.stdout
    assert f"# Made by `hybridpipe slurm {' '.join(words)}`." in done.stdout
    assert f"\npython={sys.prefix}/bin/python\n" in done.stdout


@pytest.mark.parametrize(
    "words, mistake",
    [
        (["--nodes", "0", *CONFIG], "--nodes: must be an integer >= 1, got '0'"),
        (["--nodes", "-2", *CONFIG], "--nodes: must be an integer >= 1, got '-2'"),
        ([*CONFIG], "needs --ntasks-per-node or --gpus-per-node, got neither"),
        (["--ntasks-per-node", "2"], "must be followed by -- train CONFIG ..., or by -- python train.py"),
        (["--ntasks-per-node", "2", "--container", "i.sif"], "must be followed by -- train CONFIG"),
        (["--ntasks-per-node", "2", "--", "train", "gone.toml"], "gone.toml"),
        (["--ntasks-per-node", "2", "--", "python", "gone.py"], "slurm: gone.py: No such file"),
        (["--ntasks-per-node", "2", *CONFIG, "--resume", "auto"], "leave --resume out"),
        (["--ntasks-per-node", "2", *CONFIG, "--plan", "examples/digits_2-1.json"], "digits_2-1.json: "),
        (["--time", "2 days", *CONFIG], "--time: must be minutes, MINUTES:SECONDS"),
        (["--ntasks-per-node", "2", "--time", "2", *CONFIG], "--time: must be longer than --notice, 120 s"),
        (["--ntasks-per-node", "2", "--output", "gone/%j.log", *CONFIG], "--output: gone: no such folder"),
        (["--mem", "64GB", *CONFIG], "--mem: must be a number with K, M, G or T, such as 64G, got '64GB'"),
        (["--account", "a\nrm -r x", *CONFIG], "--account: must be one line of text"),
        (["--sbatch", "qos=high", *CONFIG], "--sbatch: must be an option of sbatch"),
        (["--ntasks-per-node", "2", "--venv", "gone", *CONFIG], "gone/bin/activate: does not exist"),
        (["--gpus-per-node", "2", "--submit", *CONFIG], "slurm: no sbatch on the PATH"),
    ],
)
def test_a_mistake_is_told_in_one_line(words, mistake):
    done = slurm(*words, PATH=str(Path(sys.executable).parent))
    assert done.returncode == 2 and mistake in done.stderr and done.stdout == "", done.stderr
    assert done.stderr.count("\n") == 1
