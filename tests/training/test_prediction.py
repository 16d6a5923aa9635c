"""Outputs of a data set are joined in its order, along the samples only, and none is lost."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hybridpipe import Plan, StageSpec
from hybridpipe.training.prediction import is_unclear, joined
from tests.training.helpers import seeded, seeded_mlp

pytestmark = pytest.mark.usefixtures("quick")


def test_predictions_are_the_models_outputs(make):
    trainer, samples = make(seeded_mlp()), seeded(19)
    trainer.fit(samples)
    found = trainer.predict(samples)
    torch.testing.assert_close(found, trainer.model(samples[:][0]), rtol=0, atol=1e-12)


def test_in_evaluation_mode_and_back(make):
    trainer = make(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Identity()).double())
    samples = seeded(8)
    torch.testing.assert_close(trainer.predict(samples), trainer.model[0](samples[:][0]))
    assert trainer.model.training


def test_no_more_samples_are_asked_at_once_than_a_microbatch_has(make):
    """A microbatch of one sample more told which dimension has them, at the end of a training that fits."""
    sizes = []

    class Noted(nn.Module):
        def forward(self, x):
            sizes.append(len(x))
            return 0 * x  # alike for all samples, so that this may be a matrix without them

    plan = Plan((StageSpec(0, 2),), num_microbatches=2)
    trainer = make(nn.Sequential(nn.Linear(4, 3), Noted()).double(), plan=plan, minibatch_size=8)
    assert trainer.predict(seeded(16)).shape == (16, 3)
    assert sizes == [4, 4, 4, 4, 3]


def test_any_tree_is_joined():
    parts = [{"logits": torch.ones(2, 3) * i, "loss": torch.tensor(float(i)), "kind": "x"} for i in (1, 2)]
    found = joined(parts, [2, 2])
    assert found["logits"].tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
    assert found["loss"].tolist() == [1.0, 2.0] and found["kind"] == "x"


def test_samples_that_differ_in_shape_are_a_list():
    """It ended the job, at the very end of a training."""
    found = joined([{"tokens": torch.ones(2, 3)}, {"tokens": torch.zeros(1, 4)}], [2, 1])
    assert [each.tolist() for each in found["tokens"]] == [[1.0] * 3, [1.0] * 3, [0.0] * 4]


def test_what_has_no_samples_in_front_is_a_list_by_microbatch():
    """It was joined along whatever the first dimension was."""
    state, other = torch.ones(2, 3, 5), torch.zeros(2, 3, 5)
    found = joined([(torch.ones(3), (state,)), (torch.ones(3), (other,))], [3, 3])
    assert torch.equal(found[0], torch.ones(6)) and found[1] == ([state, other],)
    assert joined([torch.ones(4, 5)], [3])[0].shape == (4, 5)


def test_plain_values_are_one_if_they_agree():
    """The first one's stood for all."""
    assert joined([(1, None, 0.5), (2, None, 0.5)], [1, 1]) == ([1, 2], None, 0.5)
    assert joined([(torch.ones(2), 1), (None, True)], [2, 2])[1] == [1, True]


def test_trees_that_differ_are_a_list():
    parts = [(torch.ones(2),), (torch.ones(2), torch.ones(2))]
    assert joined(parts, [2, 2]) == parts


@pytest.mark.parametrize(
    "shapes, unclear",
    [
        ([(4, 3), (4, 3)], False),
        ([(4, 4, 3), (4, 4, 3)], True),  # four layers, four samples
        ([(4, 4, 3), (2, 2, 3)], False),  # the sizes tell
        ([(4, 4, 3)], False),  # nothing is joined
        ([(3, 4), (3, 4)], False),
    ],
)
def test_a_microbatch_of_another_size_is_run_where_it_tells_more(shapes, unclear):
    assert is_unclear([torch.randn(shape) for shape in shapes], [shape[0] for shape in shapes]) == unclear


def test_a_matrix_that_is_the_same_for_all_may_be_of_no_sample():
    assert is_unclear([torch.ones(4, 3)] * 2, [4, 4])
    assert joined([torch.ones(4, 3)] * 2 + [torch.ones(5, 3)], [4, 4, 5], 2).shape == (8, 3)
    assert len(joined([torch.ones(4, 3)] * 3, [4, 4, 5], 2)) == 2


class Recurrent(nn.Module):
    """Returns what an LSTM does: outputs (B, T, C), and states (layers, B, C)."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 5, layers, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        y, state = self.lstm(x)
        return self.head(y[:, -1]), state


@pytest.mark.parametrize("layers", [1, 2])
def test_the_state_of_an_lstm_is_not_joined_along_its_layers(make, layers):
    """Of two layers and microbatches of two samples the numbers agree by chance."""
    torch.manual_seed(0)
    model, inputs = Recurrent(layers).double(), torch.randn(8, 6, 4).double()
    one = Plan((StageSpec(0, 1),), num_microbatches=4)
    trainer = make(nn.Sequential(model), plan=one, loss=lambda outputs, _: outputs[0].mean())
    logits, (hidden, _) = trainer.predict([(each, 0) for each in inputs])
    expected, (whole, _) = model(inputs)
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(torch.cat(hidden, 1), whole)


def by_length(samples):
    longest = max(len(words) for words, _ in samples)
    words = torch.stack([nn.functional.pad(words, (0, 0, 0, longest - len(words))) for words, _ in samples])
    return words, torch.tensor([label for _, label in samples])


def test_lengths_may_differ(make):
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    data = [(torch.randn(length, 4).double(), 0) for length in (3, 5, 2, 2, 7, 1, 4, 4)]
    trainer = make(model, collate_fn=by_length, loss=lambda outputs, _: outputs.mean())
    trainer.fit(data)
    found = trainer.predict(data)
    assert [len(each) for each in found] == [5, 5, 2, 2, 7, 7, 4, 4]
    for each, (words, _) in zip(found, data, strict=True):
        torch.testing.assert_close(each[: len(words)], model(words))


def test_a_loader_brings_a_collate_fn_of_its_own(make):
    """It was refused because the trainer has one, although a validation has no reason to be padded alike."""
    data = [*seeded(16)]

    def doubled(samples):
        inputs, targets = torch.utils.data.default_collate(samples)
        return 2 * inputs, targets

    trainer = make(seeded_mlp(), collate_fn=torch.utils.data.default_collate)
    loader = DataLoader(data, batch_size=4, collate_fn=doubled)
    (entry,) = trainer.fit(data, validation=loader)
    inputs, targets = torch.utils.data.default_collate(data)
    outputs = trainer.model(2 * inputs)
    torch.testing.assert_close(trainer.predict(loader), outputs)
    loss = nn.functional.cross_entropy(outputs, targets).item()
    assert trainer.evaluate(loader)["loss"] == pytest.approx(loss) == entry["validation"]["loss"]


def test_inputs_alone_are_a_dict(make):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x)

    inputs = torch.randn(5, 4)
    trainer = make(Model(), plan="dp", loss=lambda outputs, _: outputs.mean())
    samples = [{"x": each} for each in inputs]
    torch.testing.assert_close(trainer.predict(samples), trainer.model(inputs))
