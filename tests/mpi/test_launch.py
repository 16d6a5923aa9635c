"""`hybridpipe launch` above a real training: asked to stop it saves and says 75, and goes on where it was."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridpipe.launch import mpirun
from tests.mpi.output import own_lines

CONFIG = Path(__file__).parents[1] / "campaigns" / "soak.toml"


@pytest.mark.timeout(180)
def test_a_training_that_is_asked_to_stop_goes_on_where_it_was(tmp_path):
    out = tmp_path / "out"
    plan = {"format": "hybridpipe-plan/1", "num_layers": 6, "schedule": "pipedream", "num_microbatches": 1}
    stages = [{"start": 0, "stop": 3, "ranks": [0]}, {"start": 3, "stop": 6, "ranks": [1]}]
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "stages": stages}))
    words = ["train", str(CONFIG), "--plan", str(tmp_path / "plan.json"), "--out", str(out)]
    launch = [sys.executable, "-m", "hybridpipe", "launch", "--launcher", "mpirun", "--ranks", "2", "--"]

    # So many samples that the epoch is not over before the signal comes; the order of the data depends on
    # their number, so what goes on is the same training.
    words += ["--set", "data.args.samples=4000", "--set", "train.epochs=1"]
    process = subprocess.Popen(launch + words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics, end = out / "metrics.jsonl", time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert "SIGTERM: asking the job to save and stop" in said
    assert "exit code 75: start it again with --resume auto" in said.splitlines()[-1]
    assert not list(out.glob(".launch-*")), "what the ranks have told is cleared away"
    (saved,) = out.glob("checkpoints/step-*")
    step = int(saved.name[5:])
    assert 0 < step < 500

    done = subprocess.run([*launch, *words, "--resume", "auto"], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert f"resuming from {saved}: step {step}" in done.stdout
    records = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert records == list(range(500)), "every minibatch once"


@pytest.mark.timeout(300)  # three jobs on two ranks, and one
def test_a_script_that_is_killed_and_then_asked_to_stop_ends_as_if_undisturbed(tmp_path):
    """Killed in the first attempt, asked in the second, which ends with 75; started again it goes on."""
    script = str(Path(__file__).parent / "programs" / "continuing.py")
    launch = [sys.executable, "-m", "hybridpipe", "launch", "--launcher", "mpirun", "--ranks", "2"]
    command = [*launch, "--max-restarts", "2", "--", "python", script, "checkpoints", "two"]

    def run(command: list[str], fault: str = "") -> "subprocess.CompletedProcess[str]":
        env = {**os.environ, "HYBRIDPIPE_FAULT": fault}
        return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, cwd=tmp_path)

    kill = "rank=0,point=save-prune,kind=kill"  # once the first checkpoint is there
    ask = "rank=1,step=9,point=backward,kind=term,attempt=1"
    done = run(command, f"{kill};{ask}")
    assert done.returncode == 75, done.stderr
    first, again, second, stopped, last = re.findall(
        r"^hybridpipe(?: launch)?: (?!rank )(.*)", done.stderr, re.M
    )
    assert first == "no checkpoint in checkpoints: training starts anew"
    assert again.startswith("attempt 0: a rank was lost: SIGKILL (rank 0 on host ")
    assert again.endswith("; restarting from the last good checkpoint")
    assert second.startswith("resuming from checkpoints/step-00000003: step 3, ")
    assert "measuring" not in done.stderr.partition("resuming from")[2], "the model is as it was"
    assert last == f"{stopped}; exit code 75: start it again" and "saved as" in stopped

    done = run(command)
    assert done.returncode == 0 and done.stderr.count("resuming from") == 1, done.stderr
    assert not list(tmp_path.glob(".launch-*")), "what the ranks have told is cleared away"
    alone = run([sys.executable, script, "of_one", "one"])
    assert alone.returncode == 0, alone.stderr
    two, one = (json.loads((tmp_path / name).read_text()) for name in ("two", "one"))
    for name, numbers in one.items():
        assert two[name] == pytest.approx(numbers, rel=1e-10, abs=1e-10)
    assert len(one["losses"]) == 3


MISTAKEN = """
import torch, hybridpipe
hybridpipe.Trainer(torch.nn.Sequential(torch.nn.Linear(2, 2)), loss=torch.nn.functional.mse_loss,
                   optimizer=torch.optim.Adam, plan="dpp", minibatch_size=4)
"""


def test_a_scripts_mistake_is_told_with_2_and_not_tried_again(tmp_path):
    launch = [sys.executable, "-m", "hybridpipe", "launch", "--launcher", "mpirun", "--ranks", "2"]
    command = [*launch, "--max-restarts", "3", "--", "python", "-c", MISTAKEN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "(it would fail again)" in last and "got 'dpp'" in last, done.stderr


def launched(tmp_path, *words: str, restarts: int = 0, fault: str = "") -> "subprocess.CompletedProcess[str]":
    """A training on one rank."""
    launch = [sys.executable, "-m", "hybridpipe", "launch", "--launcher", "mpirun", "--ranks", "1"]
    train = ["--max-restarts", str(restarts), "--", "train", str(CONFIG), "--out", str(tmp_path / "out")]
    env = {**os.environ, "HYBRIDPIPE_FAULT": fault}
    return subprocess.run([*launch, *train, *words], capture_output=True, text=True, timeout=150, env=env)


def test_a_single_rank_tells_why_it_has_failed(tmp_path):
    """In a world of one rank, exit reports were once not read: every restart failed in the same way."""
    fault = "rank=0,step=3,point=forward,kind=raise"
    done = launched(tmp_path, "--plan", "dp", restarts=3, fault=f"{fault};{fault},attempt=1")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "after 2 attempts (the same error came at step 3 twice in a row): rank 0 on host" in last
    assert "step 3, microbatch 0" in last and "InjectedFault" in last
    assert done.stderr.count("Traceback (most recent call last)") == 2, "Python's own, once an attempt"


def test_a_single_rank_tells_with_what_it_has_left(tmp_path):
    done = launched(tmp_path, "--plan", "dp", fault="rank=0,step=3,point=forward,kind=exit")
    assert done.returncode == 3 and "SystemExit: 3" in done.stderr.splitlines()[-1]


def test_an_error_before_mpi_starts_is_told_too(tmp_path):
    (tmp_path / "broken.py").write_text("raise RuntimeError('not today')\n")
    config = tmp_path / "broken.toml"
    config.write_text(CONFIG.read_text().replace("soak_parts:model", "broken:model"))
    launch = [sys.executable, "-m", "hybridpipe", "launch", "--launcher", "mpirun", "--ranks", "1"]
    train = ["--", "train", str(config), "--out", str(tmp_path / "out")]
    done = subprocess.run([*launch, *train], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "rank 0, before training: RuntimeError: not today" in done.stderr.splitlines()[-1]


def test_weights_that_the_last_update_has_spoilt_are_not_saved(tmp_path):
    """They reached model.safetensors and the last checkpoint, with exit code 0."""
    out, program = tmp_path / "out", [sys.executable, "-m", "hybridpipe", "train", str(CONFIG)]
    sets = ["optimizer.factory=torch.optim:SGD", "optimizer.args={ lr = 1e300 }", "data.args.samples=8"]
    words = [word for each in [*sets, "train.epochs=1"] for word in ("--set", each)]
    command = [*program, "--plan", "straight", "--out", str(out), *words]
    done = mpirun.run(2, command, timeout_seconds=120, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    lines = own_lines(done.stderr)
    assert done.returncode == 1 and len(lines) == 1, f"{done.stdout}\n{done.stderr}"
    assert "after step 1 " in lines[0] and "is not finite: " in lines[0], done.stderr
    assert not (out / "model.safetensors").exists() and not list(out.glob("checkpoints/*step*"))
