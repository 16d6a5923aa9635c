"""Outputs of a data set are joined in its order."""

import pytest
import torch
from torch import nn

from hybridpipe.errors import UserError
from hybridpipe.training.prediction import joined
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


def test_any_tree_is_joined():
    parts = [{"logits": torch.ones(2, 3) * i, "loss": torch.tensor(float(i)), "kind": "x"} for i in (1, 2)]
    found = joined(parts)
    assert found["logits"].tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
    assert found["loss"].tolist() == [1.0, 2.0] and found["kind"] == "x"


@pytest.mark.parametrize(
    "parts, message",
    [
        (
            [torch.ones(2, 3), torch.ones(2, 4)],
            r"must have one shape .*, got \(3,\) and \(4,\): pad all samples",
        ),
        (
            [(torch.ones(2),), (torch.ones(2), torch.ones(2))],
            "for each microbatch what it returns for the first",
        ),
    ],
)
def test_what_cannot_be_joined_is_said(parts, message):
    with pytest.raises(UserError, match=message):
        joined(parts)


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
