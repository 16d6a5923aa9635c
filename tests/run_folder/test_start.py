"""The facts of a training that run.json holds, in a world of one rank."""

import platform
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

from hybridpipe.config.file import load_config
from hybridpipe.environment import num_cores
from hybridpipe.files import read_json, write_json
from hybridpipe.run_folder.data import RUN_FORMAT, RunStart
from hybridpipe.run_folder.start import commit, optimizer_settings, run_start

CONFIG = """
[model]
factory = "torch.nn:Sequential"
[data]
factory = "hybridpipe.data:digits"
[optimizer]
factory = "torch.optim:SGD"
args = { lr = 0.1 }
[train]
minibatch = 4
"""


def test_a_run_is_described_and_read_back(make_trainer, quick, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "train.py", "a file"])
    (tmp_path / "mine.toml").write_text(CONFIG)
    config = load_config(tmp_path / "mine.toml")
    model, optimizer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), partial(torch.optim.SGD, lr=0.1)
    trainer = make_trainer(model, loss=nn.MSELoss(), optimizer=optimizer, plan="dp", minibatch_size=4)
    trainer.train_step(torch.ones(4, 2), torch.ones(4, 1))
    start = run_start(trainer, config.where, config.settings(), "dp")
    assert (start.title, start.plan_source, start.device) == ("mine", "dp", "cpu")
    assert start.hosts == (platform.node(),) and start.num_cores == (num_cores(),)
    assert start.settings == config.settings() and start.measured
    assert start.candidates[0].plan.num_ranks == 1
    assert start.versions.keys() == {"hybridpipe", "torch", "python", "MPI"} and all(start.versions.values())
    assert start.command == "python3 train.py 'a file'"
    write_json(tmp_path / "run.json", start)
    assert read_json(tmp_path / "run.json", RunStart, RUN_FORMAT) == start


def test_a_plan_that_was_not_measured_has_no_candidates(make_trainer, quick):
    from hybridpipe import Plan

    model, optimizer = nn.Sequential(nn.Linear(2, 1)), partial(torch.optim.SGD, lr=0.1)
    given = Plan.data_parallel(1, 1, 1)
    trainer = make_trainer(model, loss=nn.MSELoss(), optimizer=optimizer, plan=given, minibatch_size=4)
    start = run_start(trainer, "mine.toml", {}, "plan.json")
    assert not start.measured and start.candidates == ()


def test_the_optimizer_of_a_script_is_described(make_trainer, quick, tmp_path):
    """Its lambda says nothing in a report; what it made does."""
    rate = torch.tensor(0.5)
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=3)
    trainer = make_trainer(
        nn.Sequential(nn.Linear(2, 1)),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=rate, betas=(0.8, 0.9)),
        plan="dp",
        minibatch_size=4,
        lr_scheduler=schedule,
        clip_grad_norm=float("inf"),
    )
    trainer.train_step(torch.ones(4, 2), torch.ones(4, 1))
    found = optimizer_settings(trainer)
    assert found["type"] == "Adam" and found["lr"] == 0.5 and found["betas"] == [0.8, 0.9]
    assert found["lr_scheduler"] == "StepLR" and found["clip_grad_norm"] == "inf"
    start = run_start(trainer, "mine.py", {"optimizer": found}, "dp")
    write_json(tmp_path / "run.json", start)
    assert read_json(tmp_path / "run.json", RunStart, RUN_FORMAT) == start


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_a_commit_is_that_of_the_scripts_folder(tmp_path):
    assert commit(tmp_path) == "" and commit(tmp_path / "none") == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "train.py").write_text("")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "begin"]):
        subprocess.run([*git, *command], check=True)
    clean = commit(tmp_path)
    assert len(clean) == 12 and int(clean, 16) >= 0
    (tmp_path / "train.py").write_text("changed")
    assert commit(tmp_path) == f"{clean}-dirty"
