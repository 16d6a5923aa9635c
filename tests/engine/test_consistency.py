"""The facts that ranks compare, as text; tests/mpi compares them between processes."""

from functools import partial

import pytest
import torch
from torch import nn

from hybridpipe.engine.consistency import callable_text, check_alike, facts, plan_text
from hybridpipe.optim.update import UpdateRule
from hybridpipe.planning.plan import Plan, Prediction, StageSpec

PLAN = Plan((StageSpec(0, 1), StageSpec(1, 2)))


class World:
    """A world of two as rank 1 sees it, where rank 0 has the facts `first`."""

    size = 2

    def __init__(self, first):
        self.first = first

    def bcast(self, _):
        return self.first

    def allgather(self, mine):
        return [None, mine]


def described(**changes):
    options = {"width": 4, "lr": 0.1, "plan": PLAN, "seed": 0} | changes
    model = nn.Sequential(nn.Linear(4, options["width"]), nn.ReLU())
    rule = UpdateRule(partial(torch.optim.SGD, lr=options["lr"]))
    return facts(model, nn.functional.mse_loss, rule, options["plan"], seed=options["seed"])


def test_the_same_passes():
    check_alike(World(described()), described())


@pytest.mark.parametrize(
    "change, told",
    [
        ({"seed": 1}, "seed must be the same on all ranks: rank 0 has 0, rank 1 has 1"),
        ({"lr": 0.2}, "optimizer must be .* rank 0 has SGD\\(lr=0.1\\), rank 1 has SGD\\(lr=0.2\\)"),
        (
            {"width": 5},
            r"0.weight of the model must be .* rank 0 has \(4, 4\) float32, rank 1 has \(5, 4\) float32",
        ),
        ({"plan": Plan((StageSpec(0, 2),))}, "plan must be .* rank 0 has 1-1 under 1f1b"),
    ],
)
def test_what_differs_is_told_in_one_line(change, told):
    with pytest.raises(ValueError, match=told) as refused:
        check_alike(World(described()), described(**change))
    assert "\n" not in str(refused.value)


def test_another_version_is_told_first():
    theirs = described(seed=1) | {"the version of torch": "1.0"}
    with pytest.raises(ValueError, match=r"the version of torch must be .* rank 0 has 1\.0, rank 1 has 2"):
        check_alike(World(theirs), described())


def test_a_cycle_time_of_the_first_host_only_is_told(monkeypatch):
    """Open MPI passes only its own variables to other hosts; ranks would fuse different tensors."""
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "10")
    theirs = described()
    monkeypatch.delenv("HOROVOD_CYCLE_TIME")
    with pytest.raises(ValueError, match=r"HOROVOD_CYCLE_TIME must be .* rank 0 has 10, rank 1 has nothing"):
        check_alike(World(theirs), described())


def test_a_layer_more_is_nothing_elsewhere():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    theirs = facts(model, nn.functional.mse_loss, UpdateRule(partial(torch.optim.SGD, lr=0.1)), PLAN, seed=0)
    with pytest.raises(ValueError, match=r"layer 2 of the model .* rank 0 has Linear, rank 1 has nothing"):
        check_alike(World(theirs), described())


def test_predictions_do_not_count_and_addresses_are_not_seen():
    from dataclasses import replace

    predicted = replace(PLAN, predicted=Prediction(0.1, 10.0, 0.0, (1, 1)))
    assert plan_text(predicted) == plan_text(PLAN)
    assert "0x" not in callable_text(partial(nn.functional.cross_entropy, weight=torch.ones(3)))
