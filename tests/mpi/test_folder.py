"""OUT of `hybridpipe train`: one training at a time, and a line where rank 0 cannot write a file."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mpi.project import write_project

MODEL = """
import os, signal, resource
import torch
from torch import nn

if "SMALL_FILES" in os.environ:  # a full disk, nearly
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["SMALL_FILES"]),) * 2)

def net(width):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))
"""
BUSY = "another running training writes there"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "taken, options",
    [
        ("plan.json", []),
        ("metrics.jsonl", []),
        ("tensorboard/", ["--set", 'log.to=["tensorboard"]']),
        ("checkpoints/latest/", ["--resume"]),
        (None, []),
    ],
)
def test_a_file_that_cannot_be_written_at_the_start_ends_the_job(job, tmp_path, taken, options):
    """Rank 0 told its line and went into MPI_Finalize; the other ranks waited for --hang-timeout, 300 s."""
    config, out = write_project(tmp_path, MODEL), tmp_path / "out"
    command = ["hybridpipe", "train", str(config), "--plan", "straight", "--out", str(out)]
    env = {"OMP_NUM_THREADS": "1"}
    why = "it exists and is no regular file"
    if options == ["--resume"]:
        job(2, *command, "--set", "train.epochs=1", env=env)
        (out / "checkpoints/latest").unlink()
        options = ["--resume", str(out / "checkpoints/step-00000004")]
    if taken is None:
        taken, why = "plan.json", "File too large"
        env["SMALL_FILES"] = "300"
    elif taken == "tensorboard/":
        out.mkdir()
        (out / "tensorboard").touch()
        taken, why = "tensorboard", "must be a directory"
    else:
        (out / taken).mkdir(parents=True)
    began = time.monotonic()
    done = job(2, *command, *options, fails=True, env=env)
    assert time.monotonic() - began < 60
    lines = [line for line in done.stdout.splitlines() if str(out) in line and why in line]
    assert len(lines) == 1 and lines[0].startswith(f"hybridpipe: {out}/{taken.rstrip('/')}: "), done.stdout
    assert done.returncode == 2 and "Traceback" not in done.stdout


def start(config: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    """Start `hybridpipe train` in a world of one."""
    command = [sys.executable, "-m", "hybridpipe", "train", str(config), "--out", str(out), *options]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def steps(out: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines(True)[:-1]]


def wait_for_steps(out: Path, number: int) -> None:
    end = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() or len(steps(out)) < number:
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.timeout(240)
def test_the_same_command_again_leaves_the_records_of_the_running_one(tmp_path):
    """It was refused at its first save: metrics.jsonl had stopped, and run.json was the second one's."""
    config, out = write_project(tmp_path, MODEL, more="[checkpoint]\nevery = 50\n"), tmp_path / "out"
    given = ["--plan", "straight", "--set", "train.epochs=100000"]
    first = start(config, out, *given)
    try:
        wait_for_steps(out, 60)
        kept = {path: path.read_bytes() for path in (out / "run.json", out / "plan.json")}
        for options in (["--resume", "auto"], []):
            second = start(config, out, *given, *options)
            told, _ = second.communicate(timeout=60)
            assert second.returncode == 2
            who = f"process {first.pid} on {os.uname().nodename}"
            assert f"hybridpipe: {out}: {BUSY} ({who}): end it, or take another folder\n" in told, told
        assert all(path.read_bytes() == before for path, before in kept.items())
        reached = len(steps(out))
        wait_for_steps(out, reached + 20)
        assert steps(out) == [*range(len(steps(out)))]
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    after = start(config, out, *given, "--resume", "auto", "--set", f"train.max_steps={reached + 200}")
    told, _ = after.communicate(timeout=100)
    assert after.returncode == 0 and re.search(r"resuming from .*/step-\d+", told), told
    assert steps(out) == [*range(reached + 199)]  # and the last line


@pytest.mark.timeout(240)
def test_of_two_started_at_once_one_trains(tmp_path):
    config, out = write_project(tmp_path, MODEL), tmp_path / "out"
    both = [start(config, out, "--set", "train.epochs=400") for _ in range(2)]
    told = [process.communicate(timeout=100)[0] for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes == [0, 2] and sum(BUSY in each for each in told) == 1, told
    assert steps(out) == [*range(1599)]
