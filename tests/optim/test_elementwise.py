"""An optimizer that looks beyond an element is found out before it trains parts of parameters."""

from functools import partial

import pytest
import torch
from torch import nn

from hybridpipe.optim import elementwise
from hybridpipe.optim.elementwise import ELEMENTWISE, why_not_in_parts


class Lamb(torch.optim.Optimizer):
    """Scales each update by norms of the whole parameter (You et al., ICLR 2020), without moments."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] * p.norm() / p.grad.norm()))


class MySGD(torch.optim.SGD):
    """A subclass whose step is still the elementwise one."""


class Mixed(torch.optim.SGD):
    """Centralises the gradients of some groups."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"] if group.get("centralised") else ():
                p.grad = p.grad - p.grad.mean()
        super().step()


class Blocks(torch.optim.SGD):
    """Divides gradients by the largest of each 2,048 elements, as quantised states do."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                for block in p.grad.view(-1).split(2048):
                    block.div_(block.abs().max())
        super().step()


class Clipped(torch.optim.SGD):
    """Clips by the norm of all that it updates, of which a replica has a part."""

    def step(self):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()


class OnlyKernels(torch.optim.SGD):
    """Centralises gradients of convolutions only."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim > 3:
                    p.grad -= p.grad.mean()
        super().step()


class Noisy(torch.optim.SGD):
    """Adds noise."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad + torch.randn_like(p.grad)
        super().step()


class OnlyMatrices(torch.optim.SGD):
    """Refuses what is no matrix."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad.mT.mT
        super().step()


class Idle(torch.optim.SGD):
    """Looks at parameters of its own list, as LBFGS does."""

    def step(self):
        """Do nothing."""


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))]


def why(factory, sharded=None) -> str | None:
    given = parameters()
    return why_not_in_parts(factory, given, given if sharded is None else [given[i] for i in sharded])


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_torchs_own_say_what_a_trial_says(monkeypatch, kind):
    """The list is no guess: each of them passes the trial that others must pass."""
    monkeypatch.setattr(elementwise, "ELEMENTWISE", ())
    assert why(partial(kind, lr=0.01)) is None
    assert why(lambda given: kind([{"params": [p], "lr": 0.01 * len(p)} for p in given])) is None


@pytest.mark.parametrize("factory", [MySGD, partial(MySGD, momentum=0.9, weight_decay=0.1)])
def test_a_subclass_that_is_elementwise_is_accepted(factory):
    assert why(factory) is None


@pytest.mark.parametrize("factory", [Lamb, Blocks, Clipped, OnlyKernels, torch.optim.Adafactor])
def test_what_looks_beyond_an_element_is_found_out(factory):
    assert why(factory) == f"{factory.__name__} updates a part of a parameter otherwise than the whole"


def test_a_rate_that_a_scheduler_sets_later_hides_nothing():
    assert "otherwise than the whole" in why(partial(Lamb, lr=0.0))
    assert why(partial(MySGD, lr=0.0)) is None


def test_what_cannot_run_on_a_part_is_told_with_its_error():
    assert why(OnlyMatrices).startswith(
        "OnlyMatrices could not be tried on a part of a parameter: RuntimeError"
    )
    (matrix, _) = parameters()
    assert "could not be tried" in why_not_in_parts(torch.optim.Muon, [matrix], [matrix])


def test_an_optimizer_that_changes_nothing_has_not_been_tried():
    assert why(Idle) == "Idle could not be tried: it has changed nothing"
    assert why(partial(Idle, lr=0.0)) is None


def test_each_group_is_tried_whose_parameters_are_sharded():
    def factory(given):
        matrix, vector = given
        return Mixed([{"params": [vector]}, {"params": [matrix], "centralised": True}], lr=0.1)

    assert "otherwise than the whole" in why(factory)
    assert why(factory, sharded=[1]) is None


def test_a_trial_changes_neither_parameters_nor_random_numbers():
    given = parameters()
    before, state = [p.clone() for p in given], torch.get_rng_state()
    why_not_in_parts(Noisy, given, given)
    assert all(map(torch.equal, given, before)) and torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in given)
