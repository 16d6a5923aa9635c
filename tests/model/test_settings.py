"""Settings: what is told as a change, beside attributes: classes, globals, closures and buffers."""

import pytest
import torch
from torch import nn

from hybridpipe.model.layers import layers_of
from hybridpipe.model.settings import Settings
from tests.model.recording import models

FACTOR, TABLE, NOTED = 1.0, {"rate": 1.0}, []


class Scaled(nn.Linear):
    depth = 1

    def forward(self, x):
        return super().forward(x) * FACTOR * TABLE["rate"] * self.depth


def replaced(monkeypatch):
    monkeypatch.setattr(Scaled, "forward", lambda self, x: x)


OF_ALL = {
    "a class's attribute": lambda patch: patch.setattr(Scaled, "depth", 2),
    "a class's method": replaced,
    "a plain global": lambda patch: patch.setitem(globals(), "FACTOR", 2.0),
}
OF_OPENED = {"what a global holds": lambda patch: patch.setitem(TABLE, "rate", 2.0)}


@pytest.mark.parametrize("change", [*OF_ALL.values(), *OF_OPENED.values()], ids=[*OF_ALL, *OF_OPENED])
@pytest.mark.parametrize("units", [("",), ()], ids=["whole", "opened"])
def test_what_a_class_and_its_forward_name_counts(monkeypatch, units, change):
    """A module that is called whole reads its globals in each run; they may decide if it draws numbers."""
    settings = Settings(Scaled(2, 2), units, ())
    assert not settings.changed()
    change(monkeypatch)
    assert settings.changed() == (not units or change in OF_ALL.values())
    assert not settings.changed()


def test_a_variable_around_a_class_counts():
    scale = 1.0

    class Closes(nn.Module):
        def forward(self, x):
            return x * scale

    settings = Settings(Closes(), (), ())
    scale = 2.0
    assert settings.changed() and not settings.changed()


def test_an_attribute_counts_whatever_it_was_before():
    made = nn.Linear(2, 2)
    settings = Settings(made, (), ())
    for value in (1, [1], [2], (3, [4]), None, torch.ones(1), lambda x: x):
        made.setting = value
        assert settings.changed() and not settings.changed()
    made.setting = made.renamed = 5
    assert settings.changed()
    del made.setting
    assert settings.changed() and not settings.changed()


def test_a_buffer_in_the_memory_of_another_counts():
    made = models.Assigned()
    settings, of_forward = Settings(made, (), ()), Settings(made, (), {"mean"})
    for _ in range(20):
        made.mean = None
        made.mean = torch.zeros(models.WIDTH)
        assert settings.changed() and not of_forward.changed()


class Notes(models.Base):
    def forward(self, x):
        NOTED.append(len(x))
        return super().forward(x)


def test_what_a_recording_itself_changes_is_no_change():
    """Each step would be recorded anew, since each recording adds an entry."""
    layers = layers_of(Notes(), torch.ones(3, 20))
    assert NOTED and not layers.changed()
    layers.records.find(torch.ones(2, 20), training=True)
    assert NOTED[-1] == 2 and not layers.changed()
    NOTED.append(0)
    layers.records.find(torch.ones(1, 20), training=True)
    assert layers.changed(), "the user has changed the list, too"
