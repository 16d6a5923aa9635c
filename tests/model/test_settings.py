"""Settings: what is told as a change, beside attributes: classes, globals, closures and buffers."""

import pytest
import torch
from torch import nn

from hybridpipe.model.layers import layers_of
from hybridpipe.model.settings import Settings
from tests.model.recording import models

FACTOR, TABLE, NOTED = 1.0, {"rate": 1.0}, {}


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
@pytest.mark.parametrize("leaf_modules", [("",), ()], ids=["whole", "opened"])
def test_what_a_class_and_its_forward_name_counts(monkeypatch, leaf_modules, change):
    """A module that is called whole reads its globals in each run; they may decide if it draws numbers."""
    settings = Settings(Scaled(2, 2), leaf_modules, ())
    assert not settings.changed()
    change(monkeypatch)
    assert settings.changed() == (not leaf_modules or change in OF_ALL.values())
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
        NOTED.setdefault(len(x), "noted")
        return super().forward(x)


def test_what_a_recording_itself_changes_is_no_change():
    """Each step would be recorded anew, since each recording adds an entry."""
    layers = layers_of(Notes(), torch.ones(3, 20))
    assert NOTED and not layers.settings.changed() and layers.num_layers > 1
    layers.records.find(torch.ones(2, 20), training=True)
    assert 2 in NOTED and not layers.settings.changed()
    NOTED[0] = "added"
    layers.records.find(torch.ones(1, 20), training=True)
    assert layers.settings.changed(), "the user has changed the table, too"


class Keeps(nn.Linear):
    calls_of_all, kept = 0, None

    def forward(self, x):
        global FACTOR
        FACTOR += 1
        Keeps.calls_of_all += 1
        self.kept = [*(self.kept or []), (x, [])][-3:]
        return super().forward(x)


class HoldsUnits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Keeps(20, 20), Keeps(20, 2)
        self.rate = 1.0

    def forward(self, x):
        return self.second(self.first(x)) * self.rate


def test_what_leaf_modules_change_in_a_run_is_no_change():
    """A count of calls, or an activation that was kept, had each step recorded anew."""
    model, x = HoldsUnits(), torch.ones(3, 20)
    layers = layers_of(model, x)
    stage = layers.stage(0, layers.num_layers)
    for _ in range(5):
        stage.run(None, x, lambda place, python_too: None, True, stage.form(3, lambda: x, True))
        layers.settings.settle()
        assert not layers.settings.changed() and layers.num_layers == 2
    assert model.first.kept and len(layers.records._paths) == 1
    model.rate = 2.0
    stage.run(None, x, lambda place, python_too: None, True, stage.form(3, lambda: x, True))
    layers.settings.settle()
    assert layers.settings.changed(), "what an opened module has stands in the record"
    model.first.kept = None
    assert layers.settings.changed() and not layers.settings.changed()


def test_another_modules_growth_leaves_the_numbers_of_objects_alone():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].grows, model[1].table = [[]], {"a": [1], "b": [2]}
    settings = Settings(model, ("0",), ())
    model[0].grows.append([])
    settings.settle()
    assert not settings.changed()
    model[1].table["a"].append(2)
    assert settings.changed()
