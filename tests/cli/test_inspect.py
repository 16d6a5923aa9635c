"""`hybridpipe inspect` on each kind of model; it starts no MPI and measures nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hybridpipe.cli.inspect import inspect_model
from hybridpipe.cli.main import main
from hybridpipe.config.file import Config, DataConfig, Factory, TrainConfig


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(4, 3)

    def forward(self, x):
        return self.second(x + self.first(x)[:, :4])


class Wanders(Residual):
    def forward(self, x):
        x = self.first(x)
        return self.second(x[:, :4]) if x.mean().item() > 0 else x[:, :3]


class Stale(Residual):
    def forward(self, x):
        self.auxiliary = x.mean() + self.first(x).mean()
        return super().forward(x)


def residual() -> nn.Module:
    return Residual()


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def wanders() -> nn.Module:
    return Wanders()


def data() -> torch.utils.data.Dataset:
    return torch.utils.data.TensorDataset(torch.ones(10, 4), torch.zeros(10, dtype=torch.long))


MODELS: list[Stale] = []


def stale() -> nn.Module:
    MODELS.append(Stale())
    return MODELS[-1]


def stale_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets) + MODELS[-1].auxiliary


def config(model: str, **options) -> Config:
    return Config(
        model=Factory(f"{__name__}:{model}"),
        data=DataConfig(f"{__name__}:data"),
        optimizer=Factory("torch.optim:SGD", {"lr": 0.1}),
        train=TrainConfig(minibatch=8, microbatch=2),
        **options,
    )


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run the command on a model; return what it printed."""

    def printed(model: str, *options: str) -> str:
        path = tmp_path / "train.toml"
        path.write_text(
            f'[model]\nfactory = "{__name__}:{model}"\n[data]\nfactory = "{__name__}:data"\n'
            '[optimizer]\nfactory = "torch.optim:SGD"\nargs = { lr = 0.1 }\n'
            "[train]\nminibatch = 8\nepochs = 1\n"
        )
        assert main(["inspect", str(path), *options]) == 0
        return capsys.readouterr().out

    return printed


def test_a_recorded_model_and_what_crosses(run):
    text = run("residual")
    assert text.startswith("recorded: 2 layers, so up to 2 stages")
    assert "128 B, 1 tensor(s)" in text  # 8 samples of 4 numbers


def test_the_microbatch_is_that_of_the_config(run):
    assert inspect_model(config("residual")).layers[0].crossing_bytes == 2 * 4 * 4
    assert "64 B, 1 tensor(s)" in run("residual", "--set", "train.microbatch=4")


def test_a_sequential(run):
    assert run("sequential").startswith("nn.Sequential: 3 layers, so up to 3 stages")


def test_a_model_that_is_not_split_says_why(run):
    first, why, *_ = run("wanders").splitlines()
    assert first == "one layer, so one stage"
    assert why.startswith("why: test_inspect.py:") and "item reads data that only one stage has" in why


def test_the_loss_is_looked_at_too():
    found = inspect_model(config("stale", loss=Factory(f"{__name__}:loss_factory")))
    assert "the loss reads a tensor that the forward makes but does not return" in found.reason


def loss_factory():
    return stale_loss


def test_json_has_the_same_facts(run):
    found = json.loads(run("residual", "--json"))
    assert (found["kind"], [layer["name"] for layer in found["layers"]]) == ("recorded", ["first", "second"])


def test_only_rank_0_prints(run, monkeypatch):
    monkeypatch.setattr("hybridpipe.cli.main.launched_rank", lambda: 1)
    assert run("residual") == ""


def test_no_mpi_is_loaded():
    probe = (
        "import sys; from hybridpipe.cli import inspect, main; print({'mpi4py', 'horovod'} & {*sys.modules})"
    )
    assert subprocess.check_output([sys.executable, "-c", probe], text=True) == "set()\n"
