"""A fused step beside the plain one, and what is left to the plain one."""

import pytest
import torch
from torch import nn

from hybridpipe.stage.fused import fused

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
    """How often each of torch's fused kernels ran."""
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
        assert all(group["fused"] is None for group in fusing.param_groups)  # as a checkpoint has it
    assert sum(used.values()) == 10
    for one, other in zip(plain, ours, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_it_may_begin_and_end_at_any_step():
    """Training that goes on from a checkpoint of the plain loop, and the other way round."""
    for make, options in OPTIMIZERS.values():
        plain, ours = parameters(torch.float64), parameters(torch.float64)
        plainly, fusing = make(plain, lr=0.1, **options), make(ours, lr=0.1, **options)
        for step in range(6):
            give_gradients(plain, step)
            give_gradients(ours, step)
            plainly.step()
            if step in (1, 2, 5):
                with fused(fusing):
                    fusing.step()
            else:
                fusing.step()
        for one, other in zip(plain, ours, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    "options",
    [
        {"fused": False},
        {"foreach": False},
        {"foreach": True},
        {"differentiable": True},
        {"lr": torch.tensor(0.1)},
    ],
    ids=str,
)
def test_what_the_user_has_said_holds(used, options):
    trained = [p.requires_grad_(False) for p in parameters()]  # or a differentiable step refuses them
    optimizer = torch.optim.Adam(trained, **{"lr": 0.1} | options)
    give_gradients(trained, 0)
    with fused(optimizer):
        optimizer.step()
    assert not used
    assert optimizer.param_groups[0]["fused"] is options.get("fused")


def test_a_subclass_is_left_alone(used):
    class Own(torch.optim.SGD):
        pass

    trained = parameters()
    optimizer = Own(trained, lr=0.1)
    give_gradients(trained, 0)
    with fused(optimizer):
        optimizer.step()
    assert not used


def test_memory_in_another_order_is_not_taken_for_the_same(used):
    """The kernels would add the transposed gradient of a square weight, without an error."""
    parameter = nn.Parameter(torch.zeros(4, 4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    gradient = torch.arange(16.0).reshape(4, 4)
    parameter.grad = gradient.t().contiguous().t()
    with fused(optimizer):
        optimizer.step()
    assert not used
    assert torch.equal(parameter, -gradient)


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
    """Torch's fused SGD knows a first step of all parameters only, and fails where some have no momentum yet."""
    plain, ours = parameters(torch.float64), parameters(torch.float64)
    plainly, fusing = (torch.optim.SGD(each, lr=0.1, momentum=0.9) for each in (plain, ours))
    for step in range(4):
        for each in (plain, ours):
            give_gradients(each[: 2 if step < 2 else 3], step)
        plainly.step()
        with fused(fusing):
            fusing.step()
    assert used == {"_fused_sgd_": 3}
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
