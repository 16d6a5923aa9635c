"""The model in a checkpoint, with the weights or with their averages."""

import copy
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hybridpipe import Checkpointing, Plan, StageSpec
from hybridpipe.callbacks import EMA
from hybridpipe.checkpoint.saved_model import SavedModel, find_checkpoint
from hybridpipe.checkpoint.shard import PlainFile
from hybridpipe.cli import main
from hybridpipe.errors import UserError
from tests.training.helpers import cross_entropy, seeded

pytestmark = pytest.mark.usefixtures("quick")
SGD = partial(torch.optim.SGD, lr=0.1)


def tied() -> nn.Sequential:
    """A buffer, a frozen parameter, and a weight with two names."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)).double()
    model[3].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    return model


def trained(make_trainer, model, folder, callbacks, epochs=1):
    plan = Plan((StageSpec(0, 4),), num_microbatches=1)
    given = {"loss": cross_entropy, "optimizer": SGD, "plan": plan, "minibatch_size": 8}
    trainer = make_trainer(model, callbacks=callbacks, **given)
    saving = Checkpointing(folder)
    trainer.fit(seeded(24), epochs, shuffle=False, checkpoint=saving, resume="auto")
    return trainer


def test_the_averages_of_a_training_are_torchs(make_trainer, tmp_path, capsys):
    model, reference = tied(), tied()
    average = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    update, samples = SGD([p for p in reference.parameters() if p.requires_grad]), seeded(24)
    for start in range(0, 24, 8):
        inputs, targets = samples[start : start + 8]
        update.zero_grad()
        cross_entropy(reference(inputs), targets).backward()
        update.step()
        average.update_parameters(reference)
    trainer = trained(make_trainer, model, tmp_path, [EMA(0.9)])
    path, _ = find_checkpoint(tmp_path)
    weights, averages = SavedModel(path), SavedModel(path, averages=True)
    assert averages.tied == weights.tied == {"3.weight": "0.weight"}
    assert averages.num_averages == 5 and weights.num_averages == 0
    for key, tensor in trainer.model.state_dict().items():
        assert torch.equal(weights.read(key), tensor)
    expected = average.module.state_dict() | dict(reference.named_buffers())  # not averaged
    for key in weights.forms:
        torch.testing.assert_close(averages.read(key), expected[key], rtol=0, atol=1e-12)
    assert not torch.equal(averages.read("3.weight"), weights.read("3.weight"))
    assert torch.equal(averages.read("3.weight"), averages.read("0.weight"))

    out = tmp_path / "averages.safetensors"
    assert main.main(["export", str(tmp_path), "--averages", "--out", str(out)]) == 0
    assert (
        f"{len(expected)} tensors, 0.0 MB, of {path}, 5 of them averages, written" in capsys.readouterr().out
    )
    loaded = load_file(out)
    assert all(torch.equal(loaded[key], averages.read(key)) for key in averages.forms)


@pytest.mark.parametrize("later", [[], [EMA(0.9, at_end=True)]])
def test_averages_that_are_none_are_refused(make_trainer, tmp_path, later):
    """Those that a training without the callback left behind; and weights that were exchanged for them."""
    trained(make_trainer, tied(), tmp_path / "checkpoints", [EMA(0.9)]).close()
    trainer = trained(make_trainer, tied(), tmp_path / "checkpoints", later, epochs=2)
    path = trainer.save(tmp_path / "after")
    assert "optimizer.0.weight.ema" in PlainFile(path / "stage-000.safetensors").forms
    with pytest.raises(UserError, match=f"{path}: has no averages of weights"):
        SavedModel(path, averages=True)


def test_a_training_that_goes_on_with_its_averages_as_weights_begins_new_ones(make_trainer, tmp_path):
    trainer = trained(make_trainer, tied(), tmp_path, [EMA(0.9, at_end=True)])
    reference = copy.deepcopy(trainer.model)
    trainer.fit(seeded(8), 1, shuffle=False)
    inputs, targets = seeded(8)[:]
    update = SGD([p for p in reference.parameters() if p.requires_grad])
    cross_entropy(reference(inputs), targets).backward()
    update.step()  # the first update sets the average
    torch.testing.assert_close(trainer.model[3].bias, reference[3].bias, rtol=0, atol=1e-12)
