"""Records of one model: found by structure, shapes, mode and path."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hybridpipe.model.recording import Diverged, ModelLookup, Records, Slice, Unsplittable
from hybridpipe.model.recording import records as module

from . import models
from .slicing import cut_places, difference, in_slices, own_forward, seed

FULL = torch.rand(8, 20, dtype=torch.float64)
PADDED = FULL * torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)[:, None]


def loss(out):
    return F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long))


def test_a_record_is_found_again():
    records = Records(models.Base().double())
    found = records.find(FULL, training=True)
    assert records.find(PADDED, training=True) is found
    assert records.find(FULL[:3], training=True) is not found
    assert records.find((FULL,), training=True) is found
    assert records.find({"x": FULL}, training=True) is not found
    assert records.find(FULL, training=False) is not found


def test_a_guard_tells_paths_apart():
    model = models.GuardedByMask().double()
    records = Records(model)
    full, padded = records.find(FULL, training=True), records.find(PADDED, training=True)
    assert full.digest != padded.digest
    for inputs, found in ((FULL, full), (PADDED, padded)):
        assert records.find(inputs, training=True) is found
        expected = own_forward(model, inputs, loss)
        assert difference(in_slices(found, cut_places(found), model, inputs, loss), expected) is None


def test_a_cut_is_found_in_the_record_of_another_path():
    records = Records(models.GuardedByMask().double())
    full, padded = records.find(FULL, training=True), records.find(PADDED, training=True)
    names = [layer.name for layer in full.layers]
    assert names == [layer.name for layer in padded.layers]
    assert [full.cut(name) for name in names] != [padded.cut(name) for name in names]
    with pytest.raises(Unsplittable, match=r"no cut before 'blocks\.9'"):
        full.cut("blocks.9")


def test_a_wrong_path_diverges_before_anything_has_an_effect():
    model = models.GuardedByMask().double()
    calls = []
    model.enter.register_forward_hook(lambda *_: calls.append(1))
    made = Records(model).find(FULL, training=True)
    calls.clear()
    for start, stop in ((0, len(made.events)), (made.cut("blocks.1.0"), len(made.events))):
        part = Slice(made, start, stop, ModelLookup(model))
        received = [torch.zeros(8, models.WIDTH, dtype=torch.float64) for _ in part.takes]
        with pytest.raises(Diverged, match=r"models.py:\d+: __bool__ gave \[False\], recorded was \[True\]"):
            part.run(received, [PADDED], seed)
    assert calls == []


def test_too_many_paths_are_refused():
    class ManyPaths(models.Base):
        def forward(self, x):
            return super().forward(x) * x.sum().item()

    records = Records(ManyPaths().double(), most=2)
    records.find(FULL, training=True)
    records.find(FULL + 1, training=True)
    with pytest.raises(
        Unsplittable, match=r"^more than 2 paths for inputs of one shape: test_records.py:\d+: item"
    ):
        records.find(FULL + 2, training=True)


def test_finding_leaves_the_random_state():
    records = Records(models.NeverSkips().double())
    records.find(FULL, training=True)
    state = torch.get_rng_state()
    records.find(FULL, training=True)
    assert torch.equal(state, torch.get_rng_state())


class Uneven(nn.Module):
    """A small layer, and a body that holds most of the parameters; its path may follow from its data."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.enter, self.body = nn.Linear(2, 4), Body(reads)

    def forward(self, x):
        return self.body(self.enter(x))


class Body(nn.Module):
    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.first, self.second, self.reads = nn.Linear(4, 5), nn.Linear(5, 4), reads

    def forward(self, x):
        x = self.first(x)
        return self.second(x if not self.reads or x.sum().item() > 0 else -x)


@pytest.mark.parametrize(
    "reads, names", [(False, ["enter", "body.first", "body.second"]), (True, ["enter", "body"])]
)
def test_a_leaf_module_with_much_of_the_parameters_is_opened_if_it_can_be(reads, names):
    records = Records(Uneven(reads))
    assert [layer.name for layer in records.find(torch.randn(3, 2), True).layers] == names
    assert [layer.name for layer in records.find(torch.randn(4, 2), True).layers] == names


class Mixes(nn.Module):
    """Takes a number beside a tensor, as for mixing samples."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(20, 5)

    def forward(self, x, share):
        return self.head(x * share)


def test_a_number_that_is_another_in_each_step_is_refused():
    """Each number is a record of its own, so every step would be recorded."""
    records, x = Records(Mixes()), torch.randn(8, 20)
    for n in range(8):
        records.find({"x": x, "share": n / 8}, training=True)
    records.find({"x": x, "share": 0.0}, training=True)
    with pytest.raises(Unsplittable, match=r"more than 8 different numbers, .* pass tensors instead"):
        records.find({"x": x, "share": 1.0}, training=True)


def test_the_records_of_as_many_shapes_are_kept(monkeypatch):
    monkeypatch.setattr(module, "MOST_SHAPES", 2)
    records = Records(Mixes())
    kept = [records.find({"x": torch.randn(n, 20), "share": 1.0}, training=True) for n in (1, 2, 3)]
    again = [records.find({"x": torch.randn(n, 20), "share": 1.0}, training=True) for n in (3, 2)]
    assert again[0] is kept[2] and again[1] is kept[1] and len(records._paths) == 2
