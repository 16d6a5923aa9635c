"""Side channels: tensors that modules leave in objects which others read, in place of passing them."""

import functools

import pytest
import torch
from torch import nn

from hybridpipe.model.recording import Unsplittable, record

from . import models
from .models import WIDTH
from .slicing import difference, in_slices, own_forward
from .test_mechanisms import every_cut, prepared


class Shared:
    """An object of several modules'."""

    left: torch.Tensor | None = None


class Slotted:
    __slots__ = ("left",)


in_global: dict[str, torch.Tensor] = {}
in_name = None
listed: list[torch.Tensor] = []


class Part(nn.Module):
    """A module with a weight, which holds the object."""

    def __init__(self, shared) -> None:
        super().__init__()
        self.linear, self.shared = nn.Linear(WIDTH, WIDTH), shared


class Leaves(Part):
    def forward(self, x):
        self.shared.left = x * 2
        return self.linear(x).tanh()


class Reads(Part):
    def forward(self, x):
        return self.linear(x + self.shared.left)


class ReadsItsShape(Part):
    def forward(self, x):
        return self.linear(x) * self.shared.left.shape[-1]


class LeavesGlobally(Part):
    def forward(self, x):
        global in_name
        in_global["left"] = in_name = self.linear(x).relu()
        return in_name * 1


class ReadsGlobally(Part):
    def forward(self, x):
        return self.linear(x * in_global["left"] + in_name)


class LeavesInClass(Part):
    def forward(self, x):
        Shared.left = self.linear(x).relu()
        return x + 1


class Appends(Part):
    def forward(self, x):
        listed.append(x.square().mean())
        return self.linear(x)


class MakesOnce(Part):
    def forward(self, x):
        if Shared.left is None:
            Shared.left = torch.linspace(0, 1, WIDTH, dtype=x.dtype)
        return self.linear(x * Shared.left)


@functools.lru_cache
def table(width):
    return torch.linspace(0, 1, width, dtype=torch.float64)


class ReadsTable(Part):
    def forward(self, x):
        return self.linear(x + table(WIDTH))


def between(first, last, shared=Shared):
    """A model whose first and last block share an object."""

    class Sharing(models.Base):
        def __init__(self) -> None:
            super().__init__()
            each = shared()
            self.blocks = nn.ModuleList([first(each), nn.Linear(WIDTH, WIDTH), last(each)])

    return Sharing


class RootLeaves(models.Base):
    """The model leaves what follows from its inputs, and parts of its blocks read it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Shared()
        last = nn.Sequential(nn.Linear(WIDTH, WIDTH), Reads(self.shared))
        self.blocks = nn.ModuleList([Reads(self.shared), nn.Linear(WIDTH, WIDTH), last])

    def forward(self, x):
        self.shared.left = x[:, :WIDTH] > 0
        return super().forward(x)


class Summed(models.Base):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Appends(None) for _ in range(3))

    def forward(self, x):
        out = super().forward(x) + sum(listed)
        listed.clear()
        return out


class Twice(models.Base):
    """One module reads in its second call what it has left in its first."""

    def __init__(self) -> None:
        super().__init__()
        self.part = RemembersOnce(Shared())

    def forward(self, x):
        x = self.part(self.enter(x))
        x = self.part(self.blocks[0](x))
        self.part.shared.left = None
        return self.head(x)


class RemembersOnce(Part):
    def forward(self, x):
        before, self.shared.left = self.shared.left, x
        return self.linear(x if before is None else x + before)


def clean():
    global in_name
    in_name = Shared.left = None
    in_global.clear()
    listed.clear()
    table.cache_clear()


@pytest.fixture(autouse=True)
def cleaned():
    clean()
    yield
    clean()


def is_clean():
    return in_name is Shared.left is None and not (in_global or listed or table.cache_info().currsize)


@pytest.mark.parametrize(
    "kind, opened",
    [
        (between(Leaves, Reads), {"blocks.0", "blocks.2"}),
        (between(Leaves, Reads, Slotted), {"blocks.0", "blocks.2"}),
        (between(Leaves, ReadsItsShape), {"blocks.0", "blocks.2"}),
        (between(LeavesGlobally, ReadsGlobally), {"blocks.0", "blocks.2"}),
        (between(LeavesInClass, MakesOnce), {"blocks.0", "blocks.2"}),
        (between(MakesOnce, MakesOnce), {"blocks.0", "blocks.2"}),
        (RootLeaves, {"blocks.0", "blocks.2.1"}),
        (Summed, {"blocks.0", "blocks.1", "blocks.2"}),
        (Twice, {"part"}),
    ],
)
def test_a_tensor_that_is_not_passed_opens_the_modules(kind, opened):
    """The reader's stage read for ever what the recording had left there."""
    model, inputs, loss = prepared(kind)
    made = record(model, inputs, training=True)
    assert is_clean() and {*made.opened} >= opened and len(made.layers) > 2
    assert all(f"{path}." not in " ".join(opened) or path in opened for path in made.opened)
    expected = own_forward(model, inputs, loss, made.opened)
    for cuts in every_cut(made):
        clean()
        assert difference(in_slices(made, cuts, model, inputs, loss), expected) is None, cuts


def test_both_modules_are_named():
    model, inputs, _ = prepared(between(Leaves, Reads))
    opened = record(model, inputs, training=True).opened
    assert "blocks.2 uses a tensor of blocks.0 that is not passed to it" in opened["blocks.0"]
    assert opened["blocks.0"].startswith("test_side_channels.py:")


class ReadsEarlier(Part):
    def forward(self, x):
        before = self.shared.left
        return self.linear(x if before is None else x + before)


class LeavesForLater(Part):
    def forward(self, x):
        self.shared.left = x.detach()
        return self.linear(x)


def test_a_tensor_of_an_earlier_call_is_refused_and_one_stage_trains():
    """The real forward found the recording's tensors, which have no numbers, and failed."""
    model, inputs, _ = prepared(between(ReadsEarlier, LeavesForLater))
    told = r"blocks.0 uses a tensor that blocks.2 has left in an earlier call \(pass it, or keep"
    with pytest.raises(Unsplittable, match=told):
        record(model, inputs, training=True)
    assert model.blocks[0].shared.left is None
    assert not torch.equal(model(inputs), model(inputs))


def test_what_a_module_keeps_for_itself_is_its_own_business():
    model, inputs, loss = prepared(between(RemembersOnce, nn.Identity, Shared))
    model.blocks[2] = RemembersOnce(Shared()).double()
    made = record(model, inputs, training=True)
    assert not made.opened and len(made.layers) == 5
    expected = own_forward(model, inputs, loss)
    assert difference(in_slices(made, [2], model, inputs, loss), expected) is None


def test_tables_that_functions_keep_have_numbers_afterwards():
    """Modules found fake tensors in the cache."""
    model, inputs, loss = prepared(between(ReadsTable, ReadsTable))
    made = record(model, inputs, training=True)
    assert is_clean()
    expected = own_forward(model, inputs, loss)
    assert difference(in_slices(made, [], model, inputs, loss), expected) is None


def test_a_loss_that_reads_a_list_finds_only_what_the_model_leaves():
    """It found the recording's tensors, too, after it had been refused."""

    def loss(out, targets):
        total = out.square().mean() + sum(listed)
        listed.clear()
        return total

    model, inputs, _ = prepared(between(Appends, Appends))
    with pytest.raises(Unsplittable, match="the loss reads a tensor that the forward makes"):
        record(model, inputs, training=True, loss=loss, targets=inputs)
    assert not listed


def test_a_function_that_uses_what_it_is_not_passed_is_refused():
    class Hides(models.Base):
        def forward(self, x):
            x = self.enter(x)
            twice = x * 2
            x = torch.utils.checkpoint.checkpoint(lambda y: y + twice, x, use_reentrant=True)
            return self.head(self.blocks[0](x))

    with pytest.raises(Unsplittable, match=r"CheckpointFunction.apply: it uses a tensor of __mul__|mul"):
        record(Hides().double(), torch.randn(8, 20, dtype=torch.float64), training=True)
