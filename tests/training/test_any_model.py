"""Models that are no `nn.Sequential`: recorded, called with trees, under schedules of one stage."""

import copy
import math
import multiprocessing
import types
import zlib
from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from hybridpipe import Callback, Plan, StageSpec
from hybridpipe.model.layers import layers_of
from hybridpipe.model.rng import random_key
from tests.libraries import skip_without_transformers
from tests.training.helpers import assert_same_weights, momentum


class Texts(nn.Module):
    """Classifies each token; takes keywords and returns a dict, as models of transformers do."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight  # tied

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.embed(input_ids)
        if attention_mask is not None:
            hidden = hidden * attention_mask.unsqueeze(-1)
        hidden = self.dropout(self.norm(hidden.transpose(1, 2)).transpose(1, 2))
        logits = self.head(hidden)
        loss = None if labels is None else nn.functional.cross_entropy(logits.transpose(1, 2), labels)
        return {"loss": loss, "logits": logits}


def texts(**options) -> Texts:
    torch.manual_seed(3)
    return Texts(**options).double()


def batch(num_samples: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 11, (num_samples, 5), generator=generator)
    mask = torch.randint(0, 2, (num_samples, 5), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.flip(1)}


def own_loss(outputs, _):
    return outputs["loss"]


def loss_of_logits(outputs, targets):
    return nn.functional.cross_entropy(outputs["logits"].transpose(1, 2), targets["labels"])


def part_of(tree: dict, start: int, stop: int) -> dict:
    return {name: tensor[start:stop] for name, tensor in tree.items()}


def plan(model: nn.Module, inputs, count: int, schedule: str = "1f1b", **options) -> Plan:
    whole = StageSpec(0, layers_of(model, inputs).num_layers)
    return Plan((whole,), schedule, num_microbatches=count, **options)


def reference(model, batches, size, seed=0) -> list[float]:
    """Train in one process on microbatches in order, seeded as the trainer seeds dropout."""
    update, losses = momentum(model.parameters()), []
    for step, whole in enumerate(batches):
        update.zero_grad()
        count, total = len(whole["labels"]), 0.0
        for m, start in enumerate(range(0, count, size)):
            part = part_of(whole, start, start + size)
            torch.manual_seed(random_key(seed, step, m, zlib.crc32(b"dropout 0")))
            loss = model(**part)["loss"] * (len(part["labels"]) / count)
            loss.backward()
            total += loss.item()
        update.step()
        losses.append(total)
    return losses


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_training_equals_one_process(make_trainer, schedule, recompute):
    model = texts(dropout=0.3)
    expected, batches = copy.deepcopy(model), [batch(8, 1), batch(7, 2)]
    losses = reference(expected, batches, size=2)
    given = plan(model, batch(2), 4, schedule, recompute=recompute)
    trainer = make_trainer(model, loss=own_loss, optimizer=momentum, plan=given, minibatch_size=8)
    assert [trainer.train_step(each, each) for each in batches] == pytest.approx(losses, abs=1e-10)
    assert_same_weights(model, expected)
    state = trainer.full_state_dict()
    assert list(state) == list(model.state_dict())
    for key, tensor in expected.state_dict().items():
        torch.testing.assert_close(state[key], tensor, rtol=0, atol=1e-10)


@pytest.mark.parametrize("plan_or_name", ["dp", "straight", "auto"])
def test_a_plan_by_name_measures_the_layers_of_the_record(make_trainer, quick, plan_or_name):
    trainer = make_trainer(
        texts(), loss=loss_of_logits, optimizer=momentum, plan=plan_or_name, minibatch_size=8
    )
    inputs = batch(8)
    trainer.train_step({"input_ids": inputs["input_ids"]}, {"labels": inputs["labels"]})
    assert [layer.name for layer in trainer.choice.profile.layers] == ["embed", "norm", "dropout", "head"]
    assert trainer.plan.num_layers == 4


class Own(torch.optim.SGD):
    """An optimizer that `zero` does not know, and tries."""


def test_an_optimizer_factory_is_given_names_wherever_it_is_called(make_trainer, quick):
    """It is called for the trial, for each layer that is measured, and for the stage; one weight is tied."""
    model, seen = texts(), []

    def by_name(named_parameters):
        seen.append([name for name, _ in named_parameters])
        groups = {0.1: [], 0.0: []}
        for name, parameter in named_parameters:
            groups[0.0 if name.startswith("norm.") else 0.1].append(parameter)
        return Own([{"params": each, "weight_decay": decay} for decay, each in groups.items()], lr=0.1)

    expected, inputs = copy.deepcopy(model), batch(8)
    given = {"plan": "auto", "zero": "auto", "minibatch_size": 8, "microbatch_size": 8}
    make_trainer(model, loss=own_loss, optimizer=by_name, **given).train_step(inputs, inputs)
    names = [name for name, _ in expected.named_parameters()]
    assert seen[-1] == names and ["norm.weight", "norm.bias"] in seen
    assert {name for each in seen for name in each} == {*names}
    update = by_name([*expected.named_parameters()])
    expected(**inputs)["loss"].backward()
    update.step()
    assert_same_weights(model, expected)


def test_inputs_by_position(make_trainer):
    model = nn.Bilinear(3, 2, 4).double()
    expected = copy.deepcopy(model)
    inputs, targets = (torch.randn(6, 3).double(), torch.randn(6, 2).double()), torch.randn(6, 4).double()
    options = {"loss": nn.functional.mse_loss, "optimizer": momentum, "minibatch_size": 6}
    loss = make_trainer(model, plan=plan(model, inputs, 3), **options).train_step(inputs, targets)
    whole = nn.functional.mse_loss(expected(*inputs), targets)
    whole.backward()
    momentum(expected.parameters()).step()
    assert loss == pytest.approx(whole.item(), abs=1e-12)
    assert_same_weights(model, expected)


def test_hooks_of_a_model_that_is_called_whole_run(make_trainer):
    model, called = nn.Bilinear(3, 2, 4), []
    model.register_forward_hook(lambda *_: called.append(1))
    trainer = make_trainer(
        model, loss=nn.functional.mse_loss, optimizer=momentum, plan="dp", minibatch_size=4, microbatch_size=2
    )
    inputs = torch.randn(4, 3), torch.randn(4, 2)
    trainer.train_step(inputs, torch.randn(4, 4))
    called.clear()
    trainer.train_step(inputs, torch.randn(4, 4))
    assert len(called) == 2


def test_a_data_set_of_another_shape_than_the_first_is_expected():
    """Stages that need no inputs would take its samples for those of the first."""
    layers = layers_of(texts(), batch(2))
    longer = {name: torch.cat([tensor, tensor], dim=1) for name, tensor in batch(3).items()}
    assert layers.expects(lambda: batch(3, seed=1)) and not layers.expects(lambda: longer)


def check_changes(make_trainer, model: nn.Module, path: str, attribute: str, values) -> None:
    """Train beside one process, with an attribute of a module set anew before each minibatch."""
    model = model.double()
    expected, inputs = copy.deepcopy(model), torch.randn(4, 8).double()
    update = momentum(expected.parameters())
    options = {"loss": nn.functional.mse_loss, "optimizer": momentum, "minibatch_size": 4}
    trainer = make_trainer(model, plan=plan(model, inputs[:2], 2), **options)
    for step, value in enumerate(values):
        for each in (model, expected):
            setattr(each.get_submodule(path), attribute, value)
        trainer.train_step(inputs, inputs)
        update.zero_grad()
        for m, part in enumerate(inputs.chunk(2)):
            torch.manual_seed(random_key(0, step, m, zlib.crc32(b"drop 0")))
            (nn.functional.mse_loss(expected(part), part) / 2).backward()
        update.step()
    assert_same_weights(model, expected)


class Tempered(nn.Module):
    """Divides by a plain attribute, which users change between epochs."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.temperature = nn.Linear(8, 8), nn.Linear(8, 8), 1.0

    def forward(self, value):
        return self.second(torch.tanh(self.first(value) / self.temperature))


def test_a_number_that_users_change_is_taken_up(make_trainer):
    """It stands in the record as a constant, which would be used for ever."""
    check_changes(make_trainer, Tempered(), "", "temperature", (1.0, 0.25))


class Drops(nn.Module):
    """Has a dropout that does nothing at first."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 8)

    def forward(self, value):
        return self.second(self.drop(self.first(value)))


def test_a_dropout_that_users_turn_on_drops(make_trainer):
    """Recorded with p = 0 it returned its input, so what it returns later was not looked at."""
    check_changes(make_trainer, Drops(), "drop", "p", (0.0, 0.5))


class Wanders(nn.Module):
    """Takes a path that its activations decide over."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, value):
        value = self.first(value)
        return self.second(value) if value.sum() > 0 else value


def test_a_model_that_cannot_be_recorded_is_one_layer(make_trainer):
    model, inputs = Wanders(), torch.randn(4, 3)
    expected = copy.deepcopy(model)
    whole = Plan((StageSpec(0, 1),))
    options = {"loss": nn.functional.mse_loss, "optimizer": momentum, "minibatch_size": 4}
    make_trainer(model, plan=whole, **options).train_step(inputs, inputs)
    nn.functional.mse_loss(expected(inputs), inputs).backward()
    momentum(expected.parameters()).step()
    assert_same_weights(model, expected)


def test_a_plan_that_cuts_it_is_refused():
    layers = layers_of(Wanders(), torch.randn(4, 3))
    told = r"the model has 1 layer: test_any_model.py:\d+: .* data that only one stage has .*; use plan='dp'"
    with pytest.raises(ValueError, match=told):
        layers.check_plan(Plan((StageSpec(0, 1), StageSpec(1, 2))))


@pytest.mark.parametrize("adam", [False, True])
def test_a_checkpoint_has_the_models_own_keys_and_goes_on(make_trainer, tmp_path, adam):
    optimizer = partial(torch.optim.Adam, lr=0.01) if adam else momentum
    batches = [batch(8, seed) for seed in range(4)]

    def trainer(model):
        given = {"loss": own_loss, "optimizer": optimizer, "minibatch_size": 8}
        given["plan"] = plan(model, batch(2), 4)
        return make_trainer(model, **given)

    without_end, first = trainer(texts()), trainer(texts())
    losses = [without_end.train_step(each, each) for each in batches]
    assert [first.train_step(each, each) for each in batches[:2]] == losses[:2]
    first.save(tmp_path)
    second = trainer(Texts().double())
    second.resume(tmp_path)
    assert [second.train_step(each, each) for each in batches[2:]] == losses[2:]
    for key, tensor in without_end.full_state_dict().items():
        assert torch.equal(second.full_state_dict()[key], tensor)


def hugging_face(name: str) -> nn.Module:
    skip_without_transformers()
    import transformers

    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
        small = transformers.GPT2Config(**sizes, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
        return transformers.GPT2LMHeadModel(small).double()
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    small = transformers.BertConfig(**sizes, **dropout, intermediate_size=16)
    return transformers.BertForTokenClassification(small).double()


@pytest.mark.parametrize("name, classes", [("gpt2", 11), ("bert", 2)])
def test_a_model_of_transformers_trains_as_it_is(make_trainer, tmp_path, name, classes):
    """With its tied embeddings; GPT-2 with the cache among its outputs, so as one layer."""
    model, expected = hugging_face(name).train(), hugging_face(name).train()
    batches = [each | {"labels": each["labels"] % classes} for each in (batch(8, 1), batch(8, 2))]
    losses = reference(expected, batches, size=2)
    options = {"loss": own_loss, "optimizer": momentum, "minibatch_size": 8}
    given = plan(model, part_of(batches[0], 0, 2), 4)
    trainer = make_trainer(model, plan=given, **options)
    assert [trainer.train_step(each, each) for each in batches] == pytest.approx(losses, abs=1e-10)
    state = trainer.full_state_dict()
    assert list(state) == list(expected.state_dict())
    for key, tensor in expected.state_dict().items():
        torch.testing.assert_close(state[key], tensor, rtol=0, atol=1e-10)
    trainer.save(tmp_path)
    again = make_trainer(hugging_face(name), plan=given, **options)
    again.resume(tmp_path)
    assert again.train_step(batches[0], batches[0]) == trainer.train_step(batches[0], batches[0])
    trained = trainer.full_state_dict()
    assert all(torch.equal(tensor, trained[key]) for key, tensor in again.full_state_dict().items())


class Settled(nn.Module):
    """Uses settings of all kinds between its modules."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.act, self.scales, self.shared = torch.tanh, deque([1.0]), multiprocessing.Value("d", 1.0)
        self.table, self.number = np.ones(8), np.float64(1)
        self.functions = {"last": partial(torch.mul, other=1.0)}

    def forward(self, x):
        x = self.act(self.first(x)) * self.scales[0] * self.shared.value * float(self.number)
        return self.functions["last"](self.last(x * float(self.table[0])))


def patch(model, factor):
    model.forward = types.MethodType(lambda self, x: factor * Settled.forward(self, x), model)


CHANGES = [
    lambda model: setattr(model, "act", torch.relu),
    lambda model: model.scales.appendleft(2.0),
    lambda model: setattr(model.shared, "value", 2.0),
    lambda model: model.table.__setitem__(0, 3.0),
    lambda model: setattr(model, "number", np.float64(2)),
    lambda model: model.functions.update(last=partial(torch.mul, other=2.0)),
    lambda model: patch(model, 2.0),
    lambda model: patch(model, 3.0),
]


def twin(model):
    made = Settled().double()
    made.load_state_dict(model.state_dict())
    return made


@pytest.mark.parametrize("by_callback", [False, True])
def test_settings_that_change_between_steps_are_those_of_the_next(make_trainer, by_callback):
    """Each was once unnoticed: the old record ran on. A callback's change was noticed by the next `fit`."""
    torch.manual_seed(0)
    model = Settled().double()
    expected = twin(model)
    update = momentum(expected.parameters())
    inputs, targets = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3
    left = iter([*CHANGES, lambda _: None])

    class Changes(Callback):
        def on_epoch_end(self, run, entry):
            next(left)(model)

    given = {"loss": nn.functional.cross_entropy, "optimizer": momentum, "minibatch_size": 8}
    trainer = make_trainer(model, plan=plan(model, inputs, 1), callbacks=[Changes()], **given)
    assert layers_of(model, inputs).num_layers == 2
    if by_callback:
        dataset = torch.utils.data.TensorDataset(inputs, targets)
        history = trainer.fit(dataset, epochs=len(CHANGES) + 1, shuffle=False)
        losses = [entry["loss"] for entry in history]
    else:
        losses = []
        for change in left:
            losses.append(trainer.train_step(inputs, targets))
            change(model)
    for loss, change in zip(losses, [*CHANGES, lambda _: None], strict=True):
        update.zero_grad()
        own = nn.functional.cross_entropy(expected(inputs), targets)
        own.backward()
        update.step()
        assert abs(loss - own.item()) < 1e-12
        change(expected)


def test_a_callback_changes_a_setting_within_an_epoch(make_trainer):
    model = Settled().double()
    given = {"loss": nn.functional.cross_entropy, "optimizer": momentum, "minibatch_size": 2}
    inputs, targets = torch.randn(8, 4, dtype=torch.float64), torch.zeros(8, dtype=torch.long)
    losses = []

    def take(record):
        losses.append(record.loss)
        model.functions["last"] = partial(torch.mul, other=0.0)

    trainer = make_trainer(model, plan=plan(model, inputs, 1), **given)
    trainer.fit(torch.utils.data.TensorDataset(inputs, targets), shuffle=False, on_minibatch=take)
    assert losses[0] != pytest.approx(math.log(3)) and losses[2:] == [pytest.approx(math.log(3))] * 2


def test_rank_0_names_what_cannot_be_watched(make_trainer, capsys):
    model = Settled().double()
    model.position, model.first.words = iter([1]), dict.fromkeys(range(2000))
    inputs, given = torch.ones(8, 4).double(), {"loss": nn.functional.cross_entropy, "optimizer": momentum}
    trainer = make_trainer(model, plan=plan(model, inputs, 1), minibatch_size=8, **given)
    for _ in range(2):
        trainer.train_step(inputs, torch.arange(8) % 3)
    told = "unless the object is replaced: position (list_iterator), first.words (dict)\n"
    assert capsys.readouterr().err.count(told) == 1
