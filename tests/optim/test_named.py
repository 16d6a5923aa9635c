"""Factories of optimizers that ask for the names of their parameters."""

from functools import partial

import torch

from hybridpipe.optim.fused import fused
from hybridpipe.optim.named import with_names
from hybridpipe.optim.shares import take_over
from hybridpipe.optim.update import Given, UpdateRule
from hybridpipe.stage.state import StageState, check_optimizer, put_optimizer, read_optimizer, take_optimizer

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


def named(keys, values):
    """Return an SGD that torch has told the names, and those of its parameters."""
    names = dict(zip(values, keys, strict=True))
    return with_names(lambda named_parameters: sgd(named_parameters, momentum=0.9), names)(values), names


def test_names_stay_in_the_groups():
    """They were dropped: a group that a user added with names was refused."""
    weight, bias = parameters(1.0, 2.0)
    made, _ = named(["head.weight"], [weight])
    assert made.param_groups[0]["param_names"] == ["head.weight"]
    made.add_param_group({"params": [("head.bias", bias)]})
    assert [group["param_names"] for group in made.param_groups] == [["head.weight"], ["head.bias"]]


def test_names_are_no_options():
    """Those of another plan's stage differ, and a checkpoint of it was refused."""
    keys, states = ["a", "b", "c"], {}
    for part in ([0, 1], [2]):
        made, names = named([keys[i] for i in part], values := parameters(*map(float, part)))
        for p in values:
            p.grad = torch.ones(2)
        made.step()
        taken = StageState()
        take_optimizer(made, names, taken, Given.of(made).options)
        assert "param_names" not in repr(taken.meta)
        taken.meta["groups"][0]["param_names"] = [*names.values()]  # as an earlier version wrote them
        states |= read_optimizer(taken, "file")
    whole, names = named(keys, parameters(0.0, 1.0, 2.0))
    check_optimizer(whole, names, states, "file")
    put_optimizer(whole, names, states)
    assert whole.param_groups[0]["param_names"] == keys and len(whole.state) == 3


def test_names_follow_their_parameters_into_parts():
    first, second, third = values = parameters(1.0, 2.0, 3.0)
    made, _ = named(["a", "b", "c"], values)
    part = torch.nn.Parameter(second.detach()[:1])
    take_over(made, {first: first, second: part}, {second: range(1), third: range(0)})
    assert made.param_groups[0]["params"] == [first, part]
    assert made.param_groups[0]["param_names"] == ["a", "b"]


def test_a_hook_behind_a_fused_step_sees_each_parameters_name():
    values, seen = parameters(1.0, 2.0, 3.0), []
    made, names = named(["a", "b", "c"], values)
    for p in values[1:]:
        p.grad = torch.ones(2)
    made.register_step_post_hook(
        lambda *_: seen.extend(pair for g in made.param_groups for pair in zip(g["params"], g["param_names"]))
    )
    with fused(made):
        made.step()
    assert dict(seen) == {p: names[p] for p in values[1:]}
