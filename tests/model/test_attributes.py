"""What counts as a change of a module's attributes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hybridpipe.model.attributes import attributes


def module() -> nn.Module:
    made = nn.Linear(2, 2)
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
    "a new attribute": lambda made: setattr(made, "added", None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(change):
    made = module()
    before = attributes([made])
    assert attributes([made]) == before
    change(made)
    assert attributes([made]) != before


def test_what_tables_and_modes_hold_does_not_count():
    made = module()
    before = attributes([made])
    made.eval(), made.weight.data.zero_(), made.register_buffer("more", torch.ones(1))
    assert attributes([made]) == before


def test_copies_are_equal_without_their_tensors():
    assert attributes([module()]) != attributes([module()])
    assert attributes([module()], tensors=False) == attributes([module()], tensors=False)
