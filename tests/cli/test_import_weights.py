"""From plain weights to a training, and back."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hybridpipe import Plan, StageSpec, Trainer
from hybridpipe.checkpoint import directory, exchange
from hybridpipe.checkpoint.names import FORMATS
from hybridpipe.cli import main
from hybridpipe.cli.profile import build_model
from hybridpipe.config.file import load_config

MODEL = """
from torch import nn

def tied():
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return nn.Sequential(nn.Sequential(first, nn.Tanh(), last), nn.Linear(4, 3))

def net():
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)
    )

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.body, self.head = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, images):
        hidden = self.enter(images.flatten(1))
        return self.head(hidden + self.body(hidden))
"""
CONFIG = """
model = { factory = "imported_model:net" }
data = { factory = "hybridpipe.data:digits" }
optimizer = { factory = "torch.optim:Adam", args = { lr = 0.1 } }
lr_scheduler = { factory = "torch.optim.lr_scheduler:StepLR", args = { step_size = 2 } }
train = { minibatch = 8, microbatch = 4, seed = 5 }
"""


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "imported_model.py").write_text(MODEL)
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path / "config.toml"


@pytest.fixture
def weights(config, tmp_path) -> Path:
    """Of a model that was trained somewhere else."""
    state = build_model(load_config(config)).state_dict()
    torch.manual_seed(1)
    save_file(
        {k: t + (1 if "num" in k else torch.rand_like(t)) for k, t in state.items()},
        tmp_path / "w.safetensors",
    )
    return tmp_path / "w.safetensors"


def trained(config: Path, source: Path, plan: Plan) -> dict[str, Tensor]:
    """After five minibatches from there."""
    loaded = load_config(config)
    torch.manual_seed(2)
    data = TensorDataset(torch.randn(40, 4), torch.randint(0, 3, (40,)))
    trainer = Trainer(
        build_model(loaded),
        loss=nn.functional.cross_entropy,
        optimizer=loaded.optimizer.build,
        lr_scheduler=loaded.lr_scheduler.build,
        plan=plan,
        minibatch_size=8,
        seed=5,
    )
    trainer.resume(source)
    trainer.fit(data)
    state = trainer.full_state_dict()
    trainer.close()
    return state


@pytest.mark.parametrize("schedule, count", [("1f1b", 2), ("gpipe", 4), ("pipedream-2bw", 2)])
def test_what_starts_from_the_checkpoint_is_what_starts_from_the_file(
    config, weights, tmp_path, schedule, count
):
    assert main.main(["import", str(weights), str(config), "--out", str(tmp_path / "run")]) == 0
    plan = Plan((StageSpec(0, 4),), schedule=schedule, num_microbatches=count)
    of_file, of_checkpoint = (
        trained(config, source, plan) for source in (weights, tmp_path / "run" / "checkpoints")
    )
    assert all(torch.equal(of_file[key], of_checkpoint[key]) for key in of_file)
    anew = load_file(weights)
    assert not any(torch.equal(of_file[key], anew[key]) for key in of_file)


def test_there_and_back(config, weights, tmp_path, capsys):
    assert main.main(["import", str(weights), str(config), "--out", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"written to {tmp_path}/run/checkpoints/step-00000000\n"
    assert directory.verify(tmp_path / "run" / "checkpoints" / "step-00000000").epoch == 0
    out = tmp_path / "out.safetensors"
    assert main.main(["export", str(tmp_path / "run" / "checkpoints"), "--out", str(out)]) == 0
    before, after = load_file(weights), load_file(out)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("form", FORMATS)
def test_there_and_back_in_any_format(config, weights, tmp_path, monkeypatch, form):
    monkeypatch.setattr(exchange, "SHARD_BYTES", 40)
    of_form, back = str(tmp_path / f"of.{form}"), tmp_path / "back.safetensors"
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    for words in (
        ["import", str(weights), str(config), "--out", one],
        ["export", one, "--out", of_form, "--format", form],
        ["import", of_form, str(config), "--out", other],
        ["export", other, "--out", str(back)],
    ):
        assert main.main(words) == 0
    before, after = load_file(weights), load_file(back)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_there_and_back_with_a_model_that_is_recorded(config, tmp_path, capsys):
    config.write_text(CONFIG.replace(":net", ":Residual"))
    weights, run = tmp_path / "w.safetensors", tmp_path / "run"
    before = build_model(load_config(config)).state_dict()
    save_file({key: tensor + 1 for key, tensor in before.items()}, weights)
    assert main.main(["import", str(weights), str(config), "--out", str(run)]) == 0
    assert main.main(["export", str(run / "checkpoints"), "--out", str(tmp_path / "out.safetensors")]) == 0
    after = load_file(tmp_path / "out.safetensors")
    assert after.keys() == before.keys() and all(torch.equal(after[key], before[key] + 1) for key in before)


@pytest.mark.parametrize("form", ["hf", "dcp"])
def test_a_training_starts_from_a_folder_as_from_a_file(config, weights, tmp_path, form):
    assert main.main(["import", str(weights), str(config), "--out", str(tmp_path / "run")]) == 0
    folder = tmp_path / form
    assert main.main(["export", str(tmp_path / "run"), "--out", str(folder), "--format", form]) == 0
    of_file, of_folder = (
        trained(config, source, Plan((StageSpec(0, 4),), num_microbatches=2)) for source in (weights, folder)
    )
    assert all(torch.equal(of_file[key], of_folder[key]) for key in of_file)


@pytest.mark.parametrize("key", ["3.weight", "1.running_var"])
def test_weights_that_are_not_finite_are_refused(config, weights, tmp_path, capsys, key):
    state = load_file(weights)
    state[key].view(-1)[0] = torch.nan
    save_file(state, weights)
    assert main.main(["import", str(weights), str(config), "--out", str(tmp_path / "run")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{key} is not finite: 1 NaN and 0 infinite of {state[key].numel()}; nothing is saved" in line
    assert not [*(tmp_path / "run").rglob("*step*")]


def test_a_tied_weight_may_be_there_once_as_save_model_writes_it(config, tmp_path):
    config.write_text(CONFIG.replace(":net", ":tied"))
    model = build_model(load_config(config))
    save_model(model, tmp_path / "w.safetensors")
    assert len(load_file(tmp_path / "w.safetensors")) == len(model.state_dict()) - 1
    assert main.main(["import", str(tmp_path / "w.safetensors"), str(config), "--out", str(tmp_path)]) == 0
    assert (
        main.main(["export", str(tmp_path / "checkpoints"), "--out", str(tmp_path / "out.safetensors")]) == 0
    )
    after = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(after[key], tensor) for key, tensor in model.state_dict().items())


def test_mistakes_are_told_in_one_line_and_nothing_is_made(config, weights, tmp_path, capsys):
    def told(file: Path) -> str:
        assert main.main(["import", str(file), str(config), "--out", str(tmp_path / "run")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert told(tmp_path / "none") == f"hybridpipe: {tmp_path}/none: is missing"
    assert "config.toml: must be a safetensors file: its header should have" in told(config)
    (tmp_path / "empty").mkdir()
    of_none = (
        f"{tmp_path}/empty: must hold model.safetensors or model.safetensors.index.json (save_pretrained)"
    )
    assert told(tmp_path / "empty") == f"hybridpipe: {of_none}, or .metadata (torch.distributed.checkpoint)"
    other = tmp_path / "other.safetensors"
    changes = [
        (lambda state: state.pop("0.bias"), "0.bias: the model has float32[8], the file none"),
        (lambda state: state.update(more=torch.ones(1)), "more: the model has none, the file float32[1]"),
        (
            lambda state: state.update({"0.bias": torch.ones(9)}),
            "0.bias: the model has float32[8], the file float32[9]",
        ),
        (lambda state: state.update({"0.bias": torch.ones(8).half()}), "the file float16[8]"),
    ]
    for change, line in changes:
        state = load_file(weights)
        change(state)
        save_file(state, other)
        assert line in told(other)
    assert not (tmp_path / "run").exists()
    main.main(["import", str(weights), str(config), "--out", str(tmp_path / "run")])
    capsys.readouterr()
    assert "holds checkpoints already, such as step-00000000; import into a new one" in told(weights)
