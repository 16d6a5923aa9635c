"""What counts as a change of a module's attributes."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from hybridpipe.model.attributes import attributes, class_attributes, own_classes

FACTOR = 1.0


class Schedule:
    """A callable object with a number that changes."""

    def __init__(self):
        self.t = 0

    def __call__(self):
        return self.t


class Slotted:
    __slots__ = ("rate",)

    def __init__(self):
        self.rate = 0.1


class Scaled(nn.Linear):
    depth = 1

    def forward(self, x):
        return super().forward(x) * FACTOR * self.depth


def module() -> nn.Module:
    made = Scaled(2, 2)
    made.schedule, made.slotted = Schedule(), Slotted()
    made.own, made.numpys = random.Random(0), np.random.default_rng(0)
    made.older, made.torchs = np.random.RandomState(0), torch.Generator()
    made.scale, made.sizes, made.names = 1.0, [1, (2, 3)], {"b", "a"}
    made.config = SimpleNamespace(rate=0.1, inner=SimpleNamespace(depth=2))
    made.table, made.function = torch.zeros(2), torch.relu
    made.config.itself = made.config
    return made


CHANGES = {
    "a number": lambda made: setattr(made, "scale", 2.0),
    "an entry of a tuple in a list": lambda made: made.sizes.__setitem__(1, (2, 4)),
    "an element of a set": lambda made: made.names.add("c"),
    "an attribute of an object": lambda made: setattr(made.config, "rate", 0.2),
    "an attribute of an object in it": lambda made: setattr(made.config.inner, "depth", 3),
    "a tensor written to": lambda made: made.table.add_(1),
    "another tensor": lambda made: setattr(made, "table", torch.zeros(2)),
    "an attribute of a callable object": lambda made: setattr(made.schedule, "t", 1),
    "a slot": lambda made: setattr(made.slotted, "rate", 0.2),
    "Python's generator": lambda made: made.own.random(),
    "NumPy's generator": lambda made: made.numpys.random(),
    "NumPy's older generator": lambda made: made.older.rand(),
    "torch's generator": lambda made: torch.rand(1, generator=made.torchs),
    "a new attribute": lambda made: setattr(made, "added", None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(change):
    made = module()
    before = attributes([made])
    assert attributes([made]) == before
    change(made)
    assert attributes([made]) != before


def test_a_class_attribute_and_a_global_that_the_forward_names_count(monkeypatch):
    made = module()
    before = class_attributes(own_classes([made]))
    assert class_attributes(own_classes([made])) == before
    monkeypatch.setattr(Scaled, "depth", 2)
    changed = class_attributes(own_classes([made]))
    assert changed != before
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert class_attributes(own_classes([made])) != changed


def test_a_generator_without_a_state_is_left_alone():
    made = module()
    made.own = random.SystemRandom()
    assert attributes([made]) == attributes([made])


def test_what_tables_and_modes_hold_does_not_count():
    made = module()
    before = attributes([made])
    made.eval(), made.weight.data.zero_(), made.register_buffer("more", torch.ones(1))
    assert attributes([made]) == before


def test_copies_are_equal_without_their_tensors():
    assert attributes([module()]) != attributes([module()])
    assert attributes([module()], tensors=False) == attributes([module()], tensors=False)
