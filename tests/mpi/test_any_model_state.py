"""Checkpoints of recorded models from plan to plan, and ranks that disagree about a forward."""

import json

from safetensors.torch import load_file

from tests.mpi.project import write_project

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, 3)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        x = self.enter(x)
        skip = x
        for block in self.blocks:
            x = x + block(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.head(self.drop(x + skip))
"""


def test_a_checkpoint_goes_from_plan_to_plan_under_the_models_own_keys(job, tmp_path):
    done = job(3, "any_model_state.py", "moved", str(tmp_path), timeout_seconds=180)
    assert done.stdout.count(": the same") == 4, done.stdout


def test_a_checkpoint_of_one_layer_is_resumed_as_many(job, tmp_path):
    done = job(3, "any_model_state.py", "layered", str(tmp_path), timeout_seconds=180)
    assert "one layer as many: the same" in done.stdout


def test_ranks_whose_forwards_differ_are_told_before_anything_is_sent(job):
    assert "told: the forward of the model" in job(3, "any_model_state.py", "differing").stdout


def test_the_command_trains_and_resumes_a_class_of_ones_own(job, tmp_path):
    config = write_project(tmp_path, MODEL, "Net")

    def train(out, *more):
        command = ("train", str(config), "--plan", "straight", "--out", str(tmp_path / out))
        job(2, "hybridpipe", *command, *more)
        return json.loads((tmp_path / out / "summary.json").read_text())["loss_last"]

    expected = train("whole")
    train("parts", "--set", "train.epochs=1")
    assert train("parts", "--resume", "auto") == expected
    whole, parts = (load_file(tmp_path / out / "model.safetensors") for out in ("whole", "parts"))
    assert list(whole) and whole.keys() == parts.keys() and whole["mean"].abs().sum()
    assert all(tensor.equal(parts[key]) for key, tensor in whole.items())
