"""BestCheckpoint: the folder holds the weights of the best validation."""

import pytest

from hybridpipe.callbacks import BestCheckpoint
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
