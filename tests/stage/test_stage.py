"""Stages chained by hand equal the whole model, and their stash is empty after the backward."""

import copy
import gc
import random
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn

from hybridpipe.model.rng import random_key
from hybridpipe.model.sequential import stage_module
from hybridpipe.model.stage_module import StageModule
from hybridpipe.model.tensors import map_tensors, received, tensors_of
from hybridpipe.stage.stage import Stage
from tests.stage.helpers import Call, OnFirst, batch, double, fork, join

CPU = torch.device("cpu")
mse = nn.functional.mse_loss


def cut(model: nn.Sequential, *edges: int, loss=mse, seed: int = 0) -> list[Stage]:
    """Divide the model's own layers into stages `[edges[i], edges[i + 1])`."""
    layers = list(model)
    stages = [Stage(StageModule(layers[a:b], a), CPU, seed) for a, b in pairwise(edges)]
    stages[-1].loss = loss
    return stages


def across(value):
    """Copy a value into leaves, as its transfer over a cut does."""
    needs = [tensor.requires_grad for tensor in tensors_of(value)]
    return received(map_tensors(lambda t: t.detach().clone(), value), needs)


def run(stages: list[Stage], inputs, targets, microbatch: int = 0, step: int = 0, share: float = 1.0):
    """Run all stages forward and backward; return the loss and the gradients of the first inputs."""
    value = inputs
    for stage in stages[:-1]:
        value = across(stage.forward(microbatch, value, step))
    loss = stages[-1].forward_loss(microbatch, value, targets, share, step).value
    gradients = ()
    for stage in reversed(stages):
        gradients = stage.backward(microbatch, gradients)
    return loss, gradients


def check_against_whole(model: nn.Sequential, edges, inputs, targets) -> None:
    whole, whole_inputs = copy.deepcopy(model), map_tensors(lambda t: t.detach().clone(), inputs)
    leaves = received(whole_inputs, [tensor.requires_grad for tensor in tensors_of(inputs)])
    expected = mse(whole(map_tensors(lambda t: t * 1 if t.requires_grad else t, leaves)), targets)
    expected.backward()
    stages = cut(model, *edges)
    loss, gradients = run(stages, inputs, targets)
    assert torch.equal(loss, expected.detach())
    for tensor, gradient in zip(tensors_of(leaves), gradients, strict=True):
        if tensor.requires_grad:
            torch.testing.assert_close(gradient, tensor.grad, rtol=0, atol=1e-14)
        else:
            assert gradient is None
    for parameter, reference in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=0, atol=1e-14)
    assert all(stage.num_stashed == 0 for stage in stages)


MODELS = {
    "chain": lambda: double(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)),
    "in-place layers": lambda: double(
        nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)
    ),
    "skip connection": lambda: double(
        nn.Linear(3, 4),
        fork(),
        OnFirst(nn.Linear(4, 4)),
        OnFirst(nn.ReLU(inplace=True)),
        join(),
        nn.Linear(4, 2),
    ),
    "tensor of integers": lambda: double(
        nn.Linear(3, 4),
        Call(lambda x: (x, x.argmax(1))),
        OnFirst(nn.Tanh()),
        Call(lambda pair: pair[0] * nn.functional.one_hot(pair[1], 4)),
        nn.Linear(4, 2),
    ),
    "float without gradient": lambda: double(
        nn.Linear(3, 4),
        Call(lambda x: (x, x.detach() > 0, x.detach().abs())),
        OnFirst(nn.Tanh()),
        Call(lambda v: v[0] * v[1] + v[2]),
        nn.Linear(4, 2),
    ),
    "unused tensor": lambda: double(
        nn.Linear(3, 4), fork(), OnFirst(nn.Tanh()), Call(lambda pair: pair[0]), nn.Linear(4, 2)
    ),
    "tuple of one": lambda: double(
        nn.Linear(3, 4), Call(lambda x: (x,)), OnFirst(nn.Tanh()), Call(lambda v: v[0]), nn.Linear(4, 2)
    ),
    "view of the input": lambda: double(
        nn.Linear(3, 4), Call(torch.t), Call(torch.t), nn.ReLU(inplace=True), nn.Linear(4, 2)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_two_stages_equal_the_whole_model(name):
    for edge in range(1, len(MODELS[name]())):
        model = MODELS[name]()
        check_against_whole(model, (0, edge, len(model)), batch(6, 3), batch(6, 2))


@pytest.mark.parametrize("name", MODELS)
def test_a_stage_for_each_layer_equals_the_whole_model(name):
    model = MODELS[name]()
    check_against_whole(model, range(len(model) + 1), batch(6, 3), batch(6, 2))


def test_the_gradient_of_the_input_comes_back():
    model = MODELS["chain"]()
    check_against_whole(model, (0, 2, 5), batch(6, 3).requires_grad_(), batch(6, 2))


def test_an_inplace_first_layer_works_on_a_received_activation():
    model = double(nn.ReLU(inplace=True), nn.Linear(3, 2))
    check_against_whole(model, (0, 2), batch(6, 3).requires_grad_(), batch(6, 2))


def test_an_unused_input_gets_none():
    stage = Stage(StageModule([Call(lambda pair: pair[0] * 2)]), CPU)
    a, b = batch(2, 3).requires_grad_(), batch(2, 3).requires_grad_()
    stage.forward(0, (a, b), step=0)
    of_a, of_b = stage.backward(0, [torch.ones(2, 3, dtype=torch.float64)])
    assert of_a.eq(2).all() and of_b is None


def test_outputs_without_gradients_leave_parameters_alone():
    """Gradients of zero would let weight decay change parameters that one process leaves unchanged."""
    stage = Stage(StageModule(list(double(nn.Linear(3, 4)))), CPU)
    inputs = batch(2, 3).requires_grad_()
    stage.forward(0, inputs, step=0)
    assert stage.backward(0, [None]) == (None,)
    assert all(parameter.grad is None for parameter in stage.module.parameters())


def test_an_input_that_passes_through_gets_its_gradient():
    stage = Stage(StageModule([nn.Identity()]), CPU)
    value = batch(2, 3).requires_grad_(), torch.arange(3)
    stage.forward(0, value, step=0)
    gradient = batch(2, 3)
    first, second = stage.backward(0, [gradient, None])
    assert torch.equal(first, gradient) and second is None


def test_an_output_may_go_out_twice():
    stage = Stage(StageModule([fork()]), CPU)
    stage.forward(0, leaf := batch(2, 3).requires_grad_(), step=0)
    one = torch.ones_like(leaf)
    assert stage.backward(0, [one, 2 * one])[0].eq(3).all()


def test_a_stage_without_anything_to_train():
    stage = Stage(StageModule([nn.ReLU()]), CPU)
    assert not stage.forward(0, batch(2, 3), step=0).requires_grad
    assert stage.backward(0, [None]) == (None,)
    assert stage.num_stashed == 0


def test_gradients_of_microbatches_add_up_to_the_minibatch():
    model = MODELS["chain"]()
    whole, inputs, targets = copy.deepcopy(model), batch(7, 3), batch(7, 2)
    mse(whole(inputs), targets).backward()
    stages = cut(model, 0, 2, 5)
    total = 0.0
    for m, part in enumerate([slice(0, 3), slice(3, 6), slice(6, 7)]):
        share = len(inputs[part]) / 7
        total += share * run(stages, inputs[part], targets[part], m, share=share)[0]
    torch.testing.assert_close(total, mse(model(inputs), targets).detach(), rtol=0, atol=1e-14)
    for parameter, reference in zip(model.parameters(), whole.parameters()):
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=0, atol=1e-14)


def test_microbatches_may_be_in_flight_together():
    model = MODELS["chain"]()
    stage = Stage(StageModule(list(model)[:2]), CPU)
    inputs = [batch(2, 3).requires_grad_() for _ in range(3)]
    outputs = [stage.forward(m, x, step=0) for m, x in enumerate(inputs)]
    assert stage.num_stashed == 3
    for m in (1, 0, 2):
        gradient = batch(2, 5)
        expected = torch.autograd.grad(model[:2](inputs[m]), inputs[m], gradient)[0]
        assert torch.equal(stage.backward(m, [gradient])[0], expected)
    assert stage.num_stashed == 0 and len(outputs) == 3


def test_nothing_is_left_after_the_backward():
    stage = Stage(StageModule([nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)]), CPU)
    saved = []

    def note(_, __, output):
        saved.append(weakref.ref(output))

    stage.module[1].register_forward_hook(note)
    stage.forward(0, torch.randn(2, 3), step=0)
    gc.collect()
    assert saved[0]() is not None
    stage.backward(0, [torch.ones(2, 2)])
    assert stage.num_stashed == 0 and saved[0]() is None


def test_a_microbatch_has_one_backward():
    stage = Stage(StageModule([nn.Linear(3, 2)]), CPU)
    stage.forward(4, torch.randn(1, 3), step=0)
    stage.backward(4, [torch.ones(1, 2)])
    with pytest.raises(KeyError):
        stage.backward(4, [torch.ones(1, 2)])


@pytest.mark.parametrize(
    "loss, got",
    [
        (lambda outputs, targets: (outputs - targets).square(), r"shape \(4, 2\)"),
        (lambda outputs, targets: 3.0, "float"),
        (lambda outputs, targets: (outputs.sum(), targets), r"a weight of shape \(4, 2\), float32"),
    ],
)
def test_a_loss_that_is_no_number_is_refused(loss, got):
    stage = Stage(StageModule([nn.Linear(3, 2)]), CPU, loss=loss)
    with pytest.raises(ValueError, match=f"loss must return a tensor of one number.*got {got}"):
        stage.forward_loss(0, torch.randn(4, 3), torch.randn(4, 2), share=1.0, step=0)


def test_a_loss_of_shape_one_is_accepted():
    stage = Stage(
        StageModule([nn.Linear(3, 2)]), CPU, loss=lambda outputs, targets: mse(outputs, targets).reshape(1)
    )
    assert stage.forward_loss(0, torch.randn(4, 3), torch.randn(4, 2), share=1.0, step=0).value.numel() == 1
    stage.backward(0)
    assert stage.module[0].weight.grad is not None


def test_random_numbers_are_keyed_by_seed_step_microbatch_and_layer():
    def numbers(seed=0, step=0, microbatch=0, first_layer=0):
        stage = Stage(StageModule([nn.Dropout(0.5)], first_layer), CPU, seed)
        return tuple(stage.forward(microbatch, torch.ones(64), step).tolist())

    assert numbers() == numbers()
    neighbours = [numbers(**{part: 1}) for part in ("seed", "step", "microbatch", "first_layer")]
    assert len({numbers(), *neighbours}) == 5
    torch.manual_seed(random_key(3, 2, 1, 4))
    expected = nn.functional.dropout(torch.ones(64), 0.5)
    assert numbers(seed=3, step=2, microbatch=1, first_layer=4) == tuple(expected.tolist())


def test_dropout_is_the_same_under_every_cut():
    def noisy_loss(outputs, targets):
        return mse(nn.functional.dropout(outputs, 0.3), targets)

    def result(*edges):
        torch.manual_seed(1)
        model = double(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        inputs, targets = batch(4, 3), batch(4, 2)
        loss, _ = run(cut(model, *edges, loss=noisy_loss, seed=5), inputs, targets, microbatch=2, step=3)
        return loss.item(), [p.grad for p in model.parameters()]

    expected_loss, expected = result(0, 5)
    for edges in [(0, 1, 5), (0, 2, 3, 5), (0, 1, 2, 3, 4, 5)]:
        loss, gradients = result(*edges)
        assert loss == expected_loss
        for gradient, reference in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-14)


def test_inference_stashes_nothing():
    stage = Stage(StageModule([nn.Linear(3, 2)]), CPU)
    assert not stage.infer(0, torch.randn(2, 3), step=-1).requires_grad
    assert stage.num_stashed == 0


def test_a_stage_says_if_it_draws_from_pythons_generators():
    class Drawing(nn.Module):
        def forward(self, value):
            return value * random.random()

    plain = Stage(StageModule([nn.Linear(2, 2)]), CPU, loss=mse)
    assert not plain.draws_from_python
    assert Stage(StageModule([nn.Linear(2, 2), Drawing()]), CPU).draws_from_python
    assert Stage(StageModule([nn.Linear(2, 2)]), CPU, loss=lambda o, t: mse(o, t)).draws_from_python
    plain.module.append(Drawing())
    plain.renew()
    assert plain.draws_from_python


class Counting(nn.Module):
    """Counts its calls in a buffer, in place or in a new tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return x * 1.0


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_of_several_stages_that_a_layer_writes_to_is_refused(in_place):
    layer = Counting(in_place)
    model = nn.Sequential(nn.Linear(2, 2), layer, nn.Tanh(), layer)
    Stage(stage_module(model, 0, 4), CPU).forward(0, torch.ones(1, 2), step=0)  # all in one stage
    with pytest.raises(
        ValueError, match=r"layer 1 \(Counting\), calls is a buffer that layers of other stages"
    ):
        Stage(stage_module(model, 0, 2), CPU).forward(0, torch.ones(1, 2), step=0)
