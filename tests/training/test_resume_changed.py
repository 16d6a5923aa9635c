"""Going on from a checkpoint with other settings: refused in one line with both values, or taken and told.

Each was used, or left out, without a word.
"""

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import TensorDataset

from hybridpipe import Plan, StageSpec
from hybridpipe.checkpoint.directory import read_manifest
from hybridpipe.checkpoint.manifest import MANIFEST, to_text
from hybridpipe.checkpoint.policy import Checkpointing
from hybridpipe.errors import UserError
from hybridpipe.optim import update
from tests.training.helpers import seeded, seeded_mlp

pytestmark = pytest.mark.usefixtures("quick")

cross_entropy = nn.functional.cross_entropy
WAY_ROUND = r"; --resume-changed, or trainer.resume\(folder, allow_changed=True\), uses the training's$"


def sgd(lr: float = 0.1, **options):
    return partial(torch.optim.SGD, lr=lr, momentum=0.9, **options)


def step_lr(step_size: int, gamma: float = 0.5):
    return partial(StepLR, step_size=step_size, gamma=gamma)


def data(num_samples: int = 40, seed: int = 2) -> TensorDataset:
    return seeded(num_samples, seed)


@pytest.fixture
def make(make_trainer):
    def trainer(optimizer=None, schedule="1f1b", **options):
        count = 1 if schedule == "pipedream" else 4
        plan = Plan((StageSpec(0, 3),), schedule, num_microbatches=count)
        given = {"loss": cross_entropy, "optimizer": optimizer or sgd(), "plan": plan, "minibatch_size": 8}
        return make_trainer(seeded_mlp(), **(given | options))

    return trainer


def saved(make, folder: Path, **options) -> Path:
    """After one epoch, of five minibatches."""
    trainer = make(**options)
    trainer.fit(data(), shuffle=False)
    return trainer.save(folder)


@pytest.mark.parametrize("every", [None, 5, 3])
def test_another_epoch_is_another_epoch_wherever_the_last_checkpoint_lies(make, tmp_path, every):
    """With one at the end of the epoch, before its validation, the next fit trained nothing."""
    first = make()
    first.fit(data(), 2, shuffle=False, checkpoint=Checkpointing(tmp_path, every))
    second = make()
    second.resume(tmp_path)
    assert (second.step, second.epoch) == (10, 2)  # as soon as it is resumed
    second.fit(data(), 1, shuffle=False)
    assert (second.step, second.epoch, len(second.history)) == (15, 3, 3)


@pytest.fixture
def make_by_name(make_trainer):
    """Trainers whose plan waits for the first minibatch, as their model's forward must be recorded."""

    class Recorded(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = seeded_mlp()

        def forward(self, x):
            return self.layers(x)

    def trainer(lr=0.1):
        plan = Plan((StageSpec(0, 2),), num_microbatches=4)
        options = {"loss": cross_entropy, "optimizer": sgd(lr), "plan": plan, "minibatch_size": 8}
        return make_trainer(Recorded(), **options)

    return trainer


def test_what_is_refused_later_is_refused_each_time(make_by_name, tmp_path):
    """The second fit trained from scratch, without a word."""
    first = make_by_name()
    first.fit(data(), shuffle=False)
    first.save(tmp_path)
    second = make_by_name(lr=0.04)
    second.resume(tmp_path)
    assert (second.step, second.epoch) == (5, 1)
    for _ in range(2):
        with pytest.raises(UserError, match=r"lr: the training has 0\.04, the checkpoint 0\.1"):
            second.fit(data(), shuffle=False)


def in_plain_pytorch(first, then, schedulers) -> nn.Sequential:
    """One epoch with each optimizer: the second has the state of the first, and a schedule of its own."""
    model, state, num_steps = seeded_mlp(), {}, 0
    for make, schedule in zip((first, then), schedulers, strict=True):
        optimizer = make(model.parameters())
        optimizer.state.update(state)
        scheduler = schedule(optimizer) if schedule else None
        for _ in range(num_steps if scheduler else 0):
            scheduler.step()
        for start in range(0, 40, 8):
            inputs, targets = data()[start : start + 8]
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            num_steps += 1
            if scheduler:
                scheduler.step()
        state = optimizer.state
    return model


CHANGES = {
    "lr": ((sgd(), sgd(0.01)), (None, None), "optimizer: lr: the training has 0.01, the checkpoint 0.1"),
    "lr under a schedule": (
        (sgd(), sgd(0.04)),
        (step_lr(3), step_lr(3)),
        "optimizer: lr: the training has 0.04, the checkpoint 0.1",
    ),
    "weight decay": (
        (sgd(), sgd(weight_decay=0.1)),
        (None, None),
        "optimizer: weight_decay: the training has 0.1, the checkpoint 0",
    ),
    "step size": (
        (sgd(), sgd()),
        (step_lr(3), step_lr(2)),
        "lr_scheduler: step_size: the training has 2, the checkpoint 3",
    ),
    "a schedule": (
        (sgd(), sgd()),
        (None, step_lr(3)),
        "lr_scheduler: the training has 'torch.optim.lr_scheduler.StepLR', the checkpoint 'none'",
    ),
    "no schedule": (
        (sgd(), sgd()),
        (step_lr(3), None),
        "lr_scheduler: the training has 'none', the checkpoint 'torch.optim.lr_scheduler.StepLR'",
    ),
    "another schedule": (
        (sgd(), sgd()),
        (step_lr(3), partial(CosineAnnealingLR, T_max=20)),
        "lr_scheduler: the training has 'torch.optim.lr_scheduler.CosineAnnealingLR', "
        "the checkpoint 'torch.optim.lr_scheduler.StepLR'",
    ),
}


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
@pytest.mark.parametrize("what", CHANGES)
def test_another_rate_or_schedule(make, tmp_path, capsys, what, schedule):
    (first, then), (before, after), told = CHANGES[what]
    checkpoint = saved(make, tmp_path, optimizer=first, lr_scheduler=before, schedule=schedule)
    trainer = make(optimizer=then, lr_scheduler=after, schedule=schedule)
    weights = copy.deepcopy(trainer.full_state_dict())
    with pytest.raises(UserError, match=WAY_ROUND) as refused:
        trainer.resume(checkpoint)
    assert f"{checkpoint}: {told};" in str(refused.value) and "\n" not in str(refused.value)
    assert all(torch.equal(tensor, weights[key]) for key, tensor in trainer.full_state_dict().items())
    assert trainer.step == 0 and not capsys.readouterr().err
    trainer = make(optimizer=then, lr_scheduler=after, schedule=schedule)
    trainer.resume(checkpoint, allow_changed=True)
    assert capsys.readouterr().err == f"hybridpipe: resuming with changed settings: {told}\n"
    trainer.fit(data(), shuffle=False)
    expected = in_plain_pytorch(first, then, (before, after)).state_dict()
    torch.testing.assert_close(trainer.full_state_dict(), dict(expected), rtol=0, atol=1e-12)
    trainer.save(tmp_path / "then")  # from now on these are the settings
    make(optimizer=then, lr_scheduler=after, schedule=schedule).resume(tmp_path / "then")
    assert not capsys.readouterr().err


def weighted(weight: float):
    return lambda outputs, targets: weight * cross_entropy(outputs, targets)


SETTINGS = {
    "clipping": (
        {},
        {"clip_grad_norm": 0.5},
        "clip_grad_norm: the training has '0.5', the checkpoint 'None'",
    ),
    "compression": ({}, {"compression": "fp16"}, "compression: the training has"),
    "an option of the loss": (
        {"loss": nn.CrossEntropyLoss()},
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
        "loss: the training has",
    ),
    "another loss": (
        {},
        {"loss": nn.functional.multi_margin_loss},
        "loss: the training has 'multi_margin_loss'",
    ),
    "a number in the loss": ({"loss": weighted(1.0)}, {"loss": weighted(2.0)}, "loss: the training has"),
    "code of the loss": (
        {"loss": lambda outputs, targets: cross_entropy(outputs, targets)},
        {"loss": lambda outputs, targets: cross_entropy(-outputs, targets)},
        "loss: the training has",
    ),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_another_setting(make, tmp_path, capsys, what):
    before, after, told = SETTINGS[what]
    checkpoint = saved(make, tmp_path, **before)
    make(**before).resume(checkpoint)
    with pytest.raises(UserError, match=f"{told}.*{WAY_ROUND}"):
        make(**after).resume(checkpoint)
    assert not capsys.readouterr().err
    make(**after).resume(checkpoint, allow_changed=True)
    assert told in capsys.readouterr().err


def test_other_frozen_parameters(make, tmp_path):
    checkpoint = saved(make, tmp_path)
    trainer = make()
    trainer.model[0].requires_grad_(False)
    told = "frozen parameters: the training has '0.weight, 0.bias', the checkpoint 'none'"
    with pytest.raises(UserError, match=told):
        trainer.resume(checkpoint)
    trainer.resume(checkpoint, allow_changed=True)
    trainer.fit(data(), shuffle=False)


@pytest.mark.parametrize(
    "other, told",
    [
        (data(seed=3), r"(inputs|target) of dataset\[0\]: the training has"),
        (data(48), r"len\(dataset\): the training has '48', the checkpoint '40'"),
    ],
    ids=["of the same size", "longer"],
)
def test_another_data_set(make, tmp_path, capsys, other, told):
    checkpoint = saved(make, tmp_path)
    trainer = make()
    trainer.resume(checkpoint)
    trainer.evaluate(other)  # which is not trained on
    with pytest.raises(UserError, match=told):
        trainer.fit(other)
    trainer = make()
    trainer.resume(checkpoint, allow_changed=True)
    capsys.readouterr()
    trainer.fit(other)
    assert "resuming with changed settings: " in capsys.readouterr().err
    trainer.fit(data())  # only what comes first after a checkpoint is to be its own


def test_an_option_that_only_one_version_of_torch_has_is_nothing_changed(make, tmp_path, monkeypatch):
    of = update.Given.of

    def with_fewer(optimizer):
        options = [dict(group) for group in of(optimizer).options]
        for group in options:
            del group["maximize"]
        return update.Given(options)

    with monkeypatch.context() as patched:
        patched.setattr(update.Given, "of", with_fewer)
        checkpoint = saved(make, tmp_path)
    make().resume(checkpoint)


def test_a_checkpoint_of_an_older_version_says_nothing(make, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(update.Given, "of", lambda _: update.Given())
        checkpoint = saved(make, tmp_path)
    manifest = read_manifest(checkpoint)
    run = {name: value for name, value in manifest.run.items() if name not in ("settings", "data")}
    (checkpoint / MANIFEST).write_text(to_text(replace(manifest, run=run)))
    trainer = make(optimizer=sgd(0.01), clip_grad_norm=0.5)
    trainer.resume(checkpoint)
    trainer.fit(data(seed=3))
