"""Losses that return (sum, weight), through a Trainer in a world of one rank; tests/mpi has the others."""

import copy
import math
from functools import partial

import pytest
import torch
from torch.utils.data import TensorDataset

from hybridpipe import Checkpointing
from hybridpipe.optim.nonfinite import NotFinite
from tests.training.helpers import (
    assert_same_weights,
    cross_entropy,
    data,
    mlp,
    plain_loop,
    seeded_mlp,
    whole,
)

pytestmark = pytest.mark.usefixtures("quick")
IGNORED = -100


def counted(outputs, targets):
    """Sum over the targets that are not ignored, and their number."""
    return cross_entropy(outputs, targets, reduction="sum"), (targets != IGNORED).sum()


def samples(num_samples: int = 19) -> TensorDataset:
    """Make data whose third microbatch of two samples has no target."""
    made = data(num_samples)
    made.tensors[1][[1, 4, 5, 9, 17]] = IGNORED
    return made


def batches(dataset: TensorDataset, size: int = 8):
    return [dataset[start : start + size] for start in range(0, len(dataset), size)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_train_step_returns_the_mean_over_all_that_counts(make, schedule):
    model, cut = mlp(), batches(samples())
    reference = copy.deepcopy(model)
    trainer = make(model, loss=counted, plan=whole(schedule=schedule))
    losses = [trainer.train_step(*batch) for batch in cut]
    assert losses == pytest.approx(plain_loop(reference, cut), rel=0, abs=1e-12)
    assert_same_weights(model, reference)


@pytest.mark.parametrize("schedule, count", [("1f1b", 4), ("pipedream", 1), ("pipedream-2bw", 1)])
def test_the_history_counts_minibatches_by_their_weights(make, schedule, count):
    """As an evaluation does; the weights stay as they are, so that both see the same model."""
    dataset, records = samples(), []
    model = mlp()
    plan, still = whole(count, schedule=schedule), partial(torch.optim.SGD, lr=0.0)
    trainer = make(model, loss=counted, plan=plan, optimizer=still)
    (entry,) = trainer.fit(dataset, validation=dataset, shuffle=False, on_minibatch=records.append)
    expected = cross_entropy(model(dataset.tensors[0]), dataset.tensors[1]).item()
    assert entry["loss"] == pytest.approx(expected, rel=0, abs=1e-12)
    assert entry["validation"]["loss"] == pytest.approx(expected, rel=0, abs=1e-12)
    assert trainer.evaluate(dataset) == entry["validation"]
    of_minibatches = [cross_entropy(model(x), y).item() for x, y in batches(dataset)]
    assert [record.loss for record in records] == pytest.approx(of_minibatches, rel=0, abs=1e-12)


def test_a_resumed_epoch_has_the_same_history(make, tmp_path):
    dataset = samples(40)
    (expected,) = make(seeded_mlp(), loss=counted).fit(dataset)
    first = make(seeded_mlp(), loss=counted)
    first.stop_from(3)
    first.fit(dataset, checkpoint=Checkpointing(tmp_path))
    first.close()
    second = make(seeded_mlp(), loss=counted)
    second.resume(tmp_path)
    (entry,) = second.fit(dataset)
    assert second.step == 5 and entry["loss"] == expected["loss"]


def test_a_plan_by_name_is_made_with_such_a_loss(make):
    """Layers are measured on the first microbatch, which has no target here."""
    dataset = samples()
    dataset.tensors[1][:8] = IGNORED
    trainer = make(loss=counted, plan="auto", on_nonfinite="ignore")
    (entry,) = trainer.fit(dataset, shuffle=False)
    assert math.isfinite(entry["loss"])
    assert all(p.isfinite().all() for p in trainer.model.parameters())


@pytest.mark.parametrize("schedule, count", [("1f1b", 4), ("1f1b", 1), ("pipedream", 1)])
def test_a_minibatch_without_weight_has_no_loss(make, capsys, schedule, count):
    """ "ignore" makes an update of zero gradients, and "skip" none."""
    dataset = samples(24)
    dataset.tensors[1][8:16] = IGNORED

    def train(**options):
        records = []
        trainer = make(seeded_mlp(), loss=counted, plan=whole(count, schedule=schedule), **options)
        trainer.fit(dataset, shuffle=False, on_minibatch=records.append)
        assert [math.isnan(record.loss) for record in records] == [False, True, False]
        assert math.isfinite(trainer.history[0]["loss"])
        return trainer.model

    ignored = train(on_nonfinite="ignore")
    assert all(p.isfinite().all() for p in ignored.parameters())
    skipped = train(on_nonfinite="skip")
    told = "the loss of step 1 (stage 0) is not finite: nan, since the weights that it returned add up to 0"
    assert f"{told}; the update is skipped" in capsys.readouterr().err
    assert not torch.equal(ignored[0].weight, skipped[0].weight)  # momentum moved on
    with pytest.raises(NotFinite, match=r"the loss of step 1 \(stage 0\) is not finite: nan"):
        train()


def test_no_sync_is_refused(make):
    trainer = make(loss=counted)
    with (
        pytest.raises(ValueError, match=r"^no_sync makes no sense with a loss that returns"),
        trainer.no_sync(),
    ):
        trainer.train_step(*data(8)[:])


def test_several_microbatches_under_2bw_are_refused(make):
    trainer = make(loss=counted, plan=whole(4, schedule="pipedream-2bw"))
    with pytest.raises(ValueError, match=r"use microbatch_size = minibatch_size or a synchronous schedule$"):
        trainer.fit(data(16))


@pytest.mark.parametrize("first", [True, False])
def test_a_loss_that_returns_now_this_and_now_that_is_refused(make, first):
    kinds = iter([first, first, not first, first])

    def loss(outputs, targets):
        return counted(outputs, targets) if next(kinds) else cross_entropy(outputs, targets)

    trainer = make(loss=loss)
    with pytest.raises(ValueError, match=r"^loss must return the same kind for every microbatch"):
        trainer.train_step(*data(8)[:])


def test_an_evaluation_refuses_both_kinds_too(make):
    kinds = iter([True, False])

    def loss(outputs, targets):
        return counted(outputs, targets) if next(kinds) else cross_entropy(outputs, targets)

    with pytest.raises(ValueError, match=r"^loss must return the same kind for every microbatch"):
        make(loss=loss).evaluate(data(8))
