"""Versions of a stage's weights: correct values, copied only when needed, freed after their last use."""

import copy
import gc
from collections import deque
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from hybridpipe.model.precision import Precision
from hybridpipe.model.stage_module import StageModule
from hybridpipe.stage.weights import (
    WeightVersions,
    check_no_foreign_weights,
    hand_over,
    sparse_parameters,
)
from tests.stage.helpers import Tied, batch, double
from tests.stage.parts import CASES, case, check_same, frozen, gradients_like, stage_of, tensor, train

OPTIONS = [{}, {"split_backward": True}, {"recompute": True}, {"split_backward": True, "recompute": True}]


@pytest.fixture(autouse=True)
def by_reference_count():
    gc.disable()
    yield
    gc.enable()


def chain() -> nn.Sequential:
    return double(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def num_bytes(model) -> int:
    return sum(p.nbytes for p in model.parameters() if p.requires_grad)


def change(versions, model) -> None:
    """Update the parameters in place, as an optimizer does."""
    with versions.update(), torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)


def values(weights) -> list[torch.Tensor]:
    return [tensor.detach().clone() for layer in weights for tensor in layer.values()]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("amid", [False, True])
def test_gradients_arrive_on_the_weights_that_were_given(name, options, amid):
    layers, inputs = case(name)
    plain = stage_of(case(name)[0])
    expected = train(plain, inputs)
    stage = stage_of(layers, **options)
    versions = WeightVersions(stage.module)
    weights = versions.current()
    change(versions, stage.module)  # the backward must not use the Parameters
    with versions.handing_over(weights) if amid else nullcontext():
        check_same(train(stage, inputs, weights=weights), expected)
    assert amid or all(parameter.grad is None for parameter in stage.module.parameters())
    versions.collect(weights)
    check_same([p.grad for p in stage.module.parameters()], [p.grad for p in plain.module.parameters()])
    assert all(leaf.grad is None for layer in weights for leaf in layer.values())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_weight_stashing_is_pipedreams_formula(options, delay):
    """w(t+1) = w(t) - rate * gradient at w(t - delay), with momentum and dropout."""
    data = [(tensor(6, 3), torch.randn(6, 2, dtype=torch.float64)) for _ in range(12)]
    model = chain()
    reference, mse = copy.deepcopy(model), nn.functional.mse_loss
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stage = stage_of(list(model), loss=mse, **options)
    versions = WeightVersions(stage.module)
    in_flight = deque()
    for t, (inputs, targets) in enumerate(data):
        weights = versions.current()
        stage.forward_loss(t, inputs.detach().clone().requires_grad_(), targets, 1.0, 0, weights)
        in_flight.append((t, weights))
        del weights
        if len(in_flight) > delay:
            m, weights = in_flight.popleft()
            stage.backward(m)
            versions.collect(weights)
            del weights
            with versions.update():
                optimizer.step()
            optimizer.zero_grad()
        assert len(versions.alive) <= delay + 1
        assert versions.extra_bytes <= delay * num_bytes(model)
    assert delay == 0 or versions.extra_bytes > 0

    step = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    states = []
    for t in range(len(data) - delay):
        newest = [p.detach().clone() for p in reference.parameters()]
        states.append(newest)
        with torch.no_grad():
            for parameter, old in zip(reference.parameters(), states[max(0, t - delay)]):
                parameter.copy_(old)
        other = stage_of(list(copy.deepcopy(reference)), loss=mse)
        other.forward_loss(t, data[t][0].detach().requires_grad_(), data[t][1], 1.0, 0)
        other.backward(t)
        with torch.no_grad():
            for parameter, now, theirs in zip(reference.parameters(), newest, other.module.parameters()):
                parameter.copy_(now)
                parameter.grad = theirs.grad
        step.step()
    check_same(model.parameters(), reference.parameters())


def test_a_backward_right_behind_its_forward_copies_nothing():
    model = chain()
    stage, versions = stage_of(list(model)), WeightVersions(model)
    addresses = [p.data_ptr() for p in model.parameters()]
    for m in range(4):
        versions.keep_from(m)
        outputs = stage.forward(m, tensor(5, 3), 0, versions.current())
        assert versions.extra_bytes == 0 and versions.alive == [m]
        stage.backward(m, gradients_like(outputs))
        versions.collect(versions.current())
        del outputs
        versions.keep_from(m + 1)
        change(versions, model)
    assert [p.data_ptr() for p in model.parameters()] == addresses and versions.newest == 4


def test_versions_live_as_long_as_somebody_holds_them():
    model = chain()
    stage, versions = stage_of(list(model)), WeightVersions(model)
    size = num_bytes(model)
    for m in range(3):
        stage.forward(m, tensor(5, 3), 0, versions.current())
        change(versions, model)
    assert versions.alive == [0, 1, 2, 3] and versions.extra_bytes == 3 * size
    for m in (1, 0, 2):
        stage.backward(m, [torch.ones(5, 2, dtype=torch.float64)])
        assert m not in versions.alive
    assert versions.alive == [3] and versions.extra_bytes == 0


def test_the_second_half_of_a_backward_holds_its_version():
    model = double(nn.Linear(3, 2))
    stage, versions = stage_of(list(model), split_backward=True), WeightVersions(model)
    stage.forward(0, tensor(5, 3), 0, versions.current())
    stage.backward_input(0, [torch.ones(5, 2, dtype=torch.float64)])
    change(versions, model)
    assert versions.alive == [0, 1]
    stage.backward_weight(0)
    assert versions.alive == [1]


def test_versions_still_to_be_asked_for_are_kept():
    model = chain()
    versions, seen = WeightVersions(model), []
    versions.keep_from(0)
    for _ in range(3):
        seen.append([p.detach().clone() for p in model.parameters()])
        change(versions, model)
    assert versions.alive == [0, 1, 2, 3] and versions.extra_bytes == 3 * num_bytes(model)
    for number in range(3):
        check_same(values(versions.version(number)), seen[number], tolerance=0)
        assert versions.version(number) is versions.version(number)
    versions.keep_from(2)
    assert versions.alive == [2, 3] and versions.extra_bytes == num_bytes(model)
    with pytest.raises(LookupError, match="version 1 are not kept; kept: 2, 3"):
        versions.version(1)
    with pytest.raises(LookupError, match="version 4"):
        versions.version(4)
    versions.keep_from(9)
    assert versions.alive == [3] and versions.current() is versions.version(3)


def test_the_newest_is_the_same_until_the_next_update():
    model = chain()
    versions = WeightVersions(model)
    first = versions.current()
    assert versions.current() is first
    assert [leaf.data_ptr() for layer in first for leaf in layer.values()] == [
        p.data_ptr() for p in model.parameters()
    ]
    before = values(first)
    change(versions, model)
    assert versions.current() is not first
    check_same(values(first), before, tolerance=0)
    check_same(values(versions.current()), [p.detach() for p in model.parameters()], tolerance=0)


def test_a_backward_after_an_update_is_no_error_of_autograd():
    model = chain()
    stage, versions = stage_of(list(model)), WeightVersions(model)
    for m in range(2):
        stage.forward(m, tensor(5, 3), 0, versions.current())
    change(versions, model)
    change(versions, model)
    for m in range(2):
        stage.backward(m, [torch.ones(5, 2, dtype=torch.float64)])


def test_tied_parameters_stay_tied():
    tied = Tied(5, 3).double()
    model = nn.Sequential(tied, nn.Linear(5, 5).double())
    model[1].bias = tied.head.bias
    stage, versions = stage_of(list(model)), WeightVersions(model)
    weights = versions.current()
    assert weights[0]["embedding.weight"] is weights[0]["head.weight"]
    assert weights[0]["head.bias"] is weights[1]["bias"]
    change(versions, model)
    stage.backward(0, gradients_like(stage.forward(0, torch.randint(5, (4,)), 0, weights)))
    bias, seen = model[1].bias, []
    bias.register_post_accumulate_grad_hook(seen.append)
    expected = weights[1]["bias"].grad.clone()
    versions.collect(weights)
    assert len(seen) == 1 and torch.equal(bias.grad, expected)
    assert versions.extra_bytes == num_bytes(model)


def test_gradients_reach_the_parameters_during_the_last_backward():
    """The all-reduces of an asynchronous pipeline can then start before the backward ends."""
    model = chain()
    stage, versions = stage_of(list(model)), WeightVersions(model)
    weights, events = versions.current(), []
    outputs = stage.forward(0, tensor(5, 3), 0, weights)
    weights[0]["weight"].register_hook(lambda _: events.append("first layer's backward"))
    model[3].weight.register_post_accumulate_grad_hook(lambda _: events.append("last layer's gradient"))
    with versions.handing_over(weights):
        stage.backward(0, gradients_like(outputs))
    assert events == ["last layer's gradient", "first layer's backward"]


def test_frozen_parameters_belong_to_no_version():
    model = double(nn.Linear(3, 4), frozen(nn.Linear(4, 4)), frozen(nn.Linear(4, 2), "weight"))
    stage, versions = stage_of(list(model)), WeightVersions(model)
    addresses = [p.data_ptr() for p in model.parameters() if not p.requires_grad]
    stage.forward(0, tensor(5, 3), 0, weights := versions.current())
    assert [sorted(layer) for layer in weights] == [["bias", "weight"], [], ["bias"]]
    with versions.update():
        pass
    assert [p.data_ptr() for p in model.parameters() if not p.requires_grad] == addresses
    assert versions.extra_bytes == num_bytes(model)


def test_gradients_add_up_times_a_factor():
    model = double(nn.Linear(3, 2))
    versions = WeightVersions(model)
    weights = versions.current()
    weights[0]["weight"].grad = torch.ones(2, 3, dtype=torch.float64)
    versions.collect(weights, factor=0.5)
    weights[0]["weight"].grad = torch.ones(2, 3, dtype=torch.float64)
    versions.collect(weights, factor=0.25)
    assert model[0].weight.grad.eq(0.75).all() and model[0].bias.grad is None
    model[0].bias.grad = kept = torch.ones(2, dtype=torch.float64)
    versions.collect(weights)
    assert model[0].bias.grad is kept


def test_a_gradient_that_is_handed_over_is_kept_not_copied():
    """torch.autograd.backward([leaf], [gradient]) would copy every gradient."""
    leaves = [torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)]
    arrived = []
    leaves[1].register_post_accumulate_grad_hook(lambda leaf: arrived.append(leaf.grad.tolist()))
    gradients = [torch.tensor([1.0, 2, 3]), torch.tensor([4.0, 5])]
    places = [gradient.data_ptr() for gradient in gradients]
    hand_over(gradients, leaves)
    assert gradients == [] and [leaf.grad.data_ptr() for leaf in leaves] == places
    hand_over([torch.ones(2)], leaves[1:])
    assert arrived == [[4, 5], [5, 6]] and leaves[0].grad.tolist() == [1, 2, 3]


def test_a_versions_gradient_becomes_the_parameters_without_a_copy():
    layers = nn.Sequential(nn.Linear(2, 2, bias=False))
    versions = WeightVersions(layers)
    weights = versions.current()
    leaf = weights[0]["weight"]
    leaf.grad = torch.ones(2, 2)
    place = leaf.grad.data_ptr()
    versions.collect(weights)
    assert layers[0].weight.grad.data_ptr() == place and leaf.grad is None


def test_gradients_that_share_memory_are_scaled_once():
    """A backward may give two leaves one storage."""
    layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    versions = WeightVersions(layers)
    weights = versions.current()
    gradient = torch.ones(2, 2)
    for leaves in weights:
        leaves["weight"].grad = gradient.view(2, 2)
    versions.collect(weights, 0.5)
    assert all(layer.weight.grad.eq(0.5).all() for layer in layers)


def test_the_optimizers_state_goes_on():
    model = chain()
    optimizer, versions = torch.optim.Adam(model.parameters()), WeightVersions(model)
    held = versions.current()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = values(held)
    for _ in range(2):
        with versions.update():
            optimizer.step()
    check_same(values(held), before, tolerance=0)
    assert all(optimizer.state[parameter]["step"] == 2 for parameter in model.parameters())


def test_a_parameter_used_past_its_module_is_an_error():
    class Hides(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.hidden = [self.weight]

        def forward(self, x):
            return x * self.hidden[0]

    stage = stage_of([nn.Linear(3, 3), Hides()])
    stage.forward(0, torch.randn(2, 3), 0)
    with pytest.raises(
        ValueError, match=r"layer 1 \(Hides\), weight: the parameter is used from another place"
    ):
        stage.forward(1, torch.randn(2, 3), 0, WeightVersions(stage.module).current())


def test_scripted_layers_take_other_weights():
    stage = stage_of([torch.jit.script(nn.Linear(3, 2)), nn.Linear(2, 2)])
    versions = WeightVersions(stage.module)
    weights = versions.current()
    inputs = torch.randn(4, 3)
    expected = stage.forward(0, inputs, 0).detach()
    change(versions, stage.module)
    outputs = stage.forward(1, inputs, 0, weights)
    assert torch.equal(outputs, expected)
    stage.backward(1, [torch.ones(4, 2)])
    assert weights[0]["weight"].grad is not None and stage.module[0].weight.grad is None


def test_a_loss_with_a_parameter_of_another_stage_is_refused():
    """The parameter would get no gradient from the loss, while one process computes one."""
    first, last = double(nn.Linear(3, 4)), double(nn.Linear(4, 2))
    outputs = last(first(batch(2, 3)).detach())
    own = outputs.sum() + last[0].weight.sum()
    stage = StageModule([*last], first_layer=1)
    check_no_foreign_weights(own, outputs, stage)
    with pytest.raises(ValueError, match=r"a parameter of shape \(4, 3\), which is not in the last stage"):
        check_no_foreign_weights(own + first[0].weight.sum(), outputs, stage)


def test_only_embeddings_that_say_so_have_sparse_gradients():
    sparse, bag = nn.Embedding(4, 2, sparse=True), nn.EmbeddingBag(4, 2, sparse=True)
    layers = nn.Sequential(nn.Embedding(4, 2), sparse, nn.Linear(2, 2), bag)
    assert sparse_parameters(layers) == {sparse.weight, bag.weight}


def test_what_is_trained_must_not_change_while_older_versions_are_in_use():
    model = chain()
    versions = WeightVersions(model)
    versions.keep_from(0)
    change(versions, model)
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match="requires_grad must not change in the middle of an epoch"):
        versions.renew(model)
    versions.keep_from(versions.newest)
    versions.renew(model)
    assert [len(layer) for layer in versions.current()] == [0, 2, 0, 2]


def ahead(parameters, updates):
    """Prediction: each update adds one."""
    return [p.data + updates for p in parameters]


def test_what_is_trained_must_not_change_while_predicted_weights_are_in_use():
    """They may have the number of the newest version, as under 2BW."""
    model = chain()
    versions = WeightVersions(model, predict=ahead, ahead=1)
    versions.restore(5, {5: {p: torch.full_like(p, 5.0) for p in model.parameters()}})
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match="requires_grad must not change in the middle of an epoch"):
        versions.renew(model)


def test_weights_predicted_before_a_failed_update_are_predicted_again():
    model = chain()
    versions = WeightVersions(model, predict=ahead, ahead=1)
    versions.keep_from(1)
    with pytest.raises(ZeroDivisionError), versions.update():
        raise ZeroDivisionError
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    versions.begin()
    assert all(bool(value.eq(1).all()) for value in values(versions.version(1)))


def test_versions_of_an_earlier_run_are_asked_for_and_go():
    model = chain()
    versions = WeightVersions(model)
    older = {5: {p: torch.full_like(p, 5.0) for p in model.parameters()}}
    versions.restore(7, older)
    assert versions.newest == 7
    assert all(bool(value.eq(5).all()) for value in values(versions.version(5)))
    with pytest.raises(LookupError, match="weights of version 6 are not kept; kept: 5, 7"):
        versions.version(6)
    newest = values(versions.current())
    change(versions, model)
    assert versions.newest == 8
    assert all(map(torch.equal, values(versions.version(7)), newest))
    versions.keep_from(8)
    with pytest.raises(LookupError, match="weights of version 7 are not kept; kept: 8"):
        versions.version(7)


def test_an_earlier_run_that_left_no_version_keeps_the_newest():
    model = chain()
    versions = WeightVersions(model)
    versions.restore(3, {})
    newest = values(versions.current())
    change(versions, model)
    assert all(map(torch.equal, values(versions.version(3)), newest))


def test_matrices_are_copied_in_another_type_and_their_gradients_come_back_in_float32():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    versions = WeightVersions(model, Precision("bf16-params"))
    (linear, norm), data = versions.current(), model[0].weight.data_ptr()
    assert linear["weight"].dtype == torch.bfloat16 and linear["bias"].dtype == torch.float32
    assert norm["weight"].data_ptr() == model[1].weight.data_ptr()
    assert versions.extra_bytes == 2 * 3 * 2
    linear["weight"].grad = torch.full((2, 3), 1 / 3).bfloat16()
    versions.collect([linear, norm])
    assert model[0].weight.grad.dtype == torch.float32
    assert torch.equal(model[0].weight.grad, torch.full((2, 3), 1 / 3).bfloat16().float())
    with versions.update(), torch.no_grad():
        model[0].weight += 1  # the copy is in use, and keeps its numbers without a copy of the parameter
    assert model[0].weight.data_ptr() == data
    assert torch.equal(versions.current()[0]["weight"], model[0].weight.bfloat16())
    assert not torch.equal(linear["weight"], model[0].weight.bfloat16())


def test_numbers_that_users_change_between_two_runs_are_copied_anew():
    model = nn.Sequential(nn.Linear(3, 2))
    versions = WeightVersions(model, Precision("bf16-params"))
    versions.current()
    model[0].weight.data.fill_(2.0)
    versions.begin()
    assert torch.equal(versions.current()[0]["weight"], torch.full((2, 3), 2.0).bfloat16())
