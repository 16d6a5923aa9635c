"""The facts that ranks compare, as text; tests/mpi compares them between processes."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from hybridpipe.comm.status import rank_status
from hybridpipe.config.options import GroupOptions
from hybridpipe.data.samples import DRAWN_ANEW
from hybridpipe.data.source import Source
from hybridpipe.engine.consistency import (
    callable_text,
    check_alike,
    check_data_alike,
    check_repeatable,
    check_same_minibatch,
    facts,
    modes_and_requires_grad,
    plan_text,
    settings,
    structure,
)
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


class Many(World):
    """A world of five as rank 1 sees it: ranks 3 and 4 have its facts, rank 2 has others."""

    size = 5

    def allgather(self, mine):
        assert rank_status.wait.peers == (0, 1, 2, 3, 4)
        return [None, mine, ("seed", "0", "7"), mine, mine]


def test_all_ranks_that_have_the_same_are_named():
    told = "seed must be the same on all ranks: rank 0 has 0, ranks 1, 3, 4 have 1; ask them"
    with pytest.raises(ValueError) as refused:
        check_alike(Many(described()), described(seed=1), remedy="ask them")
    assert str(refused.value) == told
    assert rank_status.wait is None


def test_a_rank_alone_asks_no_one():
    alone = World(None)
    alone.size = 1
    check_alike(alone, described())
    check_same_minibatch(alone, torch.ones(3), None)


class Minibatches:
    """Two ranks' minibatches, compared as an all-reduce does."""

    size = 2

    def __init__(self):
        self.handed_in = []

    def Allreduce(self, _, extremes, op):
        self.handed_in.append(extremes.copy())
        assert rank_status.wait.peers == (0, 1)
        np.minimum.reduce(self.handed_in, out=extremes)


@pytest.mark.parametrize(
    "other, same",
    [
        (lambda x: x.clone(), True),
        (lambda x: x + torch.eye(4, 3)[[3, 3, 3, 0]], False),  # the last sample
        (lambda x: x + torch.eye(4, 3)[[0, 3, 3, 3]], False),  # the first
        (lambda x: x + torch.eye(4, 3)[[3, 0, 3, 3]], True),  # one between is not looked at
        (lambda x: x.double(), False),
        (lambda x: x[[0, 1, 3]], False),
        (lambda x: (x, x), False),
        (lambda x: {"x": x}, False),
    ],
)
def test_minibatches_are_compared_by_their_shapes_and_ends(other, same):
    world, mine = Minibatches(), torch.arange(12.0).reshape(4, 3)
    check_same_minibatch(world, mine, torch.ones(4))
    if same:
        check_same_minibatch(world, other(mine), torch.ones(4))
    else:
        with pytest.raises(ValueError, match="train_step: inputs and targets must be the same on all ranks"):
            check_same_minibatch(world, other(mine), torch.ones(4))
    assert rank_status.wait is None


def test_a_target_that_is_drawn_anew_is_refused_where_stages_load_apart():
    fixed = {"inputs of dataset[0]": "0a1b2c3d", "target of dataset[0]": "0a1b2c3d"}
    drawn = {"target of dataset[0]": DRAWN_ANEW}

    class Layers:
        def __init__(self, needs):
            self.needs = needs

        def stage(self, start, stop):
            return self

        def needs_inputs(self, training):
            return self.needs

    plain = Layers(False)
    check_repeatable(PLAN, fixed, plain)
    inputs = {"inputs of dataset[0]": DRAWN_ANEW}
    check_repeatable(PLAN, inputs, plain)
    with pytest.raises(ValueError, match="a sample's input changes each time it is loaded"):
        check_repeatable(PLAN, inputs, Layers(True))  # a mask that a later stage loads
    check_repeatable(Plan((StageSpec(0, 2, 2),)), drawn, plain)  # one rank loads both
    with pytest.raises(ValueError, match="a sample's target changes each time it is loaded"):
        check_repeatable(PLAN, drawn, plain)


def test_data_sets_are_compared_but_for_what_a_rank_draws_anew():
    class Two:
        size = 2

        def allgather(self, mine):
            return [mine, {"inputs"}] if isinstance(mine, set) else [None, mine]

        def bcast(self, facts):
            return facts | {"len(dataset)": "4"}

    data = [(torch.ones(2), i) for i in range(3)]
    told = r"len\(dataset\) must be .* rank 0 has 4, rank 1 has 3; every rank passes the whole data set"
    with pytest.raises(ValueError, match=told):
        check_data_alike(Two(), "dataset", Source(data), seed=0)
    same = Two()
    same.bcast = lambda facts: facts
    found = check_data_alike(same, "dataset", Source(data), seed=0)
    assert found["len(dataset)"] == "3"
    assert len({text for name, text in found.items() if name.startswith("inputs")}) == 1
    assert len({text for name, text in found.items() if name.startswith("target")}) == 3


def test_an_iterable_that_gives_other_samples_each_time_is_refused_on_one_rank_too():
    samples = iter([(torch.ones(1), i) for i in range(12)])

    class Wrapping(IterableDataset):
        def __iter__(self):
            yield from samples

    class Alone:
        size = 1

        def allgather(self, mine):
            return [mine]

    with pytest.raises(
        ValueError, match=r"^dataset gives other samples each time it is iterated, so neither"
    ):
        check_data_alike(Alone(), "dataset", Source(Wrapping()), seed=0)


def test_a_model_is_told_by_its_layers_tensors_modes_and_what_is_trained():
    model = nn.Sequential(nn.Linear(2, 3), nn.Module())
    model[1].register_buffer("mask", torch.ones(1, 4).expand(5, 4))
    model[0].bias.requires_grad_(False)
    model[1].eval()
    assert structure(model) == {
        "layer 0 of the model": "Linear",
        "layer 1 of the model": "Module",
        "0.weight of the model": "(3, 2) float32",
        "0.bias of the model": "(3,) float32",
        "1.mask of the model": "(5, 4) float32 expanded along [0]",
        **modes_and_requires_grad(model),
    }
    assert modes_and_requires_grad(model) == {
        "the mode of the model": "training",
        "the mode of 0": "training",
        "the mode of 1": "evaluation",
        "requires_grad of 0.weight": "True",
        "requires_grad of 0.bias": "False",
    }


def test_settings_name_what_is_frozen():
    rule = UpdateRule(torch.optim.SGD, clip_grad_norm=1.5)
    model = nn.Sequential(nn.Linear(2, 3))
    assert settings(model, nn.functional.mse_loss, rule, GroupOptions())["frozen parameters"] == "none"
    model[0].bias.requires_grad_(False)
    found = settings(model, nn.functional.mse_loss, rule, GroupOptions())
    assert found["frozen parameters"] == "0.bias" and found["clip_grad_norm"] == "1.5"
    assert {name for name in found if name.startswith("groups.")} == {"groups.count"}


def test_settings_name_each_option_of_groups():
    """A line that compared all at once was cut off before what differed."""
    rule, model = UpdateRule(torch.optim.SGD), nn.Linear(2, 3)
    one, other = (
        settings(model, nn.functional.mse_loss, rule, GroupOptions(count=2, outer_lr=rate))
        for rate in (0.5, 0.6)
    )
    assert {name: one[name] for name in one if one[name] != other[name]} == {"groups.outer_lr": "0.5"}


def test_a_callable_is_told_by_its_code_and_what_it_closes_over():
    def weighted(factor, extra=None):
        def loss(outputs, targets):
            return factor * nn.functional.mse_loss(outputs, targets), extra

        return loss

    def text(function):
        return callable_text(function, with_code=True)

    assert text(weighted(2.0)) == text(weighted(2.0)) != text(weighted(3.0))
    assert text(weighted(2.0, torch.ones(2))) == text(weighted(2.0, torch.zeros(2)))  # may be a rank's own
    assert text(lambda o, t: o - t) != text(lambda o, t: o + t)
    assert text(lambda o, t: lambda: o - t) != text(lambda o, t: lambda: o + t)
    assert callable_text(weighted(2.0)) == callable_text(weighted(3.0)).split(" (")[0]
    assert text(nn.functional.mse_loss) == "mse_loss"


def test_a_module_is_told_by_its_options_and_tensors():
    one = nn.CrossEntropyLoss(weight=torch.ones(3), label_smoothing=0.1)
    other = nn.CrossEntropyLoss(weight=torch.full((3,), 2.0), label_smoothing=0.1)
    assert callable_text(one) != callable_text(other)
    assert "label_smoothing=0.1" in callable_text(one) and "ignore_index=-100" in callable_text(one)
    assert "training" not in callable_text(one) and "_parameters" not in callable_text(one)
    assert callable_text(one) == callable_text(one.eval())
    text = callable_text(partial(nn.functional.huber_loss, delta=2.0, sizes=[1, (2, None)]))
    assert text == "huber_loss(delta=2.0, sizes=(1, (2, None)))"
