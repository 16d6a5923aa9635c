"""Factories of optimizers that ask for the names of their parameters."""

from functools import partial

import torch

from hybridpipe.optim.named import with_names
from hybridpipe.optim.update import UpdateRule

sgd = partial(torch.optim.SGD, lr=1.0)


def parameters(*values):
    return [torch.nn.Parameter(torch.full((2,), value)) for value in values]


def test_a_factory_that_asks_for_names_gets_them():
    weight, bias = parameters(1.0, 2.0)
    names = {weight: "head.weight", bias: "head.bias"}

    def by_name(named_parameters, lr):
        decays = [{"params": [p], "weight_decay": float("bias" not in n)} for n, p in named_parameters]
        return torch.optim.SGD(decays, lr=lr)

    made = UpdateRule(partial(by_name, lr=0.5)).naming(names).optimizer([weight, bias])
    assert [(g["params"], g["weight_decay"]) for g in made.param_groups] == [([weight], 1.0), ([bias], 0.0)]
    assert with_names(sgd, names) is sgd
    with_builtin = with_names(dict, {})  # it has no signature
    assert with_builtin is dict


def test_names_that_an_optimizer_keeps_are_no_options_of_it():
    """Those of another plan's stage differ, and a checkpoint of it was refused."""
    (weight,) = parameters(1.0)
    made = with_names(lambda named_parameters: sgd(named_parameters), {weight: "head.weight"})([weight])
    assert made.param_groups[0]["params"] == [weight] and "param_names" not in made.param_groups[0]
