"""BestCheckpoint: the folder holds the weights of the best validation."""

import pytest
import torch
from torch import nn

from hybridpipe import Checkpointing
from hybridpipe.callbacks import EMA, BestCheckpoint
from tests.training.helpers import assert_same_weights, seeded, seeded_mlp

pytestmark = pytest.mark.usefixtures("quick")


def test_the_best_weights_are_kept(make, tmp_path):
    """Samples at random have nothing in common: the validation worsens as the training learns its own."""
    validation = seeded(8, seed=3)
    trainer = make(seeded_mlp(), callbacks=[BestCheckpoint(tmp_path)])
    losses = [entry["validation"]["loss"] for entry in trainer.fit(seeded(32), 6, validation=validation)]
    assert min(losses) < losses[-1]
    best = make(seeded_mlp())
    best.resume(tmp_path)
    assert best.evaluate(validation)["loss"] == min(losses)


def test_within_an_epoch_too(make, tmp_path):
    validation = seeded(8, seed=3)
    trainer = make(seeded_mlp(), callbacks=[BestCheckpoint(tmp_path)])
    trainer.fit(seeded(32), max_steps=3, validation=validation, eval_every=3)
    best = make(seeded_mlp())
    best.resume(tmp_path)
    best.prepare(seeded(32))
    assert best.step == 3
    assert_same_weights(best.model, trainer.model)


@pytest.mark.parametrize("more", [[], [EMA(0.5)]])
def test_a_script_gets_its_best_weights_back(make, tmp_path, more):
    """The averages, where they were validated; what the training goes on from stays the last."""
    validation, saving = seeded(8, seed=3), Checkpointing(tmp_path / "all")
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    trainer = make(model, callbacks=[*more, BestCheckpoint(tmp_path / "best", restore=True)])
    history = trainer.fit(seeded(32), 6, validation=validation, checkpoint=saving)
    losses = [entry["validation"]["loss"] for entry in history]
    assert min(losses) < losses[-1] and trainer.step == 24
    assert trainer.evaluate(validation)["loss"] == pytest.approx(min(losses), abs=1e-12)
    last = make(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double())
    last.resume(tmp_path / "all")
    last.prepare(seeded(32))
    assert last.step == 24 and not torch.equal(last.model[0].weight, model[0].weight)


def test_without_a_best_value_nothing_is_restored(make, tmp_path):
    """The folder may be an earlier training's."""
    earlier = make(callbacks=[BestCheckpoint(tmp_path)])
    earlier.fit(seeded(8), validation=seeded(8))
    earlier.close()
    trainer = make(callbacks=[BestCheckpoint(tmp_path, "never", "max", restore=True)], metrics={
        "never": lambda outputs, targets: (float("nan"), 1)})  # fmt: skip
    before = trainer.model[0].weight.clone()
    trainer.fit(seeded(8), validation=seeded(8))
    assert not torch.equal(trainer.model[0].weight, before)
