"""OUT of `hybridpipe train`: one training at a time, and a line where rank 0 cannot write a file."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.mpi.project import write_project
from tests.start import forked

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


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", ["full disk", "metrics.jsonl", "checkpoints/latest"])
def test_a_file_that_cannot_be_written_at_the_start_ends_the_job(job, tmp_path, case):
    """Rank 0 told its line and went into MPI_Finalize; the other rank waited for --hang-timeout, 300 s."""
    config, out = write_project(tmp_path, MODEL), tmp_path / "out"
    command = ["hybridpipe", "train", str(config), "--plan", "straight", "--out", str(out)]
    given = {"env": {"OMP_NUM_THREADS": "1"}, "timeout_seconds": 190}
    told = f"hybridpipe: {out}/{case}: cannot be written: it exists and is no regular file"
    if case == "full disk":
        given["env"]["SMALL_FILES"] = "300"
        told = f"hybridpipe: {out}/plan.json: cannot be written: File too large"
    else:
        (out / case).mkdir(parents=True)
    if case == "checkpoints/latest":
        (out / case).rmdir()
        job(2, *command, "--set", "train.epochs=1", **given)
        (out / case).unlink()
        (out / case).mkdir()
        command += ["--resume", str(out / "checkpoints/step-00000004")]
    done = job(2, *command, fails=True, **given)
    assert done.returncode == 2 and done.stdout.count(told) == 1, done.stdout
    assert "Traceback" not in done.stdout


class Train:
    """`hybridpipe train` in a world of one, without an end of its own, whose output goes to a file."""

    def __init__(self, config: Path, log: str, *options: str) -> None:
        self.out, self.log = config.parent / "out", config.parent / log
        command = [sys.executable, "-m", "hybridpipe", "train", str(config), "--out", str(self.out)]
        command += ["--plan", "straight", "--set", "train.epochs=100000", *options]
        env = {**os.environ, "OMP_NUM_THREADS": "1", forked.SOCKETS: ""}  # its number is told
        with self.log.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=env)

    def code(self) -> int:
        return self.process.wait(200)

    @property
    def steps(self) -> list[int]:
        path = self.out / "metrics.jsonl"
        lines = path.read_text().splitlines(True) if path.exists() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("\n")]

    def wait_for_steps(self, number: int) -> None:
        end = time.monotonic() + 200
        while len(self.steps) < number:
            assert time.monotonic() < end and self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def config(tmp_path):
    return write_project(tmp_path, MODEL, more="[checkpoint]\nevery = 50\n")


@pytest.mark.timeout(400)
def test_the_same_command_again_leaves_the_records_of_the_running_one(config):
    """It was refused at its first save: metrics.jsonl had stopped, and run.json was the second one's."""
    first = Train(config, "first.log")
    try:
        first.wait_for_steps(60)
        kept = {path: path.read_bytes() for path in (first.out / "run.json", first.out / "plan.json")}
        seconds = [Train(config, "auto.log", "--resume", "auto"), Train(config, "anew.log")]
        who = f"process {first.process.pid} on {os.uname().nodename}"
        told = f"hybridpipe: {first.out}: {BUSY} ({who}): end it, or take another folder\n"
        for second in seconds:
            assert second.code() == 2 and second.log.read_text().count(told) == 1
        assert all(path.read_bytes() == before for path, before in kept.items())
        first.wait_for_steps(len(first.steps) + 20)
    finally:
        first.end()
    assert first.steps == [*range(len(first.steps))]
    last = len(first.steps) + 200
    after = Train(config, "after.log", "--resume", "auto", "--set", f"train.max_steps={last}")
    assert after.code() == 0 and re.search(r"resuming from .*/step-\d+", after.log.read_text())
    assert after.steps == [*range(last)]


@pytest.mark.timeout(400)
def test_of_two_started_at_once_one_trains(config):
    both = [Train(config, "one.log"), Train(config, "other.log")]
    try:
        end = time.monotonic() + 200
        while all(each.process.poll() is None for each in both):
            assert time.monotonic() < end
            time.sleep(0.1)
        refused, trains = sorted(both, key=lambda each: each.process.poll() is None)
        assert refused.process.returncode == 2 and BUSY in refused.log.read_text()
        trains.wait_for_steps(20)
    finally:
        for each in both:
            each.end()
    assert trains.steps == [*range(len(trains.steps))]
