"""Both halves of a backward together equal autograd's, for layers of every kind."""

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.stage.parts import CASES, case, check_same, frozen, gradients_like, stage_of, train


@pytest.mark.parametrize("name", CASES)
def test_two_halves_equal_the_whole(name):
    layers, inputs = case(name)
    whole = stage_of(layers)
    expected = train(whole, inputs)
    layers, inputs = case(name)
    split = stage_of(layers, split_backward=True)
    check_same(train(split, inputs), expected)
    check_same([p.grad for p in split.module.parameters()], [p.grad for p in whole.module.parameters()])
    check_same(split.module.buffers(), whole.module.buffers())
    assert all("forward" not in vars(module) for module in split.module.modules())


def test_the_whole_backward_of_a_stage_that_splits():
    layers, inputs = case("batch norm")
    expected = train(whole := stage_of(layers), inputs)
    layers, inputs = case("batch norm")
    stage = stage_of(layers, split_backward=True)
    results = []
    for m in range(2):
        leaf = inputs.detach().clone().requires_grad_()
        outputs = stage.forward(m, leaf, 0)
        results += [outputs.detach(), *stage.backward(m, gradients_like(outputs))]
    check_same(results, expected)
    check_same([p.grad for p in stage.module.parameters()], [p.grad for p in whole.module.parameters()])


def test_second_halves_may_wait():
    layers, inputs = case("shared module")
    whole, split = stage_of(layers), stage_of(layers, split_backward=True)
    train(whole, inputs, num_microbatches=3)
    expected = [p.grad for p in whole.module.parameters()]
    whole.module.zero_grad(set_to_none=True)
    outputs = [split.forward(m, inputs.detach().clone().requires_grad_(), 0) for m in range(3)]
    for m in (0, 2, 1):
        split.backward_input(m, gradients_like(outputs[m]))
    assert split.num_stashed == 3
    for m in (1, 0, 2):
        split.backward_weight(m)
    check_same([p.grad for p in split.module.parameters()], expected)


@pytest.mark.parametrize("name", ["shared module", "tied parameters", "layer norm", "lstm", "linear"])
def test_hooks_see_one_gradient_a_microbatch_in_the_second_half(name):
    def result(split):
        layers, inputs = case(name)
        stage = stage_of(layers, split_backward=split)
        parameters, seen = list(stage.module.parameters()), []
        for parameter in parameters:
            parameter.register_hook(lambda gradient: 2 * gradient)
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(id(p)))
        gradients = gradients_like(stage.forward(0, inputs, 0))
        if split:
            stage.backward_input(0, gradients)
            assert not seen
            stage.backward_weight(0)
        else:
            stage.backward(0, gradients)
        assert sorted(seen) == sorted(map(id, parameters))
        return [p.grad for p in parameters]

    check_same(result(True), result(False))


def test_gradients_arrive_in_the_order_of_a_backward():
    stage = stage_of([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)], split_backward=True)
    seen = []
    for parameter in stage.module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(id(p)))
    stage.backward(0, [torch.ones_like(stage.forward(0, torch.randn(2, 3), 0))])
    linears = [{id(layer.weight), id(layer.bias)} for layer in stage.module]
    assert [set(seen[i : i + 2]) for i in (0, 2, 4)] == linears[::-1]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_under_autocast(kind):
    def gradients(split):
        torch.manual_seed(2)
        layers = [nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 2)]
        stage = stage_of(layers, split_backward=split, loss=nn.functional.mse_loss)
        inputs = torch.randn(6, 3, 5, requires_grad=True)
        with torch.autocast("cpu", dtype=kind):
            loss = stage.forward_loss(0, inputs, torch.randn(6, 2), 1.0, 0).value
        (of_inputs,) = stage.backward(0)
        assert of_inputs.dtype == torch.float32
        return [loss, of_inputs, *(p.grad for p in stage.module.parameters())]

    check_same(gradients(True), gradients(False), tolerance=1e-6)


def test_the_note_shares_the_memory_that_was_saved():
    stage = stage_of([nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)], split_backward=True)
    saved = {}

    def keep(saved_tensor):
        storage = saved_tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return saved_tensor

    inputs = torch.randn(5, 3).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        outputs = stage.forward(0, inputs, 0)
    weights = [layer.weight.data_ptr() for layer in (stage.module[0], stage.module[2])]
    activations = {address: size for address, size in saved.items() if address not in weights}
    assert sorted(activations.values()) == [5 * 3 * 4, 5 * 4 * 4]  # the inputs and, once, tanh's output
    stage.backward_input(0, [torch.ones_like(outputs)])
    notes = stage._weight_halves[0]._uses
    assert [note.inputs.data_ptr() in activations for note in notes] == [True, True]


def test_nothing_stays_alive():
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.LayerNorm(2)]
    stage = stage_of(layers, split_backward=True)
    alive = {}
    for i, layer in enumerate(layers):
        layer.register_forward_hook(lambda _, __, output, i=i: alive.update({i: weakref.ref(output)}))
    gc.disable()  # reference counts alone must free the memory
    try:
        shape = stage.forward(0, torch.randn(5, 3).requires_grad_(), 0).shape
        stage.backward_input(0, [torch.ones(shape)])
        assert all(output() is None for output in alive.values())  # the graph is freed, the notes are kept
        half = weakref.ref(stage._weight_halves[0])
        notes = [weakref.ref(t) for use in stage._weight_halves[0]._uses for t in (use.inputs, use.gradient)]
        assert all(note() is not None for note in notes)
        stage.backward_weight(0)
        assert half() is None and all(note() is None for note in notes)
    finally:
        gc.enable()


def test_modules_have_their_own_forward_again_after_a_run_or_an_error():
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    linear = nn.Linear(3, 3)
    weight = linear.weight
    stage = stage_of([linear, Fails()], split_backward=True)
    with pytest.raises(ValueError, match="no"):
        stage.forward(0, torch.randn(2, 3), 0)
    assert "forward" not in vars(linear) and linear.weight is weight
    linear(torch.randn(2, 3)).sum().backward()
    assert weight.grad is not None


def test_what_is_not_split_is_named():
    hooked = nn.Linear(3, 3)
    hooked.register_full_backward_hook(lambda *_: None)
    inner = nn.Sequential()
    inner.add_module("norm", nn.LayerNorm(3))
    inner.add_module("linear", nn.Linear(3, 3))
    compiled = nn.Sequential(nn.Linear(3, 3))
    compiled.compile()
    changed = nn.Linear(3, 3)
    changed.forward = changed.forward
    layers = [
        nn.Embedding(5, 3),
        inner,
        nn.Embedding(5, 3, max_norm=1.0),
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        hooked,
        changed,
        nn.BatchNorm1d(3, affine=False),
        frozen(nn.LSTM(3, 3)),
        nn.LSTM(3, 3),
        nn.Conv1d(2, 2, 4, padding="same"),
        nn.Conv1d(2, 2, 4),
        nn.LazyLinear(3),
        compiled,
        nn.Conv2d(2, 2, 3, padding="same"),
        nn.Conv2d(2, 2, (4, 3), padding="same"),
    ]
    assert stage_of(layers, first_layer=2, split_backward=True).not_split == [
        "3.norm (LayerNorm)",
        "4 (Embedding)",
        "5 (ParametrizedLinear)",
        "5.parametrizations.weight (ParametrizationList)",
        "6 (Linear)",
        "7 (Linear)",
        "10 (LSTM)",
        "11 (Conv1d)",
        "13 (LazyLinear)",
        "14.0 (Linear)",
        "16 (Conv2d)",
    ]


def test_a_stage_that_does_not_split_refuses_halves():
    stage = stage_of([nn.Linear(3, 2)])
    stage.forward(0, torch.randn(1, 3), 0)
    with pytest.raises(AssertionError, match="not made to split"):
        stage.backward_input(0, [torch.ones(1, 2)])
