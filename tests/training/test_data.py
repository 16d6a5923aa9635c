"""Data sets of dicts, DataLoaders and data sets that are iterated, under a trainer."""

from collections import UserDict

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from hybridpipe import Checkpointing
from tests.thinned import thinned
from tests.training.helpers import cross_entropy, momentum, seeded, seeded_mlp, whole
from tests.training.test_any_model import (
    Texts,
    batch,
    loss_of_logits,
    own_loss,
    part_of,
    plan,
    reference,
    texts,
)


def samples(count: int) -> list[dict]:
    whole_set = batch(count)
    return [{name: tensor[i] for name, tensor in whole_set.items()} for i in range(count)]


@pytest.fixture
def make_texts(make_trainer):
    def make(model=None, **options):
        given = {"loss": own_loss, "optimizer": momentum, "minibatch_size": 8}
        given["plan"] = plan(texts(), batch(2), 4)
        return make_trainer(model or texts(), **(given | options))

    return make


def test_a_data_set_of_dicts_trains_a_model_that_computes_its_own_loss(make_texts):
    model, expected = texts(dropout=0.3), texts(dropout=0.3)
    losses = reference(expected, [part_of(batch(20), i, i + 8) for i in (0, 8, 16)], size=2)
    right = {"right": lambda o, t: ((o["logits"].argmax(2) == t["labels"]).sum(), t["labels"].numel())}
    trainer, seen = make_texts(model, metrics=right), []
    (entry,) = trainer.fit(
        samples(20), shuffle=False, validation=samples(10), on_minibatch=lambda r: seen.append(r.loss)
    )
    assert seen == pytest.approx(losses, abs=1e-10)
    held_out = batch(10)
    outputs = expected.eval()(**held_out)
    assert entry["validation"] == pytest.approx(
        {
            "loss": outputs["loss"].item(),
            "right": (outputs["logits"].argmax(2) == held_out["labels"]).double().mean().item(),
        },
        abs=1e-10,
    )


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_asynchronous_schedules_train_a_model_of_one_stage(make_texts, schedule):
    trainer = make_texts(plan=plan(texts(), batch(2), 1 if schedule == "pipedream" else 4, schedule))
    first, last = (entry["loss"] for entry in trainer.fit(samples(32), 2))
    assert last < first and list(trainer.full_state_dict()) == list(Texts().state_dict())


def test_a_data_loader_trains_as_the_data_set_in_it(make):
    data = seeded(20)
    plain, loaded = make(seeded_mlp()), make(seeded_mlp())
    assert [e["loss"] for e in plain.fit(data, 2)] == [
        e["loss"] for e in loaded.fit(DataLoader(data, batch_size=8, shuffle=True, num_workers=1), 2)
    ]
    dropped = make(seeded_mlp())
    dropped.fit(DataLoader(data, batch_size=8, drop_last=True), validation=DataLoader(data))
    assert dropped.step == 2
    with pytest.raises(ValueError, match="with batch_size = 4, and minibatch_size = 8"):
        dropped.fit(DataLoader(data, batch_size=4))


def padded(some: list[dict]) -> dict:
    """Cut the text at its longest mask: another length in each microbatch."""
    longest = max(int(each["attention_mask"].sum()) for each in some) or 1
    return {name: torch.stack([each[name][:longest] for each in some]) for name in some[0]}


def test_a_collate_fn_pads_each_microbatch_for_itself(make_texts):
    trainer, lengths = make_texts(collate_fn=padded), []

    def note(_, args):
        if type(args[0]) is torch.Tensor:  # a recording has others
            lengths.append(args[0].shape[2])

    trainer.model.norm.register_forward_pre_hook(note)
    data = samples(8)
    trainer.fit(data, shuffle=False)
    assert lengths == [padded(data[i : i + 2])["input_ids"].shape[1] for i in range(0, 8, 2)]
    with pytest.raises(TypeError, match="collate_fn must be a function of a list of samples, got 3"):
        make_texts(collate_fn=3)


def test_a_step_takes_the_batches_that_fit_takes(make_texts):
    """A tokenizer of transformers returns a UserDict, which only a data set could hold."""
    plain, wrapped = make_texts(), make_texts()
    whole_set = batch(8)
    loss = plain.train_step(whole_set, whole_set)
    assert wrapped.train_step(UserDict(whole_set), UserDict(whole_set)) == loss
    nested = wrapped.train_step(UserDict(whole_set), (UserDict(labels=UserDict(whole_set)), None))
    assert nested == plain.train_step(whole_set, whole_set)


class Stream(IterableDataset):
    """The same samples as `seeded(count)`, and noise."""

    def __init__(self, count):
        self.samples = [*seeded(count)]

    def __iter__(self):
        for inputs, target in self.samples:
            yield inputs + 0.1 * torch.randn(4), target


class Stateful(Stream):
    at = 0

    def __iter__(self):
        while self.at < len(self.samples):
            inputs, target = self.samples[self.at]
            self.at += 1
            yield inputs + 0.1 * torch.randn(4), target
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.fixture
def make(make_trainer):
    def make(model=None, **options):
        given = {"loss": cross_entropy, "optimizer": momentum, "plan": whole(), "minibatch_size": 8}
        return make_trainer(model or seeded_mlp(), **(given | options))

    return make


class Exact(Stream):
    """`Stream` without noise."""

    def __iter__(self):
        return iter(self.samples)


def test_a_data_set_that_is_iterated_trains_and_is_evaluated_on(make):
    indexed, iterated = make(), make()
    expected = indexed.fit(seeded(21), 2, shuffle=False, validation=seeded(10))
    found = iterated.fit(Exact(21), 2, validation=Exact(10))
    for entry in (*expected, *found):
        del entry["seconds"]
    assert found == expected and iterated.step == 6


@pytest.mark.parametrize("stopped_at, kind", thinned([2, 3], [Stream, Stateful], together=1))
def test_a_data_set_that_is_iterated_resumes_exactly(make, tmp_path, kind, stopped_at):
    """Three minibatches are an epoch, the last one short."""
    without_end, first, second = make(), make(), make(nn.Sequential(*seeded_mlp()))
    expected = without_end.fit(kind(20), 2)
    first.stop_from(stopped_at)
    first.fit(kind(20), 2, checkpoint=Checkpointing(tmp_path, every=1))
    assert first.step == stopped_at
    second.resume(tmp_path)
    second.fit(kind(20), 2 if stopped_at == 2 else 1)  # an epoch that is only ended does not count
    assert second.step == 6
    assert [e["loss"] for e in second.history] == [e["loss"] for e in expected]
    for key, tensor in without_end.full_state_dict().items():
        assert torch.equal(second.full_state_dict()[key], tensor)


def test_an_epoch_that_ends_with_a_full_minibatch_resumes_at_its_end(make, tmp_path):
    without_end, stopped, resumed = make(), make(), make()
    expected = [entry["loss"] for entry in without_end.fit(Stateful(16), 3)]
    data = Stateful(16)
    stopped.stop_from(2)
    stopped.fit(data, 3, checkpoint=Checkpointing(tmp_path, every=1))
    assert stopped.step == 2
    stopped.fit(data, 2)  # an epoch that is only ended does not count
    resumed.resume(tmp_path)
    resumed.fit(data, 2)  # it is alike, wherever the first training left it
    for trainer in (stopped, resumed):
        assert trainer.step == 6 and [entry["loss"] for entry in trainer.history] == expected


def test_data_sets_that_leave_nothing_are_refused(make):
    few = DataLoader(seeded(5), batch_size=8, drop_last=True)
    with pytest.raises(ValueError, match="holds fewer samples than a minibatch, 8, and drop_last drops them"):
        make().fit(few)
    with pytest.raises(
        ValueError, match="validation is a DataLoader with drop_last, which would leave samples"
    ):
        make().fit(seeded(8), validation=few)


def test_a_stopped_epoch_goes_on_in_the_same_process(make):
    whole_run, stopped = make(), make()
    expected = whole_run.fit(Stateful(20))
    data = Stateful(20)
    stopped.stop_from(2)
    stopped.fit(data)
    assert stopped.step == 2 and not stopped.history
    (entry,) = stopped.fit(data)
    assert entry["loss"] == expected[0]["loss"]


def test_what_an_iterated_data_set_cannot_do_is_refused(make):
    with pytest.raises(ValueError, match=r"pipedream-2bw needs the number of minibatches of an epoch, which"):
        make(plan=whole(schedule="pipedream-2bw")).fit(Stream(8))
    with pytest.raises(ValueError, match=r"dataset is an IterableDataset, .* leave num_workers = 1 out"):
        make(num_workers=1).fit(Stream(8))
    with pytest.raises(ValueError, match="dataset must hold at least one sample, got none"):
        make().fit(Stream(0))


def test_a_loss_of_outputs_and_the_dict_trains_as_the_models_own_does(make_texts):
    own, outside = make_texts(), make_texts(loss=loss_of_logits)
    assert [e["loss"] for e in own.fit(samples(16))] == pytest.approx(
        [e["loss"] for e in outside.fit(samples(16))], abs=1e-12
    )
