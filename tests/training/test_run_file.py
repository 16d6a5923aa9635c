"""The facts of a training that run.json holds, in a world of one rank."""

import platform
from functools import partial

import torch
from torch import nn

from hybridpipe.config import load_config
from hybridpipe.environment import num_cores
from hybridpipe.files import read_json, write_json
from hybridpipe.report.run import RUN_FORMAT, RunStart
from hybridpipe.training.run_file import run_start

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


def test_a_run_is_described_and_read_back(make_trainer, quick, tmp_path):
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
    write_json(tmp_path / "run.json", start)
    assert read_json(tmp_path / "run.json", RunStart, RUN_FORMAT) == start


def test_a_plan_that_was_not_measured_has_no_candidates(make_trainer, quick):
    from hybridpipe import Plan

    model, optimizer = nn.Sequential(nn.Linear(2, 1)), partial(torch.optim.SGD, lr=0.1)
    given = Plan.data_parallel(1, 1, 1)
    trainer = make_trainer(model, loss=nn.MSELoss(), optimizer=optimizer, plan=given, minibatch_size=4)
    start = run_start(trainer, "mine.toml", {}, "plan.json")
    assert not start.measured and start.candidates == ()
