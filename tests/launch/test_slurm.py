"""Under a real Slurm: a job that is requeued, and then meets its time limit, ends as if nothing had happened.

The cluster is netcluster's, two hosts on this machine, which wants root; without it the test is skipped.
"""

import re
import subprocess
import sys
import time
from functools import partial

import pytest

from tests.launch import netcluster

PROGRAMS = ("ip", "tc", "slurmctld", "slurmd", "sbatch", "scontrol", "munged")
STARTED = re.compile(r"resuming from .*: step (\d+)")

# Slow until the file `fast` is there: the job is to meet its time limit, and to end soon afterwards.
PARTS = """
import time
from pathlib import Path

import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))

class Slow(torch.utils.data.TensorDataset):
    def __getitem__(self, i):
        if not (Path(__file__).parent / "fast").exists():
            time.sleep(0.03)
        return super().__getitem__(i)

def data():
    inputs = torch.randn(400, 6, generator=torch.Generator().manual_seed(0))
    return Slow(inputs, inputs[:, :3].argmax(1))
"""
CONFIG = """
model.factory = "slurm_parts:model"
data.factory = "slurm_parts:data"
optimizer = { factory = "torch.optim:SGD", args = { lr = 0.1, momentum = 0.9 } }
train = { minibatch = 8, epochs = 6 }
checkpoint.every = 5
plan.predict = false
"""
PLAN = """{"format": "hybridpipe-plan/1", "num_layers": 4, "schedule": "1f1b", "num_microbatches": 2,
 "stages": [{"start": 0, "stop": 2, "ranks": [0]}, {"start": 2, "stop": 4, "ranks": [1]}]}"""


@pytest.fixture
def slurm():
    """The environment for sbatch and the others, with a cluster of two hosts that nobody else uses."""
    with netcluster.hosts(2, "--slurm", needs=PROGRAMS) as env:
        yield env


@pytest.fixture
def trained(tmp_path):
    """The words after `train` for a small training; its `--out` is the last one."""
    (tmp_path / "slurm_parts.py").write_text(PARTS)
    (tmp_path / "config.toml").write_text(CONFIG)
    (tmp_path / "plan.json").write_text(PLAN)
    return [str(tmp_path / "config.toml"), "--plan", str(tmp_path / "plan.json"), "--out"]


def wait_for(what, seconds, is_there, log):
    end = time.monotonic() + seconds
    while not (found := is_there()):
        said = log.read_text() if log.exists() else "no log"
        assert time.monotonic() < end, f"{what} did not come within {seconds} s\n{said}"
        time.sleep(0.2)
    return found


def command_in(env, *command):
    """What a command prints."""
    done = subprocess.run(command, env=env, cwd=netcluster.ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def goes_on(job, env):
    """Slurm holds a requeued job back for two minutes; here, until the hosts are free of what it was: its
    steps get the same names again, and the sockets of the old ones would be in the way.
    """
    is_left = subprocess.run(["pgrep", "-f", rf"slurmstepd: \[{job}\."], capture_output=True).stdout
    if not is_left and command_in(env, "squeue", "-h", "-j", job, "-o", "%T") == "PENDING":
        release = ["scontrol", "update", f"JobId={job}", "StartTime=now"]
        subprocess.run(release, env=env, capture_output=True)


@pytest.mark.netcluster
@pytest.mark.timeout(300)
def test_a_job_that_is_requeued_and_meets_its_time_limit_ends_as_if_undisturbed(slurm, trained, tmp_path):
    log, out = tmp_path / "log.txt", tmp_path / "out"
    run = partial(command_in, slurm)
    job = run(
        "sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", "--time=1", "--signal=B:USR1@25",
        f"--output={log}", str(netcluster.ROOT / "launch/slurm.sbatch"), *trained, str(out),
    )  # fmt: skip

    def stopped(times):
        goes_on(job, slurm)
        return log.read_text().count("start it again with --resume auto") == times

    def ended():
        goes_on(job, slurm)
        return (out / "summary.json").exists()

    metrics = out / "metrics.jsonl"
    wait_for("training", 30, lambda: metrics.exists() and metrics.read_text().count("\n") > 3, log)
    run("scontrol", "requeue", job)
    wait_for("the first stop", 30, lambda: stopped(1), log)
    wait_for("the time limit", 90, lambda: stopped(2), log)
    (tmp_path / "fast").touch()
    wait_for("the end", 150, ended, log)
    first, second = map(int, STARTED.findall(log.read_text()))
    assert 3 < first <= second < 300, log.read_text()  # equal: the limit came while the second run started

    alone = tmp_path / "alone"
    run(sys.executable, "-m", "hybridpipe", "launch", "--ranks", "2", "--launcher", "mpirun", "--", "train",
        *trained, str(alone))  # fmt: skip
    weights = [(folder / "model.safetensors").read_bytes() for folder in (out, alone)]
    assert weights[0] == weights[1], log.read_text()


SCRIPT = """
import sys
from functools import partial

import torch
from slurm_parts import data, model

from hybridpipe import Checkpointing, Trainer

trainer = Trainer(model(), loss=torch.nn.functional.cross_entropy, plan="straight", minibatch_size=8,
                  optimizer=partial(torch.optim.SGD, lr=0.1))
trainer.fit(data(), epochs=2, checkpoint=Checkpointing(sys.argv[1], every=5), resume="auto")
if trainer.world.rank == 0:
    print("trained", trainer.step)
"""


def requeued(slurm, tmp_path, *words):
    """What the job of a generated script prints, requeued once it has saved in tmp_path/checkpoints."""
    log, checkpoints = tmp_path / "log.txt", tmp_path / "checkpoints"
    options = ["--nodes", "2", "--ntasks-per-node", "1", "--time", "5", "--output", str(log), "--submit"]
    said = command_in(slurm, sys.executable, "-m", "hybridpipe", "slurm", *options, *words)
    job = said.split()[-1]  # Submitted batch job 2

    wait_for("training", 60, lambda: list(checkpoints.glob("step-*")), log)
    command_in(slurm, "scontrol", "requeue", job)
    wait_for("the stop", 40, lambda: "exit code 75: start it again" in log.read_text(), log)
    (tmp_path / "fast").touch()

    def ended():
        goes_on(job, slurm)
        return command_in(slurm, "squeue", "-h", "-j", job, "-o", "%T") in ("", "COMPLETED")

    wait_for("the end", 120, ended, log)
    return log.read_text()


@pytest.mark.netcluster
@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_generated_script_checks_the_hosts_trains_and_goes_on_after_a_requeue(slurm, tmp_path, launcher):
    (tmp_path / "slurm_parts.py").write_text(PARTS)
    (tmp_path / "train.py").write_text(SCRIPT)
    script = ["--", "python", str(tmp_path / "train.py"), str(tmp_path / "checkpoints")]
    text = requeued(slurm, tmp_path, "--launcher", launcher, *script)
    assert text.count("launcher      a world of 2 as started") == 1, text  # doctor, not after the requeue
    (step,) = map(int, STARTED.findall(text))
    assert 0 < step < 100 and text.count("trained 100\n") == 1, text


@pytest.mark.netcluster
@pytest.mark.timeout(300)
def test_the_example_of_a_slurm_job_goes_on_after_a_requeue(slurm, tmp_path):
    script = ["--", "python", "examples/slurm_job.py", "--out", str(tmp_path), "--epochs", "40"]
    text = requeued(slurm, tmp_path, *script)
    (step,) = map(int, STARTED.findall(text))
    assert 0 < step < 40 * 23 and f"trained {40 * 23} minibatches" in text, text
    assert (tmp_path / "model.pt").exists()


BLOCKED = """#!/bin/bash
for host in h1 h2; do
  $PYTHON -c "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])" \
    "$(dirname "$SLURM_CONF")/spool/$host/stepd.slurm.pmix.$SLURM_JOB_ID.0"
done
exec bash launch/slurm.sbatch "$@"
"""


@pytest.mark.netcluster
@pytest.mark.timeout(120)
def test_a_step_that_slurm_could_not_launch_is_tried_again(slurm, trained, tmp_path):
    """srun returned 0, and the job was done, untrained: the socket of an older step was in the way."""
    (tmp_path / "fast").touch()
    script, log, out = tmp_path / "blocked.sh", tmp_path / "log.txt", tmp_path / "out"
    script.write_text(BLOCKED)
    options = ["--wait", "--nodes=2", "--ntasks-per-node=1", f"--output={log}"]
    done = subprocess.run(
        ["sbatch", *options, str(script), *trained, str(out)],
        env=slurm,
        cwd=netcluster.ROOT,
        capture_output=True,
        text=True,
    )
    said = log.read_text()
    assert done.returncode == 0 and (out / "summary.json").exists(), said + done.stderr
    assert "exit code 0, but started no rank; restarting" in said and "done after 2 attempts" in said, said
