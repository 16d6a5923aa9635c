"""EarlyStopping: a training ends when its validation no longer improves, and stays ended."""

import pytest

from hybridpipe import Checkpointing
from hybridpipe.callbacks import BestCheckpoint, EarlyStopping
from hybridpipe.callbacks.metric import Best
from hybridpipe.errors import UserError
from tests.training.helpers import seeded, seeded_mlp

pytestmark = pytest.mark.usefixtures("quick")
FAR = 10.0  # no validation improves by so much


@pytest.mark.parametrize(
    "arguments, values, improves",
    [
        (("loss",), [3.0, 2.0, 2.0, 1.0], [True, True, False, True]),
        (("accuracy",), [0.5, 0.6, 0.6, 0.4], [True, True, False, False]),
        (("score", "min"), [3.0, 4.0, 2.0], [True, False, True]),
        (("loss", None, 0.5), [3.0, 2.6, 2.4], [True, False, True]),
        (("loss",), [float("nan"), float("inf"), 2.0, float("nan")], [False, False, True, False]),
    ],
)
def test_better_is_less_or_more(arguments, values, improves):
    best = Best(*arguments)
    assert [best.improves({arguments[0]: value}) for value in values] == improves


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"mode": "least"}, "mode must be one of min, max, got 'least'"),
        ({"min_delta": -1.0}, "min_delta must be"),
        ({"patience": 0}, "patience must be an integer >= 1, got 0"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        EarlyStopping(**arguments)


def test_a_training_ends_after_its_patience(make):
    trainer = make(callbacks=[EarlyStopping(patience=2, min_delta=FAR)])
    history = trainer.fit(seeded(16), epochs=50, validation=seeded(8, seed=3))
    assert (len(history), trainer.step, trainer.stopped) == (3, 6, True)  # the first value is always better


@pytest.mark.parametrize("callback", [EarlyStopping(), BestCheckpoint("best")])
def test_a_training_without_validations_is_refused(make, callback):
    trainer = make(callbacks=[callback])
    name = type(callback).__name__
    with pytest.raises(UserError, match=rf"^{name} decides by validations: it needs fit\(..., validation="):
        trainer.fit(seeded(16), epochs=50)
    assert trainer.step == 0


def test_a_metric_that_is_not_there_is_named(make):
    trainer = make(callbacks=[EarlyStopping("f1")])
    with pytest.raises(ValueError, match="metric must be one of loss, accuracy, got 'f1'"):
        trainer.fit(seeded(16), validation=seeded(8, seed=3))


def test_a_resumed_training_goes_on_counting_and_stays_ended(make, tmp_path):
    def trained(epochs):
        trainer = make(seeded_mlp(), callbacks=[EarlyStopping(patience=2, min_delta=FAR)])
        trainer.resume(tmp_path, or_anew=True)
        trainer.fit(seeded(16), epochs, validation=seeded(8, seed=3), checkpoint=Checkpointing(tmp_path))
        trainer.close()
        return trainer.epoch

    assert trained(epochs=2) == 2
    assert trained(epochs=50) == 3
    assert trained(epochs=50) == 3
