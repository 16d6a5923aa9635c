"""Each mechanism of recording: slices against the user's own forward, at every allowed cut."""

import copy

import pytest
import torch
from torch.nn import functional as F

from hybridpipe.model.recording import record

from . import models
from .slicing import cut_places, difference, in_slices, own_forward

RIGHT_EVERYWHERE = [
    models.NoGrad,
    models.Checkpointed,
    models.Reentrant,
    models.Custom,
    models.Methods,
    models.Random,
    models.PythonRandomInside,
    models.CountsInside,
    models.Lazy,
    models.ReadyMade,
    models.NeverSkips,
    models.GuardedByMask,
    models.PicksRows,
    models.Hooks,
    models.WritesInput,
    models.ForwardCalled,
    models.Accumulates,
    models.Aliases,
    models.BoxIn,
    models.BoxFilled,
    models.SharedTwice,
    models.Borrows,
    models.InPlaceUnits,
    models.Normalised,
    models.Routed,
]
RIGHT_WHERE_ALLOWED = [
    models.Assigned,
    models.NormTwice,
    models.AliasFromUnit,
    models.ClampsParameter,
    models.Forces,
    models.ForcesOfInputs,
    models.GradientPenalty,
]


def prepared(kind):
    torch.manual_seed(0)
    model = kind().double()
    inputs, targets = torch.randn(8, 20, dtype=torch.float64), torch.randint(5, (8,))
    return model, inputs, lambda out: F.cross_entropy(out, targets)


def every_cut(made):
    """One cut at each allowed place, and all candidate cuts at once."""
    return [[cut] for cut in range(1, len(made.events)) if cut not in made.forbidden] + [cut_places(made)]


@pytest.mark.parametrize("kind", RIGHT_EVERYWHERE, ids=lambda kind: kind.__name__)
def test_right_at_every_cut(kind):
    model, inputs, loss = prepared(kind)
    made = record(model, inputs, training=True)
    assert not made.forbidden
    expected = own_forward(model, inputs, loss, made.opened)
    for cuts in every_cut(made):
        assert difference(in_slices(made, cuts, model, inputs, loss), expected) is None, cuts


@pytest.mark.parametrize("kind", RIGHT_WHERE_ALLOWED, ids=lambda kind: kind.__name__)
def test_right_where_a_cut_is_allowed(kind):
    model, inputs, loss = prepared(kind)
    made = record(model, inputs, training=True)
    assert made.forbidden and all(reason.startswith("models.py:") for reason in made.forbidden.values())
    assert not set(cut_places(made)) & made.forbidden.keys()
    expected = own_forward(model, inputs, loss, made.opened)
    for cuts in every_cut(made):
        assert difference(in_slices(made, cuts, model, inputs, loss), expected) is None, cuts


@pytest.mark.parametrize("kind", [*RIGHT_EVERYWHERE, *RIGHT_WHERE_ALLOWED], ids=lambda kind: kind.__name__)
def test_evaluation(kind):
    model, inputs, loss = prepared(kind)
    made = record(model, inputs, training=False)
    model.eval()
    with torch.no_grad():
        expected = own_forward(model, inputs, loss, made.opened, backward=False)
        for cuts in every_cut(made):
            got = in_slices(made, cuts, model, inputs, loss, backward=False)
            assert difference(got, expected) is None, cuts


def test_autocast_is_entered_as_in_the_forward():
    class Casts(models.Base):
        def forward(self, x):
            x = self.enter(x)
            for block in self.blocks:
                with torch.autocast("cpu", torch.bfloat16):
                    x = x + block(x)
                    with torch.autocast("cpu", enabled=False):
                        x = self.blocks[0](x.float()) * 1.1
            return self.head(x)

    model, inputs, loss = prepared(Casts)
    model, inputs = model.float(), inputs.float()
    made = record(model, inputs, training=True)
    expected = own_forward(model, inputs, loss, made.opened)
    for cuts in every_cut(made):
        assert difference(in_slices(made, cuts, model, inputs, loss), expected, 1e-4) is None, cuts


def test_a_checkpointed_region_computes_again_in_the_backward():
    model, inputs, loss = prepared(models.Checkpointed)
    made = record(model, inputs, training=True)
    calls = []
    for module in (model.enter, model.blocks[1][0]):
        module.register_forward_hook(lambda module, *_: calls.append(module.in_features))
    in_slices(made, [], model, inputs, loss)
    assert calls == [20, models.WIDTH, models.WIDTH]


def test_a_reentrant_checkpoint_is_one_event():
    model, inputs, _ = prepared(models.Reentrant)
    made = record(model, inputs, training=True)
    assert [event.name for event in made.events] == ["enter", *["CheckpointFunction.apply"] * 3, "head"]
    assert "blocks.1.0.weight" in made.events[2].weights


def test_only_the_base_of_shared_memory_crosses():
    model, inputs, _ = prepared(models.Aliases)
    made = record(model, inputs, training=True)
    cut = made.cut("blocks.1.0")
    shapes = [tuple(made.values[value].shape) for value in made.crossing(cut).values]
    assert shapes == [(8, models.WIDTH)] * 2  # x and skip; half and top are made again
    assert [made.events[i].name for i in sorted(made.crossing(cut).views)] == [
        "__getitem__",
        "view",
        "__getitem__",
    ]


def test_random_numbers_follow_the_call_and_not_the_cut():
    model, inputs, _ = prepared(models.Random)
    made = record(model, inputs, training=True)
    keys = [event.key for event in made.events if event.draws]
    assert len(keys) == len(set(keys)) == 9
    assert keys == [
        event.key for event in record(copy.deepcopy(model), inputs, training=True).events if event.draws
    ]


def test_shared_weights_name_their_layers():
    model, inputs, _ = prepared(models.SharedTwice)
    made = record(model, inputs, training=True)
    assert made.shared_weights["back.weight"] == ("back", "again")
    assert made.shared_weights["enter.bias"] == ("enter", "enter#2")
    assert made.shared_weights["blocks.0.0.weight"] == ("blocks.0.0", "blocks.0.0#2", "blocks.0.0#3")
    assert "head.weight" not in made.shared_weights


def test_opened_leaf_modules_say_why():
    model, inputs, _ = prepared(models.BoxIn)
    made = record(model, inputs, training=True)
    assert {*made.opened} == {"blocks.0", "blocks.1", "blocks.2"}
    assert all(reason.endswith("it takes tensors in a Box") for reason in made.opened.values())


def test_a_leaf_module_that_borrows_a_weight_is_opened():
    model, inputs, _ = prepared(models.Borrows)
    made = record(model, inputs, training=True)
    assert {*made.opened} == {"blocks.1"}
    assert made.shared_weights == {"blocks.0.0.weight": ("blocks.0.0", "blocks.1.linear")}


def test_the_output_may_hold_a_weight():
    model, inputs, _ = prepared(models.ReturnsWeight)

    def loss(out):
        return out[0].square().mean() + out[1].square().mean()

    made = record(model, inputs, training=True)
    expected = own_forward(model, inputs, loss, made.opened)
    assert difference(in_slices(made, cut_places(made), model, inputs, loss), expected) is None
