"""Recording: what is refused, and that the model is left as it was."""

import copy
import inspect
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hybridpipe.model.recording import Unsplittable, record

from . import models, refused
from .slicing import in_slices

INPUTS = torch.randn(8, 20, dtype=torch.float64)
REFUSED = [
    (
        refused.ReadsActivation,
        "item reads data that only one stage has (keep it a tensor, as torch.where",
    ),
    (refused.RaisesOnNan, "__bool__ reads data that only one stage has (keep it a tensor"),
    (refused.CountsRows, "__getitem__ reads data that only one stage has (multiply by a mask"),
    (refused.LayerDrop, "random numbers decide which way the forward takes (draw them inside a module)"),
    (refused.DrawsPython, "draws Python's or NumPy's random numbers outside its leaf modules (use torch's"),
    (refused.DrawsNumpy, "draws Python's or NumPy's random numbers outside its leaf modules (use torch's"),
    (refused.CarriesState, "a tensor that was made out of sight"),
    (refused.CountsIn, "is not the same in two calls"),
    (refused.Maps, "vmap or grad outside leaf modules (call it inside a module)"),
    (refused.BoundBefore, "a tensor got its gradient out of sight"),
    (refused.Scripted, "a tensor that was made out of sight"),
    (refused.Backwards, "backward in the forward (use torch.autograd.grad, or return that loss and add it"),
    (refused.BackwardsInside, "backward in the forward (use torch.autograd.grad, or return that loss"),
    (refused.BackwardsByFunction, "backward in the forward (use torch.autograd.grad, or return that loss"),
    (refused.SetsData, "set data, on a parameter or buffer"),
    (refused.HidesWeightInCheckpoint, "uses blocks.0.0.weight out of sight (use_reentrant=False)"),
    (refused.NumberFromUnit, "returns a shape or a number that follows from data"),
]


def marked_line(kind) -> str:
    lines, first = inspect.getsourcelines(kind)
    return f"refused.py:{first + next(i for i, line in enumerate(lines) if '# HERE' in line)}"


@pytest.mark.parametrize("kind, reason", REFUSED, ids=lambda each: getattr(each, "__name__", ""))
def test_refused_with_the_line(kind, reason):
    model = kind().double()
    with pytest.raises(Unsplittable) as refusal:
        record(model, INPUTS, training=True)
    assert reason in str(refusal.value)
    assert str(refusal.value).startswith(marked_line(kind))
    assert "\n" not in str(refusal.value)


def test_outputs_that_are_no_trees_are_refused_with_a_hint():
    with pytest.raises(
        Unsplittable, match=r"the model's output holds tensors in a Box, which is no pytree \(use a tuple"
    ):
        record(refused.BoxOut().double(), INPUTS, training=True)
    with pytest.raises(Unsplittable, match=r"a DynamicCache, which is no pytree \(pass use_cache=False\)$"):
        record(refused.CacheOut().double(), INPUTS, training=True)


def test_a_loss_that_reads_an_attribute_is_refused():
    model, targets = refused.KeepsAuxiliary().double(), torch.zeros(8, dtype=torch.long)

    def honest(out, targets):
        return nn.functional.cross_entropy(out[targets >= 0], targets)

    def stale(out, targets):
        return honest(out, targets) + model.auxiliary

    record(model, INPUTS, training=True, loss=honest, targets=targets)
    with pytest.raises(
        Unsplittable, match=r"^test_forward.py:\d+: the loss reads a tensor that the forward makes"
    ):
        record(model, INPUTS, training=True, loss=stale, targets=targets)


def test_an_error_of_the_forward_is_told_in_one_line():
    with pytest.raises(Unsplittable, match=r"^models.py:\d+: recording fails: RuntimeError") as refusal:
        record(models.Base(), torch.randn(8, 3), training=True)
    assert "\n" not in str(refusal.value)


def test_a_loss_that_fails_on_random_numbers_gets_those_of_the_forward():
    class Judges(refused.KeepsAuxiliary):
        def forward(self, x):
            return super().forward(x).sigmoid()

    model, targets = Judges().double(), torch.ones(8, 5, dtype=torch.float64)
    record(model, INPUTS, training=True, loss=nn.functional.binary_cross_entropy, targets=targets)

    def stale(out, targets):
        return nn.functional.binary_cross_entropy(out, targets) + model.auxiliary

    with pytest.raises(Unsplittable, match="the loss reads a tensor that the forward makes"):
        record(model, INPUTS, training=True, loss=stale, targets=targets)


class Balances(nn.Module):
    """A loss that keeps a running mean, which must not see the recording's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5, dtype=torch.float64))
        self.calls = 0

    def forward(self, out, targets):
        self.calls += 1
        self.mean.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
        return nn.functional.cross_entropy(out - self.mean, targets), torch.tensor(8.0)


def test_a_loss_is_left_as_it_was():
    loss = Balances()
    record(models.Base().double(), INPUTS, training=True, loss=loss, targets=torch.zeros(8, dtype=torch.long))
    assert loss.calls == 0 and not loss.mean.any()


HOOKED = ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]


@pytest.mark.parametrize("register", HOOKED)
@pytest.mark.parametrize("path, named", [("", "the model (Hooks)"), ("blocks.1", "blocks.1 (Pair)")])
def test_hooks_of_a_module_that_is_opened_are_refused_before_they_run(register, path, named):
    """Slices never call the module. `blocks` are opened only since hooks of their parts gather tensors."""
    model, seen = models.Hooks().double(), []
    getattr(model.get_submodule(path), register)(lambda *_: seen.append(1))
    with pytest.raises(Unsplittable) as refusal:
        record(model, INPUTS, training=True)
    assert str(refusal.value) == (
        f"{named} has hooks, which would run at the recording only (register them on its children)"
    )
    assert not seen or path


def test_hooks_of_leaf_modules_and_of_modules_without_parameters_run_in_slices():
    class Activates(models.Base):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def between(self, x, i):
            return self.act(x)

    model, seen = Activates().double(), []
    for path in ("act", "blocks.1.0"):
        module = model.get_submodule(path)
        module.register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    made = record(model, INPUTS, training=True)
    seen.clear()
    in_slices(made, [], model, INPUTS, torch.sum)
    assert seen == ["ReLU", "Linear", "ReLU", "ReLU"]


class Leaves(models.Base):
    """Leaves traces on everything that a forward can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(models.WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.norm = nn.BatchNorm1d(models.WIDTH)
        self.seen: list[int] = []

    def forward(self, x):
        if not self.seen:
            self.seen.append(1)
        self.fresh = self.enter(x)
        self.steps += 1
        self.mean = self.mean + 1
        self.norm.eps = 1e-3
        if not self.enter._forward_hooks:
            self.enter.register_forward_hook(lambda *_: None)
        y = self.norm(torch.dropout(self.fresh, 0.5, self.training))
        with torch.no_grad():
            self.head.weight.clamp_(-0.01, 0.01)
        return self.head(y)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_model_is_left_as_it_was(training, fails):
    model = Leaves().double()
    model.blocks.eval()
    model.enter.weight.requires_grad_(False)
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    attributes = [set(module.__dict__) for module in model.modules()]
    objects = {name: id(buffer) for name, buffer in model.named_buffers()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()

    if fails:
        with pytest.raises(Unsplittable):
            record(model, INPUTS[:, :3], training=training)
    else:
        record(model, INPUTS, training=training)

    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert objects == {name: id(buffer) for name, buffer in model.named_buffers()}
    assert modes == [module.training for module in model.modules()]
    assert attributes == [set(module.__dict__) for module in model.modules()]
    assert model.seen == [] and not model.enter._forward_hooks and model.norm.eps == 1e-5
    assert not model.enter.weight.requires_grad and model.head.weight.requires_grad
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert (states[2] == np.random.get_state()[1]).all()
    assert "__call__" not in nn.Linear.__dict__ and torch.autograd.Function.apply.__name__ == "apply"


def test_inputs_are_not_written_to():
    inputs = INPUTS.clone()
    record(models.WritesInput().double(), inputs, training=True)
    assert torch.equal(inputs, INPUTS)


def test_weights_without_numbers_give_the_same_record():
    with torch.device("meta"):
        model = models.Methods().double()
    made = record(model, INPUTS, training=True)
    assert made.digest == record(models.Methods().double(), INPUTS, training=True).digest
    assert all(parameter.is_meta for parameter in model.parameters()) and model.shift.is_meta


def test_a_leaf_module_without_known_shapes_is_run_quietly(capfd):
    made = record(models.Routed().double(), INPUTS, training=True)
    assert [event.name for event in made.events if event.is_module][1:4] == [f"blocks.{i}" for i in range(3)]
    assert capfd.readouterr().err == ""


def test_a_library_whose_name_begins_with_torch_is_not_torch():
    drops: dict = {}
    source = "def half(x):\n    return x if x.mean() > 0 else x * 0.5\n"
    exec(compile(source, f"{Path(torch.__file__).parent}vision/drops.py", "exec"), drops)

    class Library(models.Base):
        def between(self, x, i):
            return drops["half"](x)

    with pytest.raises(Unsplittable, match=r"^drops.py:2: "):
        record(Library().double(), INPUTS, training=True)
