from itertools import pairwise

import pytest
import torch
from torch import nn

from hybridpipe import Plan, StageSpec
from hybridpipe.model.recording import Unsplittable
from hybridpipe.model.sequential import check_plan, holders, num_layers, stage_module


def plan(*edges: int, **options) -> Plan:
    return Plan(tuple(StageSpec(start, stop) for start, stop in pairwise(edges)), **options)


def test_the_layers_are_the_children_in_order():
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1)))
    last = stage_module(model, 1, 2)
    assert num_layers(model) == 2 and list(last.module) == [model[1]]
    assert list(last.tensors()) == ["1.1.weight", "1.1.bias"]
    assert last.described("0.1.bias") == "layer 1 (Sequential), 1.bias"


def test_names_are_the_models_own():
    model = nn.Sequential()
    model.add_module("first", nn.Linear(2, 2))
    model.add_module("last", nn.ReLU())
    assert stage_module(model, 0, 2).names == ["first", "last"]
    assert list(stage_module(model, 0, 1).parameters().values()) == ["first.weight", "first.bias"]


def test_a_module_may_stand_twice():
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu)
    assert list(stage_module(model, 0, 4).module) == list(model)
    check_plan(model, plan(0, 2, 4))


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"must be an nn\.Module, got function"):
        num_layers(lambda x: x)
    with pytest.raises(ValueError, match="at least one layer"):
        num_layers(nn.Sequential())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x, *, mask=None):
        value = self.body(x) * self.scale
        return value if mask is None else value * mask


def test_any_other_model_is_one_layer_with_the_models_own_keys():
    model = Net()
    whole = stage_module(model, 0, 1)
    assert num_layers(model) == 1 and list(whole.module) == [model]
    assert list(whole.tensors()) == list(model.state_dict()) == ["scale", "body.weight", "body.bias"]
    assert holders(model, plan(0, 1)) == dict.fromkeys(model.state_dict(), (0,))
    version = {"scale": torch.zeros(2), "body.weight": torch.ones(2, 2), "body.bias": torch.ones(2)}
    assert whole.weights([version]) == version
    assert whole.described("0.body.bias") == "the model (Net), body.bias"
    assert whole.numbered("0.body") == "body"
    with pytest.raises(ValueError, match=r"has 1 layer: Net cannot be cut; use plan='dp'"):
        check_plan(model, plan(0, 1, 2), why_whole="Net cannot be cut")


def run(layers, inputs):
    return layers.run(None, inputs, lambda *_: None, training=True)


@pytest.mark.parametrize("kind", [dict, tuple, list, "one value"])
def test_a_model_that_is_one_layer_takes_a_dict_by_keyword_and_a_tuple_by_position(kind):
    model, x, mask = Net(), torch.randn(3, 2), torch.tensor([0.0, 1.0])
    inputs = {dict: {"x": x, "mask": mask}, tuple: (x,), list: [x], "one value": x}[kind]
    expected = model(x, mask=mask) if kind is dict else model(x)
    assert torch.equal(run(stage_module(model, 0, 1), inputs), expected)


def test_a_layer_of_a_sequential_takes_any_value_as_one_argument():
    class Add(nn.Module):
        def forward(self, values):
            return sum(values.values()) if isinstance(values, dict) else sum(values)

    one = torch.ones(2)
    layers = stage_module(nn.Sequential(Add()), 0, 1)
    assert run(layers, {"a": one, "b": one}).tolist() == run(layers, (one, one)).tolist() == [2, 2]


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Scaled(nn.Sequential):
    def __init__(self, *layers):
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.ones(()))


def test_a_sequential_that_does_more_than_call_its_children_is_one_layer():
    """Stages of its children would run these only, which is silently another function."""
    for model in (Residual(nn.Linear(2, 2), nn.ReLU()), Scaled(nn.Linear(2, 2), nn.ReLU())):
        assert num_layers(model) == 1
        assert [*stage_module(model, 0, 1).tensors()] == [*model.state_dict()]
    both = torch.ones(1, 2), torch.ones(1, 2)
    assert run(stage_module(Scaled(nn.Identity()), 0, 1), both) is both  # as PyTorch calls it
    assert num_layers(nn.Sequential(Residual(nn.Linear(2, 2)), Scaled(nn.Linear(2, 2)))) == 2


def tied() -> nn.Sequential:
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    last.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), last)


def test_a_parameter_is_held_by_every_stage_that_uses_it_and_owned_by_the_first():
    model = tied()
    check_plan(model, plan(0, 1, 3))
    held = holders(model, plan(0, 1, 3))
    assert held == {"0.weight": (0, 1), "0.bias": (0,), "2.weight": (0, 1), "2.bias": (1,)}
    first, second = stage_module(model, 0, 1), stage_module(model, 1, 3)
    assert (
        list(first.parameters().values()) == list(first.owned_parameters().values()) == ["0.weight", "0.bias"]
    )
    assert second.parameters() == {model[0].weight: "0.weight", model[2].bias: "2.bias"}
    assert second.owned_parameters() == {model[2].bias: "2.bias"}
    assert second.tensors().keys() == {"2.weight", "2.bias"}
    assert set(holders(model, plan(0, 3)).values()) == {(0,)}


def test_a_buffer_that_nobody_writes_to_may_be_in_several_stages():
    layer = nn.Linear(2, 2)
    layer.register_buffer("mask", torch.ones(2))
    layer.register_buffer("positions", torch.ones(2), persistent=False)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    check_plan(model, plan(0, 1, 3))
    assert holders(model, plan(0, 1, 3))["2.mask"] == (0, 1)
    assert stage_module(model, 1, 3).shared_buffers == ["1.mask", "1.positions"]
    assert stage_module(model, 0, 3).shared_buffers == []


class Shrinks(nn.Linear):
    def forward(self, x):
        self.weight.data.mul_(0.9)
        return super().forward(x)


def test_a_layer_that_writes_to_its_parameter_is_refused_where_forwards_overtake_backwards():
    """Under gpipe all forwards wrote before the first backward, which then used the last numbers."""
    model, x = nn.Sequential(nn.BatchNorm1d(2), Shrinks(2, 2)), torch.ones(3, 2)
    stages = [stage_module(model, 0, 2), stage_module(model, 1, 2), stage_module(model, 0, 1)]
    run(stages[0], x)
    for stage in stages:
        stage.alternates = False
    told = r"^the forward writes to layer 1 \(Shrinks\), weight, .* \(use plan='dp' with schedule = '1f1b'"
    for stage in stages[:2]:
        stage.run(None, x, lambda *_: None, training=False)
        with pytest.raises(Unsplittable, match=told):
            run(stage, x)
    run(stages[2], x)
