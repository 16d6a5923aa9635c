"""What is measured of experts: tokens of each, their bytes, and the part of a layer's time."""

import functools

import pytest
import torch
from pytest import approx
from torch import nn

from hybridpipe.measure import layers as measured_layers
from hybridpipe.measure import turns
from hybridpipe.measure.experts import counting
from hybridpipe.measure.layers import Rehearsal
from hybridpipe.measure.stopwatch import Stopwatch
from hybridpipe.model.experts import experts_of
from hybridpipe.model.layers import layers_of
from tests.measure.helpers import CountingStopwatch
from tests.mixtures import (
    EXPERTS,
    PLAN_OF_RECORDED,
    WIDTH,
    Experts,
    Recorded,
    mixtures,
    of_classes,
    points_of,
)

SAMPLES = 6


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch):
    monkeypatch.setattr(turns, "MAX_REPEATS", 3)


def test_experts_of_a_recorded_model_are_counted_where_they_are():
    torch.manual_seed(1)
    model, (inputs, targets) = Recorded(mixtures()).double(), points_of(SAMPLES)
    experts = experts_of(model, dict(PLAN_OF_RECORDED))
    layers = layers_of(model, inputs, of_classes, targets).copied()
    found = Rehearsal(layers, inputs, targets, of_classes, experts=experts).measure(sizes=[SAMPLES, 3])
    profiles = {layer.name: layer.experts for layer in found.layers if layer.experts is not None}
    assert list(profiles) == ["layers.1.experts", "layers.2.experts"]
    numbers_of_8_bytes = 8 * sum(p.numel() for p in model.layers[1].experts.parameters())
    for each, k in zip(profiles.values(), (2, 1), strict=True):
        (tokens,) = each.tokens
        assert (len(tokens), sum(tokens)) == (EXPERTS, SAMPLES * k)
        assert each.token_bytes == SAMPLES * k * 8 * (WIDTH + 1)
        assert (each.parameter_bytes, each.replicas) == (numbers_of_8_bytes, 1)
        assert 0 < each.share <= 1
        assert [count for count, _ in each.parts] == [2, 4] and min(seconds for _, seconds in each.parts) > 0
    (halved,) = found.others
    assert halved.layers[2].experts.token_bytes == SAMPLES * 2 * 8 * (WIDTH + 1) // 2
    counted = [torch.bincount(_chosen(model, i, inputs), minlength=EXPERTS).tolist() for i in (1, 2)]
    assert [list(each.tokens[0]) for each in profiles.values()] == counted
    assert all("forward" not in vars(module) for module in layers.model.modules())


def test_fewer_experts_with_large_weights_take_less_time(monkeypatch):
    """Of experts of one token each nearly all work is with weights, of which a quarter has a quarter.

    On two hosts a replica with a quarter of them was predicted to take four times as long as it did.
    """

    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 256, 256))

        def forward(self, tokens, index, weights):
            made = torch.bmm(self.weight, tokens.expand(len(self.weight), *tokens.shape).mT)
            return tokens + made.sum((0, 2)) * weights.sum()

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = Large()

        def forward(self, x):
            index = torch.arange(len(x))[:, None] % 8
            return self.experts(x, index, torch.ones(len(x), 1))

    model, inputs = nn.Sequential(Mixture(), nn.Linear(256, 3)), torch.randn(8, 256)
    experts = experts_of(model, {"*.experts": "ep_dispatch_experts"})
    layers, targets = layers_of(model, inputs), torch.zeros(8, dtype=torch.long)
    monkeypatch.setattr(measured_layers, "Stopwatch", CountingStopwatch)
    rehearsal = Rehearsal(layers.copied(), inputs, targets, nn.functional.cross_entropy, experts=experts)
    found = dict(rehearsal.measure().layers[0].experts.parts)
    assert sorted(found) == [2, 4, 8]
    assert [found[count] for count in (2, 4, 8)] == [approx(1 / count, rel=0.1) for count in (2, 4, 8)]


def test_a_module_has_the_forward_that_it_was_given():
    module = Experts()
    (found,) = experts_of(nn.Sequential(module), {"0": "ep_dispatch_experts"})
    given = module.forward = functools.partial(Experts.forward, module)
    with counting(nn.Sequential(module), [found], Stopwatch(torch.device("cpu"))) as counted:
        assert module.forward is counted[0]
    assert module.forward is given


def _chosen(model: nn.Module, layer: int, inputs: torch.Tensor) -> torch.Tensor:
    """The experts that a mixture's tokens go to."""
    chosen: list[torch.Tensor] = []
    experts = model.layers[layer].experts
    hook = experts.register_forward_pre_hook(lambda module, given: chosen.append(given[1].reshape(-1)))
    model(inputs)
    hook.remove()
    return chosen[0]
