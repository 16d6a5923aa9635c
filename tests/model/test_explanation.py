"""Explanation: facts about a record, each from a model that has it."""

import json
from dataclasses import asdict

import pytest
import torch
from torch import nn

from hybridpipe.model.explanation import ModelExplanation, facts_of, input_names
from hybridpipe.model.layers import explain, layers_of
from hybridpipe.model.recording import record
from tests.model.recording import models, refused

INPUTS = torch.randn(8, 20, dtype=torch.float64)


def facts(kind: type[nn.Module]) -> dict:
    return facts_of(record(kind().double(), INPUTS, training=True))


def explained(model: nn.Module, inputs=INPUTS) -> ModelExplanation:
    return explain(layers_of(model, inputs))


def test_neighbouring_places_with_one_reason_are_one_and_others_are_told_apart():
    """The clamped scale is used behind `enter`, and before `head`."""
    cuts = facts(models.ClampsParameter)["forbidden"]
    assert [(cut.after, cut.before, cut.places) for cut in cuts] == [
        ("enter", "blocks.0.0", 1),
        ("blocks.0.0", "head", 3),
    ]
    lines = [cut.reason.removesuffix(": scale is written to, and used on both sides") for cut in cuts]
    assert len({*lines}) == 2 and all(line.startswith("models.py:") for line in lines)


def test_no_cut_while_blocks_write_to_memory_that_two_tensors_share():
    (cut,) = facts(models.AliasFromUnit)["forbidden"]
    assert (cut.after, cut.before) == ("alias", "blocks.2.0")
    assert cut.reason.endswith("several tensors share which cross here (write out of place)")


def test_nothing_is_forbidden_where_views_can_be_made_again():
    assert facts(models.Aliases)["forbidden"] == ()


def test_guards_say_what_was_read_and_free_calls_say_where():
    found = facts(models.GuardedByMask)
    assert len(found["guards"]) == 1 and found["guards"][0].endswith(": __bool__ gave False")
    assert all(each.count("(models.py:") == 1 for each in found["free"])


def test_units_that_draw_are_told_by_their_calls():
    assert [each for each in facts(models.PythonRandomInside)["draws"] if "(" not in each]
    assert facts(models.Base)["draws"] == ()


def test_opened_units_have_their_reason():
    assert {*facts(models.BoxIn)["opened"]} == {"blocks.0", "blocks.1", "blocks.2"}


@pytest.mark.parametrize(
    "inputs, names",
    [
        (torch.ones(2), ["input 0"]),
        ((torch.ones(2), [torch.ones(2)]), ["input 0", "input 1[0]"]),
        ({"ids": torch.ones(2), "extra": {"mask": torch.ones(2)}}, ["ids", "extra['mask']"]),
    ],
)
def test_inputs_are_named_as_the_user_does(inputs, names):
    assert input_names(inputs) == names


def test_a_recorded_model():
    found = explained(models.SharedTwice().double())
    assert (found.kind, found.reason) == ("recorded", "")
    names = [layer.name for layer in found.layers]
    enter, head = found.layers[0], found.layers[-1]
    of_blocks = 2 * (models.WIDTH**2 + models.WIDTH)  # two are not used
    assert (enter.parameters, enter.inputs) == (20 * models.WIDTH + models.WIDTH + of_blocks, ("input 0",))
    assert (enter.crossing_bytes, enter.crossing_tensors) == (8 * models.WIDTH * 8, 1)
    assert (head.crossing_bytes, head.crossing_tensors, head.inputs) == (0, 0, ())
    shared = {each.name: [names[i] for i in each.layers] for each in found.shared}
    assert shared["back.weight"] == ["back", "again"]
    assert shared["enter.weight"] == ["enter", "enter#2"]


def test_parameters_without_use_are_named():
    class Idle(models.Base):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Linear(2, 2)

    found = explained(Idle().double())
    assert found.unused == ("idle.weight", "idle.bias")
    assert found.layers[0].parameters == 20 * models.WIDTH + models.WIDTH + 6  # the first stage holds them


def test_a_sequential():
    found = explained(nn.Sequential(nn.Linear(20, 4), nn.ReLU()).double())
    assert (found.kind, found.reason, [layer.name for layer in found.layers]) == (
        "nn.Sequential",
        "",
        ["0", "1"],
    )
    assert [(layer.parameters, layer.crossing_bytes) for layer in found.layers] == [(84, None), (0, None)]


def test_one_layer_has_its_reason():
    found = explained(refused.ReadsActivation().double())
    assert found.kind == "one layer" and found.reason.startswith("refused.py:")
    assert [layer.name for layer in found.layers] == ["ReadsActivation"]


class Scaled(nn.Module):
    """One parameter, written to in between, is used at both ends: no cut is left."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = self.first(x * self.scale)
        with torch.no_grad():
            self.scale.clamp_(0.5, 2)
        return self.second(x) * self.scale


@pytest.mark.parametrize(
    "model, reason",
    [
        (Scaled(), "scale is written to, and used on both sides"),
        (nn.Bilinear(20, 20, 2), "its forward calls no modules between which to cut"),
    ],
)
def test_a_recorded_model_of_one_layer_has_its_reason(model, reason):
    inputs = (INPUTS, INPUTS) if isinstance(model, nn.Bilinear) else INPUTS
    found = explained(model.double(), inputs)
    assert found.kind == "recorded" and len(found.layers) == 1 and found.reason.endswith(reason)


KINDS = [models.GuardedByMask, models.AliasFromUnit, models.Hooks, refused.LayerDrop]


@pytest.mark.parametrize("kind", KINDS)
def test_it_can_be_written_as_json(kind):
    found = asdict(explained(kind().double()))
    assert json.loads(json.dumps(found))["kind"] == found["kind"]
