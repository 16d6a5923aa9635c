"""EMA: the average is that of torch's AveragedModel, validates, and goes where the optimizer's state goes."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hybridpipe import Checkpointing
from hybridpipe.callbacks import EMA
from hybridpipe.optim.fused import fused
from tests.training.helpers import assert_same_weights, cross_entropy, momentum, seeded, seeded_mlp

pytestmark = pytest.mark.usefixtures("quick")
ADAM = partial(torch.optim.AdamW, lr=0.01)
PLAIN = partial(torch.optim.SGD, lr=0.1)


def averaged(model: nn.Module, optimizer, samples, epochs: int, size: int = 8) -> nn.Module:
    """The reference: train in plain PyTorch, and return torch's average."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    update = optimizer(model.parameters())
    for start in [*range(0, len(samples), size)] * epochs:
        inputs, targets = samples[start : start + size]
        update.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        update.step()
        average.update_parameters(model)
    return average.module


@pytest.mark.parametrize("optimizer", [PLAIN, momentum, ADAM])
def test_the_average_is_torchs(make, optimizer):
    model, samples = seeded_mlp(), seeded(24)
    reference = copy.deepcopy(model)
    trainer = make(model, optimizer=optimizer, callbacks=[EMA(0.9, at_end=True)])
    trainer.fit(samples, 2, shuffle=False)
    assert_same_weights(model, averaged(reference, optimizer, samples, 2))


def test_validations_see_the_average_and_the_training_does_not(make):
    samples, validation = seeded(16), seeded(8, seed=3)
    plain, trainer = make(seeded_mlp()), make(seeded_mlp(), callbacks=[EMA(0.9)])
    plain.fit(samples, 2, shuffle=False)
    history = trainer.fit(samples, 2, shuffle=False, validation=validation)
    assert_same_weights(trainer.model, plain.model)
    average = averaged(seeded_mlp(), momentum, samples, 2)
    inputs, targets = validation[:]
    assert history[-1]["validation"]["loss"] == pytest.approx(cross_entropy(average(inputs), targets).item())


def test_a_resumed_average_goes_on(make, tmp_path):
    samples = seeded(24)

    def trained(epochs):
        trainer = make(seeded_mlp(), optimizer=ADAM, callbacks=[EMA(0.9, at_end=epochs == 2)])
        trainer.resume(tmp_path, or_anew=True)
        trainer.fit(samples, epochs - trainer.epoch, shuffle=False, checkpoint=Checkpointing(tmp_path))
        trainer.close()
        return trainer.model

    trained(epochs=1)
    assert_same_weights(trained(epochs=2), averaged(seeded_mlp(), ADAM, samples, 2))


def test_averages_that_a_training_without_them_has_left_are_dropped(make, tmp_path):
    """They stood still meanwhile, and would have counted as if they had not."""
    samples = seeded(24)
    for callbacks in ([EMA(0.9)], [], [EMA(0.9, at_end=True)]):
        trainer = make(seeded_mlp(), optimizer=PLAIN, callbacks=callbacks)
        trainer.resume(tmp_path, or_anew=True)
        trainer.fit(samples, 1, shuffle=False, checkpoint=Checkpointing(tmp_path))
        trainer.close()
    reference = seeded_mlp()
    averaged(reference, PLAIN, samples, 2)
    assert trainer.epoch == 3
    assert_same_weights(trainer.model, averaged(reference, PLAIN, samples, 1))


class Changing(nn.Module):
    """Uses its second layer from the third call on, or until it."""

    def __init__(self, uses_it):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.calls = nn.Linear(4, 3).double(), nn.Linear(3, 3).double(), 0
        self.uses_it = uses_it

    def forward(self, inputs):
        self.calls += 1
        outputs = self.first(inputs)
        return outputs + self.second(outputs) if self.uses_it(self.calls) else outputs


@pytest.mark.parametrize("optimizer", [PLAIN, momentum, ADAM])
@pytest.mark.parametrize("uses_it", [lambda calls: calls > 2, lambda calls: calls < 3])
def test_a_parameter_that_is_used_at_times_is_averaged_at_all(uses_it, optimizer):
    """A fused step leaves parameters without a gradient out; their averages used to stand still."""
    model, average, samples = Changing(uses_it), EMA(0.9), seeded(40)
    reference = copy.deepcopy(model)
    expected = averaged(reference, optimizer, samples, 1)
    update = optimizer(model.parameters())
    run = SimpleNamespace(optimizer=update, gather_weights=lambda: None, num_groups=1)
    average.on_fit_start(run)
    for start in range(0, 40, 8):
        inputs, targets = samples[start : start + 8]
        update.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        with fused(update):
            update.step()
    with average.evaluating(run):
        assert_same_weights(model, expected)
    assert_same_weights(model, reference)


@pytest.mark.parametrize("decay", [-0.1, 1, 2.0])
def test_a_decay_out_of_range_is_named(decay):
    with pytest.raises(ValueError, match=f"decay must be a number >= 0 and < 1, got {decay}"):
        EMA(decay)
