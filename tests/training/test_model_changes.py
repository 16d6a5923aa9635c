"""The model is what it is when it is used, not what it was when the trainer was made; one rank.

tests/mpi/programs/as_it_is.py tells the same stories on two. Each was silent once.
"""

import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hybridpipe import Plan, StageSpec
from tests.training.helpers import seeded, seeded_mlp

cross_entropy = nn.functional.cross_entropy
decaying = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)

pytestmark = pytest.mark.usefixtures("quick")


def data(num_samples: int = 19) -> TensorDataset:
    return seeded(num_samples)


@pytest.fixture
def make(make_trainer):
    def trainer(model, schedule="1f1b", recompute=False, loss=cross_entropy, **options):
        count = 1 if schedule == "pipedream" else 4
        plan = Plan((StageSpec(0, len(model)),), schedule, num_microbatches=count, recompute=recompute)
        given = {"optimizer": decaying, "plan": plan, "minibatch_size": 8}
        return make_trainer(model, loss=loss, **(given | options))

    return trainer


class Loop:
    """Plain PyTorch."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, decaying(model.parameters())

    def fit(self, dataset: TensorDataset) -> None:
        inputs, targets = dataset.tensors
        for start in range(0, len(targets), 8):
            self.optimizer.zero_grad()
            cross_entropy(self.model(inputs[start : start + 8]), targets[start : start + 8]).backward()
            self.optimizer.step()


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    state = model.state_dict()
    torch.testing.assert_close(dict(state), dict(expected.state_dict()), rtol=0, atol=1e-12)


def leave_gradients(model: nn.Module) -> None:
    model(torch.ones(3, 4).double()).sum().backward()


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_gradients_that_were_left_in_the_model_count_for_nothing(make, schedule):
    model = seeded_mlp()
    leave_gradients(model)
    loop, trainer = Loop(copy.deepcopy(model)), make(model, schedule)
    for _ in range(2):
        trainer.fit(data(), shuffle=False)
        loop.fit(data())
        leave_gradients(model)
    assert_same(model, loop.model)
    if schedule == "1f1b":
        trainer.train_step(*data()[:8])
        loop.fit(TensorDataset(*data()[:8]))
        assert_same(model, loop.model)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "pipedream"])
def test_what_is_trained_may_change_between_two_fits(make, schedule):
    """A layer that was unfrozen was not trained; one that was frozen kept what autograd left it."""
    model = seeded_mlp()
    model[0].requires_grad_(False)
    loop, trainer = Loop(copy.deepcopy(model)), make(model, schedule)
    for layer, is_trained in [(0, False), (0, True), (2, False), (2, True)]:
        for each in (model, loop.model):
            each[layer].requires_grad_(is_trained)
        before = copy.deepcopy(model[layer].weight)
        trainer.fit(data(), shuffle=False)
        loop.fit(data())
        assert_same(model, loop.model)
        assert torch.equal(model[layer].weight, before) != is_trained


def test_train_step_sees_what_is_trained_now(make):
    model = seeded_mlp()
    trainer = make(model)
    trainer.train_step(*data()[:8])
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    trainer.train_step(*data()[8:16])
    assert torch.equal(model[0].weight, before)


def normalised() -> nn.Sequential:
    torch.manual_seed(1)
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)
    return nn.Sequential(*layers).double()


def test_modes_are_as_the_user_left_them(make):
    model = normalised()
    model[1].eval()
    trainer = make(model)
    trainer.fit(data(20), validation=data(20))
    assert [module.training for module in model] == [True, False, True, True]
    assert model[1].num_batches_tracked == 0
    model[1].train()
    trainer.fit(data(20), validation=data(20))
    trainer.evaluate(data(20))
    assert [module.training for module in model] == [True] * 4
    assert model[1].num_batches_tracked == 20 // 2  # microbatches


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_norm_that_was_frozen_first_is_recomputed_rightly_later(make, schedule):
    """Which buffers a forward changes was found out once: its statistics were updated twice."""
    models = [normalised() for _ in range(2)]
    for model, recompute in zip(models, (False, True), strict=True):
        model[1].eval()
        trainer = make(model, schedule, recompute)
        trainer.fit(data(20))
        model[1].train()
        trainer.fit(data(20))
    assert_same(*models)


def test_a_model_that_is_all_in_evaluation_mode_is_told(make, capsys):
    model = normalised().eval()
    make(model).fit(data())
    assert "the whole model is in evaluation mode and is trained in it" in capsys.readouterr().err
    assert model[1].num_batches_tracked == 0


def test_hooks_on_the_model_itself_are_refused(make):
    trainer = make(model := seeded_mlp())
    trainer.fit(data())
    hook = model.register_forward_hook(lambda *_: None)
    for work in (lambda: trainer.fit(data()), lambda: trainer.train_step(*data()[:8])):
        with pytest.raises(ValueError, match=r"must have no hooks.*got forward hooks"):
            work()
    hook.remove()
    trainer.fit(data())


def test_hooks_on_layers_are_called(make):
    calls = []
    trainer = make(model := seeded_mlp())
    trainer.train_step(*data()[:8])
    model[1].register_forward_hook(lambda *_: calls.append(1))
    trainer.train_step(*data()[:8])
    assert len(calls) == 4


def test_a_model_with_nothing_to_train_is_refused(make):
    trainer = make(seeded_mlp().requires_grad_(False))
    trainer.evaluate(data())
    with pytest.raises(ValueError, match="nothing to train: no parameter has requires_grad"):
        trainer.fit(data())


def replace_layer(model):
    model[2] = nn.Linear(6, 3).double()


def replace_parameter(model):
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


@pytest.mark.parametrize(
    "change",
    [replace_layer, replace_parameter, lambda model: model.float()],
    ids=["layer", "weight", "dtype"],
)
def test_other_layers_parameters_or_dtypes_are_refused(make, change):
    """The trainer went on with those that it had."""
    trainer = make(model := seeded_mlp())
    trainer.fit(data())
    change(model)
    for work in (lambda: trainer.fit(data()), lambda: trainer.evaluate(data())):
        with pytest.raises(ValueError, match="than when the trainer was made: make a new Trainer"):
            work()


@pytest.mark.parametrize("name", ["model", "loss", "seed", "minibatch_size", "device", "rule"])
def test_what_a_trainer_was_made_with_cannot_be_assigned(make, name):
    with pytest.raises(AttributeError, match=f"{name} of a Trainer cannot be changed"):
        setattr(make(seeded_mlp()), name, 3)


def test_autocast_around_the_trainer_is_refused(make):
    """The weights that it casts are kept until it ends, so that updates were not seen."""
    trainer = make(seeded_mlp())
    for work in (trainer.fit, trainer.evaluate, lambda samples: trainer.train_step(*samples[:8])):
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(RuntimeError, match=r"inside torch\.autocast"),
        ):
            work(data())


def test_training_under_no_grad_is_refused(make):
    trainer = make(seeded_mlp())
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"fit must not be called under torch.no_grad"):
            trainer.fit(data())
        trainer.evaluate(data())


def test_fit_between_no_sync_and_its_update_is_refused(make):
    trainer = make(seeded_mlp())
    with trainer.no_sync():
        trainer.train_step(*data()[:8])
    with pytest.raises(ValueError, match="before the update that follows"):
        trainer.fit(data())


class Drawing(nn.Module):
    def forward(self, x):
        return x * (torch.rand(()) + random.random() + np.random.random())


def test_evaluation_draws_the_same_numbers_each_time(make):
    """It drew from wherever the process's generators stood, and moved them."""
    trainer = make(nn.Sequential(nn.Linear(4, 3), Drawing(), Drawing()).double())
    before = random.getstate(), torch.get_rng_state().tolist()
    first = trainer.evaluate(data())
    assert before == (random.getstate(), torch.get_rng_state().tolist())
    random.random(), torch.rand(3), np.random.random()
    assert trainer.evaluate(data()) == first
