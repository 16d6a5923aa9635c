"""Recorded stages: what messages call their tensors, and what plans they fit."""

import re

import pytest
import torch
from torch import nn

from hybridpipe.model.layers import layers_of
from hybridpipe.model.recording import Unsplittable
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.stage.stage import Stage
from hybridpipe.stage.weights import WeightVersions, check_no_foreign_weights, check_no_other_weights
from tests.model.recording import models

INPUTS = torch.randn(8, 20, dtype=torch.float64)


class Scaled(models.Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(models.WIDTH))

    def between(self, x, i):
        return x * self.scale


def test_a_tensor_is_described_by_the_path_of_its_module():
    stage = layers_of(Scaled().double(), INPUTS).stage(1, 3)
    described = {stage.key(path): stage.described(path) for path, _ in stage.module.named_parameters()}
    assert described["blocks.1.0.weight"] == "blocks.1.0 (Linear), weight"
    assert described["scale"] == "the model (Scaled), scale"


def test_a_parameter_of_another_stage_is_described_by_its_key():
    layers = layers_of(models.Base().double(), INPUTS)
    last = layers.stage(layers.num_layers - 1, layers.num_layers)
    outputs = torch.ones(2, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^the loss uses enter\.weight, which is not in the last stage"):
        check_no_foreign_weights(layers.model.enter.weight.sum(), outputs, last)
    with pytest.raises(ValueError, match=r"^the loss uses a parameter of shape \(3,\), which is not"):
        check_no_foreign_weights(nn.Parameter(torch.ones(3)).sum(), outputs, last)


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(models.WIDTH))
        self.hidden = [self.weight]

    def forward(self, x):
        return x * self.hidden[0]


def test_a_leaf_module_that_hides_a_weight_is_named():
    model = models.Base().double()
    model.blocks[1] = Hides().double()
    layers = layers_of(model, INPUTS)
    stage = Stage(layers.stage(0, layers.num_layers - 1), torch.device("cpu"))
    weights = WeightVersions(stage.module).current()
    form = stage.layers.form(len(INPUTS), lambda: INPUTS, training=True)
    with pytest.raises(ValueError, match=r"^blocks.1 \(Hides\), weight: the parameter is used from another"):
        stage.forward(0, None, 0, weights, inputs=INPUTS, form=form)
    assert check_no_other_weights(torch.ones(2), stage.layers) is None


def test_a_version_of_the_weights_has_the_models_keys():
    """They are saved in the middle of an epoch of an asynchronous schedule."""
    stage = layers_of(Scaled().double(), INPUTS).stage(1, 3)
    versions = WeightVersions(stage.module).current()
    assert stage.weights(versions).keys() == set(stage.parameters().values())


class Returns(models.Base):
    def forward(self, x):
        return super().forward(x), self.enter.weight


def test_a_parameter_that_is_returned_is_held_by_the_last_stage():
    layers = layers_of(Returns().double(), INPUTS)
    plan = Plan(tuple(StageSpec(i, i + 1) for i in range(layers.num_layers)))
    assert layers.holders(plan)["enter.weight"] == (0, layers.num_layers - 1)


class KeepsInput(models.Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(20))

    def forward(self, x):
        self.last = x.mean(0)
        return super().forward(x)


def test_a_buffer_that_follows_from_the_inputs_is_kept():
    model = KeepsInput().double()
    stage = Stage(layers_of(model, INPUTS).stage(0, 5), torch.device("cpu"))
    form = stage.layers.form(len(INPUTS), lambda: INPUTS, training=False)
    stage.infer(0, None, 0, INPUTS, form)
    assert torch.equal(model.last, INPUTS.mean(0))


class Calibrated(models.Base):
    """Calls a layer in evaluation only, and one of two branches, which another step may change."""

    def __init__(self) -> None:
        super().__init__()
        self.calibrate = nn.Sequential(nn.Linear(5, 5), nn.ReLU())
        self.branches = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def forward(self, x, branch=0):
        x = self.branches[branch](super().forward(x))
        return x if self.training else self.calibrate(x)


def test_one_stage_runs_modules_that_the_first_forward_did_not_use():
    """It held their parameters only, and calling them failed."""
    model = Calibrated().double()
    layers = layers_of(model, INPUTS)
    stage = Stage(layers.stage(0, layers.num_layers), torch.device("cpu"))
    inputs = INPUTS, 1
    with torch.no_grad():
        expected = model.eval()(*inputs)
    form = stage.layers.form(len(INPUTS), lambda: inputs, training=False)
    assert torch.equal(stage.infer(0, None, 0, inputs, form), expected)
    assert stage.layers.tensors().keys() == model.state_dict().keys()


def test_a_later_stage_says_that_the_first_holds_what_was_not_used():
    model = Calibrated().double()
    layers = layers_of(model, INPUTS)
    last = Stage(layers.stage(1, layers.num_layers), torch.device("cpu"))
    model.eval()
    with pytest.raises(Unsplittable, match=r"uses calibrate\.0, which the first training step did not use"):
        last.layers.form(len(INPUTS), lambda: INPUTS, training=False)


class Hooks(models.Base):
    def forward(self, x):
        hidden = self.enter(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: 0.1 * gradient)
        return self.head(hidden)


class Draws(models.Base):
    generator = torch.Generator()

    def forward(self, x):
        return super().forward(x + torch.rand(20, generator=self.generator))


class Writes(models.Base):
    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(models.WIDTH, dtype=torch.float64)

    def forward(self, x):
        hidden = self.enter(x)
        self.average.mul_(0.9)
        return self.head(hidden + self.average)


class CountsOnly(models.Base):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.head(self.enter(x))


class CountsThenChanges(CountsOnly):
    """Two recordings agree, and a later call would take another path."""

    def forward(self, x):
        out = super().forward(x)
        return out if self.calls < 1000 else out * 0.5


TIMES, WARMED = 0, [0]


def warmed():
    WARMED[0] += 1
    return WARMED[0] > 1000


class CountsInAGlobal(models.Base):
    def forward(self, x):
        global TIMES
        TIMES += 1
        return self.head(self.enter(x if TIMES < 1000 else x * 2))


class CountsInAHelper(models.Base):
    def forward(self, x):
        return self.scaled(self.head(self.enter(x)))

    def scaled(self, x):
        return x * 0.5 if warmed() else x


class CountsInItsClass(models.Base):
    count = 0

    def forward(self, x):
        CountsInItsClass.count += 1
        return self.head(self.enter(x if self.count < 1000 else x * 2))


class Seeds(models.Base):
    def forward(self, x):
        torch.manual_seed(0)
        return self.head(self.enter(x))


@pytest.mark.parametrize(
    "kind, told",
    [
        (CountsOnly, "before it the forward changes calls of the model in each call, .* recording only"),
        (CountsThenChanges, "before it the forward changes calls of the model in each call"),
        (CountsInAGlobal, r"before it the forward changes TIMES of \S*test_recorded in each call"),
        (CountsInAHelper, r"before it the forward changes warmed of \S*test_recorded in each call"),
        (
            CountsInItsClass,
            r"before it the forward changes CountsInItsClass of \S*test_recorded in each call",
        ),
        (Seeds, "before it the forward seeds torch's random numbers"),
        (Hooks, "register_hook outside leaf modules .call it inside a module"),
        (Draws, "rand draws from a generator of the user's"),
        (Writes, "mul_ writes to a tensor that is no buffer .register it as one"),
    ],
)
def test_what_later_runs_would_not_see_is_refused(kind, told):
    """Gradients, noise and averages would silently be others in stages and in later runs."""
    layers = layers_of(kind().double(), INPUTS)
    assert layers.num_layers == 1 and re.search(
        rf"^(test_recorded.py:\d+|the end of the forward): {told}", layers.why_whole
    )


class RarelySkips(models.Base):
    """Leaves a block out once in 10 000 draws, which no trial at the recording meets."""

    def forward(self, x):
        x = self.enter(x)
        if torch.rand(()) > 1e-4:
            x = self.blocks[0](x)
        return self.head(x)


def test_a_rare_random_path_is_told_when_it_comes():
    """The record has one path, which would silently be taken always."""
    stage = Stage(layers_of(RarelySkips().double(), INPUTS).stage(0, 3), torch.device("cpu"))
    form = stage.layers.form(len(INPUTS), lambda: INPUTS, training=False)
    runs = (stage.infer(0, None, step, INPUTS, form) for step in range(100_000))
    with pytest.raises(ValueError, match="random numbers decide which way the forward takes"):
        for _ in runs:
            pass


class InRegion(models.Base):
    """Writes within a checkpoint to what another module has made in it."""

    def region(self, x):
        return self.head(nn.functional.relu_(self.enter(x)))

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.region, x, use_reentrant=False)


def test_no_cut_divides_a_checkpoint_that_writes_across_it():
    """The part behind the cut would write a second time when it is computed again."""
    record = layers_of(InRegion().double(), INPUTS).record
    names = [event.name for event in record.events]
    assert "writes in place within a checkpoint" in record.forbidden[names.index("relu_")]
    assert names.index("head") not in record.forbidden


class Listed(models.Base):
    """Reads numbers from a list, and adds a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = [2.0]
        self.register_buffer("shift", torch.zeros(20, dtype=torch.float64))

    def forward(self, x):
        return self.head(self.enter(x + self.shift) * self.scales[0])


@pytest.mark.parametrize("change", ["list", "buffer"])
def test_a_list_or_a_buffer_that_users_change_is_taken_up(change):
    """A number of the list stands in the record, and the stage held the first buffer."""
    model = Listed().double()
    layers = layers_of(model, INPUTS)
    stage = Stage(layers.stage(0, 2), torch.device("cpu"))

    def outputs():
        form = stage.layers.form(len(INPUTS), lambda: INPUTS, training=False)
        return stage.infer(0, None, 0, INPUTS, form)

    assert torch.equal(outputs(), model(INPUTS)) and not layers.settings.changed()
    if change == "list":
        model.scales[0] = 3.0
    else:
        model.shift = torch.ones(20, dtype=torch.float64)
    assert layers.settings.changed() and not layers.settings.changed()
    layers.renew()
    stage.layers.renew()
    assert torch.equal(outputs(), model(INPUTS))


def test_a_plan_of_other_layers_is_refused_with_the_reason_if_there_is_one():
    several, one = layers_of(models.Base().double(), INPUTS), layers_of(nn.Linear(20, 2).double(), INPUTS)
    plan = Plan((StageSpec(0, 1), StageSpec(1, 2)))
    with pytest.raises(ValueError, match=r"^the plan cuts num_layers = 2, the model has 5 layers$"):
        several.check_plan(plan)
    told = "the model has 1 layer: its forward calls no modules between which to cut; use plan='dp'$"
    with pytest.raises(ValueError, match=told):
        one.check_plan(plan)


class OnItsDevice(models.Base):
    """A forward that asks for tensors where its inputs are, as models for GPUs do."""

    def between(self, x, i):
        rows = torch.arange(len(x), device=x.device, dtype=x.dtype)
        shift = torch.zeros(1, dtype=x.dtype).to(x.device) + torch.ones(1, dtype=x.dtype).to(x)
        return x + rows[:, None] + shift


def test_what_a_forward_makes_on_the_device_of_its_inputs_is_on_the_stages():
    """The meta device stands for a GPU: it mixes with no other."""
    meta = torch.device("meta")
    layers = layers_of(OnItsDevice().double(), INPUTS)
    stages = [Stage(layers.stage(0, 2), meta), Stage(layers.stage(2, layers.num_layers), meta)]
    value = None
    for stage in stages:
        form = stage.layers.form(8, lambda: INPUTS, training=True)
        value = stage.forward(0, value, 0, inputs=INPUTS.to(meta), form=form)
    assert value.device == meta and value.shape == (8, 5)


def test_other_shapes_are_recorded_while_the_model_is_on_several_devices():
    layers = layers_of(OnItsDevice().double(), INPUTS)
    stage = Stage(layers.stage(0, 2), torch.device("meta"))
    weights = {name: tensor.device.type for name, tensor in layers.model.state_dict().items()}
    assert set(weights.values()) == {"cpu", "meta"}
    few = INPUTS[:3]
    form = stage.layers.form(3, lambda: few, training=True)
    outputs = stage.forward(0, None, 0, inputs=few.to("meta"), form=form)
    assert {len(output) for output in outputs} == {3}
    assert {name: tensor.device.type for name, tensor in layers.model.state_dict().items()} == weights
