"""Writes to parameters and buffers, in every way that torch offers: seen, and on one side of each cut."""

import copy

import pytest
import torch
from torch import nn

from hybridpipe.model.layers import layers_of
from hybridpipe.model.recording import Unsplittable, record
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.stage.stage import Stage

from . import models, refused
from .slicing import difference, in_slices, own_forward
from .test_mechanisms import every_cut, prepared

HALF = torch.full((models.WIDTH,), 0.5, dtype=torch.float64)


class Written(models.Base):
    """Uses a parameter and a buffer at its beginning and at its end, and writes to one of them at first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(models.WIDTH) * 2)
        self.register_buffer("shift", torch.randn(models.WIDTH) * 2)

    def forward(self, x):
        with torch.no_grad():
            type(self).write(self, x)
        x = self.enter(x) * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale + self.shift)


def halved(tensor):
    tensor *= 0.5


def first_of(parts):
    return parts[0].zero_()


OF_PARAMETERS = {
    "itself": lambda m, x: m.scale.clamp_(-0.5, 0.5),
    "data": lambda m, x: m.scale.data.clamp_(-0.5, 0.5),
    "detach": lambda m, x: m.scale.detach().clamp_(-0.5, 0.5),
    "view": lambda m, x: m.scale.view(-1).clamp_(-0.5, 0.5),
    "view of a view of data": lambda m, x: m.scale.view(3, 4)[1].data.view(-1).clamp_(-0.5, 0.5),
    "item": lambda m, x: m.scale.__setitem__(0, 0.1),
    "item of data": lambda m, x: m.scale.data.__setitem__(slice(None), 0.1),
    "item from an activation": lambda m, x: m.scale.__setitem__(0, m.enter(x).mean()),
    "out": lambda m, x: torch.clamp(m.scale, -0.5, 0.5, out=m.scale),
    "out of data": lambda m, x: torch.mul(m.scale, HALF, out=m.scale.data),
    "foreach": lambda m, x: torch._foreach_mul_([m.scale], 0.5),
    "foreach of data": lambda m, x: torch._foreach_clamp_max_([m.scale.data, m.shift], [0.5, 0.5]),
    "T": lambda m, x: m.scale[None].T.clamp_(-0.5, 0.5),
    "init": lambda m, x: nn.init.constant_(m.scale, 0.3),
    "init of a view": lambda m, x: nn.init.uniform_(m.scale[:3]),
    "unbind": lambda m, x: first_of(m.scale.unbind(0)),
    "chunk": lambda m, x: first_of(m.scale.chunk(3)),
    "augmented": lambda m, x: halved(m.scale.data),
    "as_strided": lambda m, x: torch.as_strided(m.scale, (3,), (2,)).mul_(0.5),
    "index_fill": lambda m, x: m.scale.index_fill_(0, torch.tensor([1]), 0.1),
    "copy": lambda m, x: m.scale[2:].copy_(HALF[2:]),
}
OF_BUFFERS = {
    "view": lambda m, x: m.shift.view(-1).clamp_(-0.5, 0.5),
    "data": lambda m, x: m.shift.data.mul_(0.5),
    "item": lambda m, x: m.shift.__setitem__(0, 0.1),
    "item from an activation": lambda m, x: m.shift.__setitem__(0, m.enter(x).mean()),
    "out": lambda m, x: torch.mul(m.shift, HALF, out=m.shift),
}


def recorded(write):
    kind = type("Written", (Written,), {"write": write})
    model, inputs, loss = prepared(kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = record(model, inputs, training=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    expected = own_forward(model, inputs, loss, made.opened)
    for cuts in every_cut(made):
        assert difference(in_slices(made, cuts, model, inputs, loss), expected) is None, cuts
    return made


@pytest.mark.parametrize("write", OF_PARAMETERS.values(), ids=OF_PARAMETERS)
def test_a_parameter_that_a_forward_writes_to_makes_one_layer(write):
    """One stage wrote to its copy, another used its own; and behind the last use, the microbatches before the
    write still had their backward to come."""
    made = recorded(write)
    assert [*made.forbidden] == [*range(1, len(made.events))] and len(made.layers) == 1
    assert all("is written to, and used" in r or "writes to scale" in r for r in made.forbidden.values())


@pytest.mark.parametrize("write", OF_BUFFERS.values(), ids=OF_BUFFERS)
def test_a_buffer_that_a_forward_writes_to_is_used_on_one_side_of_a_cut(write):
    made = recorded(write)
    assert "shift is written to, and used on both sides" in {*made.forbidden.values()}.pop()


def test_weights_that_share_memory_are_written_to_together():
    """Only the last of them was."""

    class Flat(models.Base):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.randn(2, models.WIDTH, dtype=torch.float64)
            self.first, self.second = nn.Parameter(flat[0]), nn.Parameter(flat[1])

        def forward(self, x):
            with torch.no_grad():
                self.first.clamp_(-0.1, 0.1)
            return super().forward(x) * self.first[:5] * self.second[:5]

    made = record(Flat().double(), torch.randn(8, 20, dtype=torch.float64), training=True)
    assert {*made.overwritten} == {"first", "second"}


class Own(nn.Module):
    """Writes to its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x):
        self.linear.weight.data.mul_(0.9)
        return self.linear(x)


def test_a_module_that_writes_to_its_own_weight_makes_one_layer():
    """Under several stages the backward took weights that later microbatches had written to."""
    model = models.Base().double()
    model.blocks[1] = Own().double()
    made = record(model, torch.randn(8, 20, dtype=torch.float64), training=True)
    assert len(made.layers) == 1 and "writes to blocks.1.linear.weight, whose" in made.forbidden[1]


def test_an_embedding_that_keeps_its_norm_is_cut():
    """Its gradient does not read the weight."""

    class Embeds(models.Base):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 20, max_norm=1.0)

        def forward(self, x):
            return super().forward(self.embed(x))

    assert len(record(Embeds(), torch.arange(8), training=True).layers) > 1


def test_a_tensor_that_is_filled_is_filled_in_slices():
    """Its items were written to out of sight where it follows from the inputs and the items do not."""

    class Fills(models.Base):
        def forward(self, x):
            x = self.enter(x)
            filled = torch.zeros(len(x), models.WIDTH, dtype=x.dtype)
            filled[:, 0] = x[:, 0]
            filled[:, 1:3].copy_(x[:, 3:5])
            for block in self.blocks:
                x = block(x)
            return self.head(x + filled)

    model, inputs, loss = prepared(Fills)
    made = record(model, inputs, training=True)
    expected = own_forward(model, inputs, loss)
    for cuts in every_cut(made):
        assert difference(in_slices(made, cuts, model, inputs, loss), expected) is None, cuts


class KeepsView(models.Base):
    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.kept, self.average = [self.head.weight.data], torch.zeros(5, dtype=torch.float64)

    def forward(self, x):
        return super().forward(x) + self.kept[0].square().sum()


class FillsPlain(KeepsView):
    def forward(self, x):
        out = models.Base.forward(self, x)
        self.average[0] = out.detach().mean()
        return out + self.average


@pytest.mark.parametrize(
    "kind, told",
    [
        (KeepsView, r"a view of head.weight that was made before the forward \(make it in the forward\)"),
        (FillsPlain, r"__setitem__ writes to a tensor that is no buffer \(register it as one\)"),
    ],
)
def test_what_a_stage_would_not_see_is_refused(kind, told):
    with pytest.raises(Unsplittable, match=rf"^test_writes.py:\d+: {told}$"):
        record(kind(), torch.randn(8, 20, dtype=torch.float64), training=True)


class SetsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x):
        self.linear.weight.data = self.linear.weight.data * 0.9
        return self.linear(x)


def to_parameters(m, x):
    nn.utils.vector_to_parameters(HALF, [m.scale])


@pytest.mark.parametrize("where", ["between", "inside", "vector_to_parameters", "buffer", "set_"])
def test_new_data_are_refused_before_they_are_set(where):
    """The parameter was on the meta device afterwards, without its numbers."""
    writes = {
        "vector_to_parameters": to_parameters,
        "between": lambda m, x: setattr(m.scale, "data", m.scale.data * 0.9),
        "buffer": lambda m, x: setattr(m.shift, "data", m.shift * 0.9),
        "set_": lambda m, x: m.scale.set_(HALF.clone()),
    }
    model = type("Written", (Written,), {"write": writes.get(where, lambda m, x: None)})().double()
    if where == "inside":
        model.blocks[1] = SetsInside().double()
    before = {name: (tensor.clone(), tensor.data_ptr()) for name, tensor in model.state_dict().items()}
    with pytest.raises(Unsplittable, match=r"set.*, on a parameter or buffer \(write in place, as"):
        record(model, torch.randn(8, 20, dtype=torch.float64), training=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name][0]) and tensor.data_ptr() == before[name][1]
    inputs = torch.randn(8, 20, dtype=torch.float64)
    expected, layers = copy.deepcopy(model)(inputs), layers_of(model, inputs)
    stage = Stage(layers.stage(0, layers.num_layers), torch.device("cpu"))
    assert layers.num_layers == 1 and torch.equal(stage.infer(0, inputs, 0), expected)


def test_memory_that_a_forward_exchanges_unseen_is_put_back():
    class Swaps(Written):
        def write(self, x):
            torch._C._swap_tensor_impl(self.shift, self.shift.clone())

    model = Swaps().double()
    before = model.shift.clone()
    with pytest.raises(
        Unsplittable, match=r"^the end of the forward: set_ or swap_tensors of shift, on a param"
    ):
        record(model, torch.randn(8, 20, dtype=torch.float64), training=True)
    assert torch.equal(model.shift, before)


@pytest.mark.parametrize("kind", [models.ClampsParameter, refused.SetsData])
def test_a_forward_that_writes_to_parameters_runs_in_the_order_of_one_process_only(kind):
    """Under gpipe all forwards wrote first; zero-bubble and recompute lost a write, or made it twice."""
    layers = layers_of(kind().double(), torch.randn(8, 20, dtype=torch.float64))
    layers.check_plan(Plan((StageSpec(0, 1),)))
    told = r"(refused|models)\.py:\d+: .*\(use plan='dp' with schedule = '1f1b' and without recompute\)"
    for plan in [
        Plan((StageSpec(0, 1),), schedule="gpipe"),
        Plan((StageSpec(0, 1),), schedule="zero-bubble"),
        Plan((StageSpec(0, 1),), recompute=True),
    ]:
        with pytest.raises(ValueError, match=f"^{told}$"):
            layers.check_plan(plan)


class ClampsSmallBatches(models.Base):
    def forward(self, x):
        if len(x) < 8:
            with torch.no_grad():
                self.enter.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_a_later_record_that_writes_to_a_parameter_is_refused_where_the_first_would_be():
    """Only the first microbatch's record was asked."""
    layers = layers_of(ClampsSmallBatches().double(), torch.randn(8, 20, dtype=torch.float64))
    stage, small = layers.stage(0, layers.num_layers), torch.randn(4, 20, dtype=torch.float64)
    stage.form(4, lambda: small, training=True)
    stage.renew()
    stage.alternates = False
    with pytest.raises(
        Unsplittable, match=r"^test_writes.py:\d+: writes to enter.weight, .* \(use plan='dp' with"
    ):
        stage.form(4, lambda: small, training=True)


def test_a_forward_that_calls_backward_runs_with_one_microbatch_on_one_rank_only():
    """Each replica and microbatch added its gradients whole, without its share of the minibatch."""
    layers = layers_of(refused.BackwardsInside().double(), torch.randn(8, 20, dtype=torch.float64))
    layers.check_plan(Plan((StageSpec(0, 1),), num_microbatches=1))
    told = r"^refused.py:\d+: backward in the forward .*: only one rank and one microbatch a"
    for plan in (Plan((StageSpec(0, 1, 2),)), Plan((StageSpec(0, 1),), num_microbatches=2)):
        with pytest.raises(ValueError, match=told):
            layers.check_plan(plan)
