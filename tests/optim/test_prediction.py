"""Predicted weights: each optimizer's formula, and what is refused; tests/engine has the schedules."""

from functools import partial

import pytest
import torch
from torch import nn

from hybridpipe.optim.prediction import predicted, why_not_predicted
from hybridpipe.optim.update import LearningRate, Update, UpdateRule
from tests.engine.helpers import make_plan


def after_steps(make, count: int = 3) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """An optimizer after steps with random gradients; the last parameter has never had one."""
    torch.manual_seed(3)
    parameters = [nn.Parameter(torch.randn(3, 2, dtype=torch.float64)) for _ in range(3)]
    optimizer = make(parameters)
    for _ in range(count):
        for p in parameters[:2]:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return optimizer, parameters


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.1)


@pytest.mark.parametrize(
    "make",
    [
        ADAM,
        partial(ADAM, amsgrad=True, maximize=True, foreach=True),
        partial(ADAM, betas=(0.5, 0.8), eps=0.1, fused=True),
        partial(torch.optim.AdamW, lr=torch.tensor(0.1, dtype=torch.float64), weight_decay=0.0),
    ],
)
def test_without_new_gradients_adam_is_moved_as_in_its_last_step(make):
    optimizer, parameters = after_steps(make)
    before = [p.detach().clone() for p in parameters]
    for p in parameters[:2]:
        p.grad = torch.randn_like(p)
    optimizer.step()
    last = [p.detach() - old for p, old in zip(parameters, before)]
    moved = predicted(optimizer, "xpipe", parameters, 2.5)
    for p, new, step in zip(parameters[:2], moved, last):
        # The fused form rounds its step number's corrections to float32.
        torch.testing.assert_close(new - p.detach(), 2.5 * step, rtol=1e-6, atol=0)


def test_both_parts_of_a_complex_parameter_have_squares_of_their_own():
    def parts(make):
        torch.manual_seed(3)
        parameter = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        optimizer = make([parameter])
        parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        before = parameter.detach().clone()
        parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        return optimizer, parameter, parameter.detach() - before

    optimizer, parameter, last = parts(ADAM)
    [moved] = predicted(optimizer, "xpipe", [parameter], 2.0)
    torch.testing.assert_close(moved - parameter.detach(), 2 * last, rtol=1e-6, atol=0)


def test_sgd_is_moved_along_its_momentum_by_each_groups_rate():
    def make(parameters):
        return SGD([{"params": parameters[1:], "lr": 0.3}, {"params": parameters[:1]}])

    optimizer, parameters = after_steps(make)
    moved = predicted(optimizer, "spectrain", parameters, 2.0)
    for p, new, rate in zip(parameters[:2], moved, (0.1, 0.3)):
        buffer = optimizer.state[p]["momentum_buffer"]
        torch.testing.assert_close(new, p.detach() - 2 * rate * buffer, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    "make, prediction, count",
    [(SGD, "spectrain", 0), (ADAM, "xpipe", 0), (partial(torch.optim.SGD, lr=0.1), "spectrain", 3)],
)
def test_what_nothing_moves_is_not_copied(make, prediction, count):
    optimizer, parameters = after_steps(make, count)
    moved = predicted(optimizer, prediction, parameters, 2.0)
    assert all(new.data_ptr() == p.data_ptr() for p, new in zip(parameters, moved))


def test_momentum_that_a_scheduler_turns_off_moves_nothing():
    optimizer, parameters = after_steps(SGD)
    optimizer.param_groups[0]["momentum"] = 0.0
    assert predicted(optimizer, "spectrain", parameters, 2.0)[0].data_ptr() == parameters[0].data_ptr()


def test_only_what_the_optimizer_has_is_moved_and_nothing_is_changed():
    optimizer, parameters = after_steps(SGD)
    other = nn.Parameter(torch.ones(2))
    before = [p.detach().clone() for p in parameters]
    buffers = [optimizer.state[p]["momentum_buffer"].clone() for p in parameters[:2]]
    (same,) = predicted(optimizer, "spectrain", [other], 2.0)
    predicted(optimizer, "spectrain", parameters, 2.0)
    assert same.data_ptr() == other.data_ptr()
    assert all(map(torch.equal, parameters, before))
    assert all(torch.equal(optimizer.state[p]["momentum_buffer"], b) for p, b in zip(parameters, buffers))
    assert predicted(None, "spectrain", [other], 2.0)[0].data_ptr() == other.data_ptr()


def test_an_update_predicts_with_its_stages_rate():
    optimizer, parameters = after_steps(SGD)
    update = Update(optimizer, learning_rate=LearningRate(0.5, delay=3, warm_up=8))
    update.num_minibatches = 4
    expected = predicted(optimizer, "spectrain", parameters, 2 * 0.5 * 3**-0.5)
    for mine, other in zip(update.predicted("spectrain", parameters, 2), expected):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-15)


class OwnSGD(torch.optim.SGD):
    """A subclass may keep another momentum under this name."""


@pytest.mark.parametrize(
    "make, prediction, told",
    [
        (SGD, "xpipe", "reads the state of torch's own Adam or AdamW, got SGD: set prediction = 'spectrain'"),
        (ADAM, "spectrain", "reads the state of torch's own SGD, got Adam: set prediction = 'xpipe'"),
        (partial(OwnSGD, lr=0.1, momentum=0.9), "spectrain", "own SGD, got OwnSGD: set prediction = 'off'"),
        (torch.optim.RMSprop, "xpipe", "own Adam or AdamW, got RMSprop: set prediction = 'off'"),
    ],
)
def test_an_optimizer_whose_state_is_not_known_is_refused(make, prediction, told):
    plan = make_plan("1-1", 2, 1, "pipedream", prediction=prediction)
    parameters = [nn.Parameter(torch.ones(2))]
    why = UpdateRule(make).why_not_predicted(parameters, plan)
    assert why is not None and why.startswith(f"prediction = {prediction!r}") and told in why
    assert UpdateRule(make).why_not_predicted(parameters, make_plan("1-1", 2, 1, "pipedream")) is None
    assert why_not_predicted(None, prediction) is None, "a stage without parameters"
