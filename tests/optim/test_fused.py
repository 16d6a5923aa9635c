"""Fused steps equal plain ones, and unsupported cases keep the plain loop."""

from contextlib import nullcontext, suppress
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from hybridpipe.measure.layers import measure
from hybridpipe.optim.fused import fused

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-6}),
}


def parameters(dtype=torch.float32, count=3):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3 + i, 5, dtype=dtype)) for i in range(count)]


def give_gradients(trained, step):
    generator = torch.Generator().manual_seed(step)
    for p in trained:
        p.grad = torch.randn(p.shape, dtype=p.dtype, generator=generator)


@pytest.fixture
def used(monkeypatch):
    """Count the calls of each of torch's fused kernels."""
    counts = {}

    def counting(name):
        kernel = getattr(torch, name)

        def run(*args, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return kernel(*args, **kwargs)

        monkeypatch.setattr(torch, name, run)

    for name in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_"):
        counting(name)
    return counts


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_a_fused_step_is_the_plain_one_but_for_rounding(used, name, dtype, tolerance):
    make, options = OPTIMIZERS[name]
    plain, ours = parameters(dtype), parameters(dtype)
    plainly, fusing = make(plain, lr=0.1, **options), make(ours, lr=0.1, **options)
    for step in range(10):
        give_gradients(plain, step)
        give_gradients(ours, step)
        plainly.step()
        with fused(fusing):
            fusing.step()
        assert all(group["fused"] is None for group in fusing.param_groups)  # the user's option
    assert sum(used.values()) == 10
    for one, other in zip(plain, ours, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("fused_steps", [(0, 1, 4), (2, 3, 5)])
def test_it_may_begin_and_end_at_any_step(used, fused_steps):
    """A checkpoint of the plain loop can continue with fused steps, and the other way round."""
    for make, options in OPTIMIZERS.values():
        plain, ours = parameters(torch.float64), parameters(torch.float64)
        plainly, fusing = make(plain, lr=0.1, **options), make(ours, lr=0.1, **options)
        for step in range(6):
            give_gradients(plain, step)
            give_gradients(ours, step)
            plainly.step()
            if step in fused_steps:
                with fused(fusing):
                    fusing.step()
            else:
                fusing.step()
        for one, other in zip(plain, ours, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)
    assert sum(used.values()) == len(OPTIMIZERS) * len(fused_steps)


def test_autograd_sees_that_the_weights_were_changed():
    """Autograd refuses an older graph after a plain step; after the bare kernels it gives wrong gradients."""
    parameter = nn.Parameter(torch.ones(3))
    graph = (parameter * parameter).sum()
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    # A user's hook behind the step drops the gradients, which show the trained parameters.
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    with fused(optimizer):
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph.backward()


def test_an_error_in_a_step_leaves_the_options_as_they_were():
    trained = parameters()
    give_gradients(trained, 0)
    optimizer = torch.optim.SGD(trained, lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["fused"]))

    def fail(*_):
        seen.append(optimizer.param_groups[0]["fused"])
        raise RuntimeError("step")

    optimizer.register_step_post_hook(fail)
    with pytest.raises(RuntimeError, match="step"), fused(optimizer):
        optimizer.step()
    assert seen == [None, True] and optimizer.param_groups[0]["fused"] is None
    assert len(optimizer._optimizer_step_pre_hooks) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"capturable": True},
        {"betas": (torch.tensor(0.9), torch.tensor(0.99))},
        {"amsgrad": 1},
        {"fused": False},
        {"foreach": False},
        {"foreach": True},
        {"differentiable": True},
        {"lr": torch.tensor(0.1)},
        {"lr": np.array(0.1)},  # the kernels' own error: not a double
    ],
    ids=str,
)
def test_what_the_user_has_said_holds(used, options):
    trained = [p.requires_grad_(False) for p in parameters()]  # a differentiable step refuses others
    optimizer = torch.optim.Adam(trained, **{"lr": 0.1} | options)
    give_gradients(trained, 0)
    with fused(optimizer), suppress(AssertionError):  # the plain loop refuses `capturable` on a CPU
        optimizer.step()
    assert not used
    assert optimizer.param_groups[0]["fused"] is options.get("fused")


def test_a_config_has_lists_and_groups_may_have_names(used):
    trained = parameters()
    give_gradients(trained, 0)
    optimizer = torch.optim.Adam([{"params": trained, "tags": {"all"}}], betas=[0.8, 0.95])
    with fused(optimizer):
        optimizer.step()
    assert used == {"_fused_adam_": 1}


def test_a_subclass_is_left_alone(used):
    class Own(torch.optim.SGD):
        pass

    trained = parameters()
    optimizer = Own(trained, lr=0.1)
    give_gradients(trained, 0)
    with fused(optimizer):
        optimizer.step()
    assert not used


@pytest.mark.parametrize("transposed", [{"weight"}, {"first"}, {"second"}, {"first", "second"}])
def test_memory_in_another_order_is_not_taken_for_the_same(used, transposed):
    """The kernels would add the transposed gradient of a square weight without an error.

    A momentum buffer has the memory layout of the first gradient.
    """

    def make(name, start):
        numbers = torch.arange(start, start + 16.0).reshape(4, 4)
        return numbers.t().contiguous().t() if name in transposed else numbers

    results = []
    for around in (nullcontext, fused):
        parameter = nn.Parameter(make("weight", 1.0))
        optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5)
        for name in ("first", "second"):
            parameter.grad = make(name, 2.0)
            with around(optimizer):
                optimizer.step()
        results.append(parameter.detach())
    assert torch.equal(*results)
    assert used == ({"_fused_sgd_": 1} if transposed == {"second"} else {})


def test_a_hook_that_changes_gradients_is_heard(used):
    parameter = nn.Parameter(torch.zeros(4, 4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    gradient = torch.arange(16.0).reshape(4, 4)

    def transpose(*_):
        parameter.grad = gradient.t()

    optimizer.register_step_pre_hook(transpose)
    parameter.grad = gradient
    with fused(optimizer):
        optimizer.step()
    assert not used and torch.equal(parameter, -gradient.t())


def test_a_sparse_gradient_is_left_to_the_plain_loop(used):
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([3])).sum().backward()
    with fused(optimizer):
        optimizer.step()
    assert not used
    before[3] -= 1.0
    assert torch.equal(embedding.weight, before)


def test_a_gradient_that_comes_later_than_others(used):
    """Torch's fused SGD fails if only some parameters have a momentum buffer: they get their own step."""
    plain, ours = parameters(torch.float64), parameters(torch.float64)
    plainly, fusing = (torch.optim.SGD(each, lr=0.1, momentum=0.9) for each in (plain, ours))
    for step in range(4):
        for each in (plain, ours):
            give_gradients(each[: 2 if step < 2 else 3], step)
        plainly.step()
        with fused(fusing):
            fusing.step()
    assert used == {"_fused_sgd_": 5} and len(fusing.param_groups) == 1
    for one, other in zip(plain, ours, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)


def test_half_precision_rounds_as_ever(used):
    plain, ours = parameters(torch.bfloat16), parameters(torch.bfloat16)
    plainly, fusing = (torch.optim.SGD(each, lr=0.1, momentum=0.9) for each in (plain, ours))
    for step in range(3):
        give_gradients(plain, step)
        give_gradients(ours, step)
        plainly.step()
        with fused(fusing):
            fusing.step()
    assert not used
    assert all(torch.equal(one, other) for one, other in zip(plain, ours, strict=True))


def test_a_profile_has_the_steps_that_training_takes(used):
    layers = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    inputs = targets = torch.ones(2, 5)
    measure(layers, inputs, targets, nn.functional.mse_loss, partial(torch.optim.SGD, lr=0.1))
    assert used.keys() == {"_fused_sgd_"}


def test_the_rounding_of_a_parameter_does_not_depend_on_its_group():
    """Stages that share a parameter have other groups around it, and copies must stay bit-equal."""
    alone, among, late = (nn.Parameter(torch.linspace(-1, 1, 101)) for _ in range(3))
    optimizers = [torch.optim.Adam(group, lr=0.1, weight_decay=1e-3) for group in ([alone], [among, late])]
    for step in range(4):
        noise = torch.randn(101, generator=torch.Generator().manual_seed(step))
        alone.grad, among.grad, late.grad = noise, noise.clone(), noise.clone() if step == 2 else None
        for optimizer in optimizers:
            with fused(optimizer):
                optimizer.step()
    assert torch.equal(alone, among)
