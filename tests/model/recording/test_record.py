"""Record: what it holds, and that it is the same on every rank."""

import copy
import gc
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hybridpipe.model.recording import ModelLookup, Slice, call_arguments, record

from . import models
from .slicing import cut_places, difference, in_slices, own_forward, seed

ROOT = Path(__file__).parents[3]
INPUTS = torch.linspace(-1, 1, 160, dtype=torch.float64).reshape(8, 20)


def made_of(kind):
    torch.manual_seed(0)
    return record(kind().double(), INPUTS, training=True)


def reachable(root):
    found, waiting = {}, [root]
    while waiting:
        each = waiting.pop()
        if id(each) in found or isinstance(each, type | type(sys) | type(made_of)):
            continue
        found[id(each)] = each
        waiting += gc.get_referents(each)
    return found.values()


def test_a_record_holds_no_module_and_no_parameter():
    for kind in (models.Reentrant, models.Custom, models.Methods, models.BoxIn, models.Assigned):
        held = [each for each in reachable(made_of(kind)) if isinstance(each, nn.Module | nn.Parameter)]
        assert held == [], kind


def test_layers_cover_the_events_and_charge_what_crosses():
    made = made_of(models.Aliases)
    assert made.layers[0].start == 0 and made.layers[-1].stop == len(made.events)
    assert [a.stop for a in made.layers[:-1]] == cut_places(made)
    crossing = [sum(value.bytes for value in made.what_crosses(layer.stop)) for layer in made.layers]
    assert crossing == [8 * 12 * 8, *[2 * 8 * 12 * 8] * 3, 0]
    assert made.layers[1].leaf_modules == ("blocks.0.0",)
    assert made.layers[1].weights == ("blocks.0.0.bias", "blocks.0.0.weight")
    assert len({layer.name for layer in made.layers}) == len(made.layers)


def test_leaf_modules_between_which_no_cut_is_allowed_are_one_layer():
    made = made_of(models.NormTwice)
    assert [layer.name for layer in made.layers] == ["enter", "norm..norm#2", "head"]
    assert made.cut("norm") == made.cut("norm..norm#2") == made.layers[1].start


def test_the_digest_tells_models_and_constants_apart_and_nothing_else():
    class OtherRamp(models.ReadyMade):
        def __init__(self) -> None:
            super().__init__()
            self.ramp = self.ramp * 2

    assert made_of(models.ReadyMade).digest == made_of(models.ReadyMade).digest
    assert made_of(models.ReadyMade).digest != made_of(OtherRamp).digest
    assert made_of(models.ReadyMade).digest != made_of(models.Base).digest


def test_the_digest_is_the_same_in_another_process():
    kinds = ("ReadyMade", "Methods", "Reentrant", "Checkpointed", "Random", "BoxIn")
    program = (
        "from tests.model.recording import models, test_record\n"
        f"print(*(test_record.made_of(getattr(models, kind)).digest for kind in {kinds}))"
    )
    printed = subprocess.check_output([sys.executable, "-W", "ignore", "-c", program], text=True, cwd=ROOT)
    assert [*map(int, printed.split())] == [made_of(getattr(models, kind)).digest for kind in kinds]
    assert all(0 <= int(number) < 2**63 for number in printed.split())


def test_a_slice_takes_weights_as_they_are_at_each_run():
    torch.manual_seed(0)
    model = models.Methods().double()
    made = record(model, INPUTS, training=True)
    lookup = ModelLookup(model)
    parts = [
        Slice(made, 0, made.cut("head"), lookup),
        Slice(made, made.cut("head"), len(made.events), lookup),
    ]
    assert "square" in parts[0].weights and "head.weight" not in parts[0].weights
    later = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in later.parameters():
            parameter.mul_(1.5)
    older = dict(model.named_parameters())

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x):
            return parts[1].run(parts[0].run((), [x], seed), None, seed)

    changed = {f"model.{name}": parameter for name, parameter in later.named_parameters()}
    out = torch.func.functional_call(Both(), changed, (INPUTS,))
    assert torch.equal(out, later(INPUTS)) and not torch.equal(out, model(INPUTS))
    assert all(parameter is older[name] for name, parameter in model.named_parameters())


def test_slices_need_only_the_inputs_that_they_use():
    class Masked(models.Base):
        def forward(self, x, mask, scale):
            x = self.enter(x) * scale
            for block in self.blocks:
                x = block(x)
            return self.head(x * mask[:, None])

    inputs = {"x": INPUTS, "mask": torch.ones(8, dtype=torch.float64), "scale": 2.0}
    model = Masked().double()
    made = record(model, inputs, training=True)
    first = Slice(made, 0, made.cut("blocks.1.0"), ModelLookup(model))
    last = Slice(made, made.cut("blocks.1.0"), len(made.events), ModelLookup(model))
    names = [*pytree.tree_leaves([*call_arguments(inputs)[1]])]
    assert [names[i] for i in first.needs] == ["x"] and [names[i] for i in last.needs] == ["mask"]


def test_a_record_of_one_object_runs_on_a_copy():
    torch.manual_seed(0)
    model = models.Reentrant().double()
    made = record(model, INPUTS, training=True)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.enter.weight.mul_(2)

    def loss(out):
        return out.square().mean()

    expected = own_forward(other, INPUTS, loss)
    assert difference(in_slices(made, cut_places(made), other, INPUTS, loss), expected) is None
