"""The executor under many plans, in threads, against one process in float64."""

import queue
import random
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from hybridpipe import Plan, StageSpec
from hybridpipe.comm.messages import ProtocolError
from hybridpipe.planning.schedules.generators import programs
from hybridpipe.planning.schedules.instructions import AllReduce, Forward, Load, Products, Step
from hybridpipe.stage import wgrad
from tests.engine.helpers import Call, OnFirst, assert_same, in_threads, make_plan, one_process

FEATURES, CLASSES = 4, 3
cross_entropy = nn.functional.cross_entropy
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3)


def minibatches(*sizes: int):
    return [(torch.randn(n, FEATURES, dtype=torch.float64), torch.randint(0, CLASSES, (n,))) for n in sizes]


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, CLASSES)
    ).double()


def skip() -> nn.Sequential:
    """A model whose cuts carry three tensors: one with gradient, one of integers, one skip connection."""
    return nn.Sequential(
        nn.Linear(FEATURES, 6),
        Call(lambda x: (x, x.argmax(1), x)),
        OnFirst(nn.Linear(6, 6)),
        OnFirst(nn.ReLU(inplace=True)),
        Call(lambda v: v[0] + v[2] * nn.functional.one_hot(v[1], 6)),
        nn.Linear(6, CLASSES),
    ).double()


def frozen(*indices: int) -> nn.Sequential:
    model = mlp()
    for i in indices:
        model[i].requires_grad_(False)
    return model


def with_unused() -> nn.Sequential:
    """A model with parameters that no microbatch uses: their gradients stay None, so no weight decay."""
    model = mlp()
    for i in (0, 4):
        model[i].register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    return model


def branches() -> nn.Sequential:
    """A model whose cuts after the first layer carry a tensor that no later layer uses."""
    return nn.Sequential(
        Both(FEATURES, 6),
        OnFirst(nn.Tanh()),
        OnFirst(nn.Linear(6, 5)),
        Call(lambda v: v[0]),
        nn.Linear(5, CLASSES),
    ).double()


class Both(nn.Module):
    def __init__(self, features: int, width: int):
        super().__init__()
        self.used, self.unused = nn.Linear(features, width), nn.Linear(features, width)

    def forward(self, x):
        return self.used(x), self.unused(x)


def detached() -> nn.Sequential:
    """A model without a gradient at cuts before the third layer."""
    return nn.Sequential(
        nn.Linear(FEATURES, 6), nn.Tanh(), Call(torch.Tensor.detach), nn.Linear(6, CLASSES)
    ).double()


class OnPositive(nn.Module):
    """Uses its parameters only if some sample begins with a positive number."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)

    def forward(self, x):
        positive = x[:, :1] > 0
        return torch.where(positive, self.inner(x), x) if positive.any() else x


@pytest.mark.parametrize("recompute", [False, True], ids=["stashed", "recomputed"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize(
    "name", ["1", "3", "1-1", "2-1", "1-2", "3-2", "1-3", "2-2", "1-1-1-1", "2-1-2", "1-2-1"]
)
def test_every_plan_equals_one_process(name, schedule, recompute):
    model, data = mlp(), minibatches(12, 12, 7, 1)  # 6, 6, 4 and 1 microbatches: some replicas get none
    plan = make_plan(name, len(model), 6, schedule, recompute=recompute)
    result = in_threads(plan, model, data, 2, cross_entropy, momentum)
    assert_same(result, one_process(model, data, cross_entropy, momentum))


@pytest.mark.parametrize("recompute", [False, True], ids=["stashed", "recomputed"])
@pytest.mark.parametrize("in_flight, weight_lag", [(7, None), (8, 12), (None, 5), (1, 3), (5, 0)])
@pytest.mark.parametrize("name", ["1-1-1-1", "2-1-2", "1-3", "3-2"])
def test_more_in_flight_and_a_longer_lag_equal_one_process(name, in_flight, weight_lag, recompute):
    """Zero-bubble's two numbers change when weight gradients are computed, not what they are."""
    model, data = mlp(), minibatches(24, 24, 7, 1)
    numbers = {"in_flight": in_flight, "weight_lag": weight_lag, "recompute": recompute}
    plan = make_plan(name, len(model), 12, "zero-bubble", **numbers)
    result = in_threads(plan, model, data, 2, cross_entropy, momentum)
    assert_same(result, one_process(model, data, cross_entropy, momentum))


@pytest.mark.parametrize("name, chunks", [("1-1", 2), ("2-2", 2), ("1-1-1", 2), ("3-3", 3), ("1-1", 3)])
def test_several_stages_on_a_rank_equal_one_process(name, chunks):
    model, data = nn.Sequential(*mlp(), nn.Linear(CLASSES, CLASSES).double()), minibatches(12, 12, 7, 1)
    plan = make_plan(name, len(model), 6, "interleaved-1f1b", chunks=chunks)
    result = in_threads(plan, model, data, 2, cross_entropy, momentum)
    assert_same(result, one_process(model, data, cross_entropy, momentum))


def test_one_stage_recomputes_and_the_other_does_not():
    model, data = mlp(), minibatches(12, 7)
    stages = (StageSpec(0, 3, recompute=True), StageSpec(3, 5))
    result = in_threads(Plan(stages, num_microbatches=6), model, data, 2, cross_entropy, momentum)
    assert_same(result, one_process(model, data, cross_entropy, momentum))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_fifteen_replicas_and_one(schedule):
    model, data = mlp(), minibatches(30, 30, 9)
    result = in_threads(make_plan("15-1", 5, 30, schedule), model, data, 1, cross_entropy, momentum)
    assert_same(result, one_process(model, data, cross_entropy, momentum))


@pytest.mark.parametrize("name", ["1-1", "2-1", "1-3", "3-2", "1-1-1-1"])
@pytest.mark.parametrize(
    "make_model",
    [skip, partial(frozen, 0), partial(frozen, 2), partial(frozen, 4), partial(frozen, 0, 4), with_unused],
    ids=["skip", "frozen first", "frozen middle", "frozen last", "frozen both ends", "unused"],
)
def test_models_that_are_no_plain_chain(make_model, name):
    model, data = make_model(), minibatches(8, 8, 3)
    result = in_threads(make_plan(name, len(model), 4), model, data, 2, cross_entropy, momentum)
    assert_same(result, one_process(model, data, cross_entropy, momentum))


@pytest.mark.parametrize("recompute", [False, True], ids=["stashed", "recomputed"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("name", ["1-1", "2-1", "1-3", "1-1-1"])
@pytest.mark.parametrize("make_model", [branches, detached])
def test_what_nothing_behind_a_cut_uses_has_no_gradient(make_model, name, schedule, recompute):
    """The next stage once sent zeros, so weight decay and momentum changed unused parameters."""
    model, data = make_model(), minibatches(8, 8, 3)
    plan = make_plan(name, len(model), 4, schedule, recompute=recompute)
    result = in_threads(plan, model, data, 2, cross_entropy, momentum)
    assert_same(result, one_process(model, data, cross_entropy, momentum))
    assert None in result.gradients[0]


def test_a_loss_that_depends_on_nothing_trained_is_refused():
    model = nn.Sequential(nn.Linear(FEATURES, CLASSES), Call(torch.Tensor.detach)).double()
    with pytest.raises(ValueError, match="the loss depends on nothing that is trained"):
        in_threads(make_plan("1", 2, 4), model, minibatches(8), 2, cross_entropy, momentum)


class Drawing(nn.Module):
    """Scales its input by numbers drawn from torch, Python and NumPy."""

    def forward(self, x):
        return x * (torch.rand(()) + random.random() + np.random.random())


def test_a_recomputed_layer_draws_the_same_numbers_and_the_process_none():
    """Draws from `random` and NumPy were once not keyed: loss and gradient came from different forwards."""
    layers = nn.Linear(FEATURES, 6), Drawing(), nn.Linear(6, CLASSES), Drawing()
    model, data = nn.Sequential(*layers).double(), minibatches(4, 4)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    stashed, recomputed = (
        in_threads(make_plan("1", 4, 2, recompute=again), model, data, 2, cross_entropy, momentum)
        for again in (False, True)
    )
    assert_same(recomputed, stashed)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


@pytest.mark.parametrize("edges", [1, 2, 3, 4, 5])
def test_tuples_cross_every_cut(edges):
    model, data = skip(), minibatches(8, 5)
    plan = Plan((StageSpec(0, edges, 2), StageSpec(edges, 6)), num_microbatches=4)
    result = in_threads(plan, model, data, 2, cross_entropy, momentum)
    assert_same(result, one_process(model, data, cross_entropy, momentum))


@pytest.mark.parametrize("stages", [(StageSpec(0, 3, 3),), (StageSpec(0, 1), StageSpec(1, 3, 3))])
def test_a_parameter_that_only_some_microbatches_use(stages):
    model = nn.Sequential(nn.Identity(), OnPositive(), nn.Linear(FEATURES, CLASSES)).double()
    data = minibatches(3, 3, 3)
    for (inputs, _), signs in zip(data, [(1, -1, -1), (-1, -1, -1), (-1, 1, 1)], strict=True):
        inputs[:, 0] = torch.tensor(signs)
    result = in_threads(Plan(stages, num_microbatches=3), model, data, 1, cross_entropy, momentum)
    assert_same(result, one_process(model, data, cross_entropy, momentum))
    assert [gradients[0] is None for gradients in result.gradients] == [False, True, False]


def test_adam():
    model, data, adam = mlp(), minibatches(12, 12, 5), partial(torch.optim.Adam, lr=0.01)
    result = in_threads(make_plan("2-1", 5, 6), model, data, 2, cross_entropy, adam)
    assert_same(result, one_process(model, data, cross_entropy, adam), within=1e-10)


@pytest.mark.parametrize("name", ["1-2-1", "3-2"])
def test_events_are_the_program_in_order_and_do_not_overlap(name):
    """A load event precedes each forward of the first and the last stage."""
    model, data = mlp(), minibatches(12, 7)
    plan = make_plan(name, len(model), 6)
    result = in_threads(plan, model, data, 2, cross_entropy, momentum)
    for rank in plan.ranks:
        for events, count in zip(result.events[rank], (6, 4), strict=True):
            expected = []
            for each in programs(plan, count)[rank]:
                if isinstance(each, Forward) and plan.place(rank).stage in (0, plan.num_stages - 1):
                    expected.append(Load(each.microbatch))
                expected.append(each)
            assert [event.instruction for event in events] == expected
            times = [time for event in events for time in (event.start_seconds, event.end_seconds)]
            assert times == sorted(times)


WIDE = 512


@pytest.mark.parametrize(
    "name, schedule, chunks, making",
    [
        ("1-1", "1f1b", 1, {1}),
        ("1-1-1", "gpipe", 1, {1, 2}),
        ("1-2", "1f1b", 1, set()),  # the all-reduce starts in the last backward
        ("1-1", "interleaved-1f1b", 3, {0, 1}),  # in the later stage of each rank
        ("1-1", "zero-bubble", 1, set()),  # a product for each microbatch
    ],
)
def test_deferred_wgrad_is_computed_after_the_last_send(monkeypatch, name, schedule, chunks, making):
    """It once delayed the last gradient's send, by a fifth of a minibatch with large layers."""
    monkeypatch.setattr(wgrad, "LEAST_ELEMENTS", WIDE * WIDE)
    model = nn.Sequential(nn.Linear(FEATURES, WIDE), *(nn.Linear(WIDE, WIDE) for _ in range(5))).double()
    data = minibatches(12, 7)
    plan = make_plan(name, len(model), 6, schedule, chunks=chunks)
    result = in_threads(plan, model, data, 2, cross_entropy, momentum)
    assert_same(result, one_process(model, data, cross_entropy, momentum))
    for rank in plan.ranks:
        for events in result.events[rank]:
            names = [type(event.instruction) for event in events]
            count = len(plan.held_stages(plan.place(rank))) - (rank == 0)  # no stage waits for the first one
            assert names.count(Products) == (count if rank in making else 0)
            if rank in making:
                first = names.index(Products)
                assert set(names[first:]) == {Products, AllReduce, Step}


def test_a_failing_stage_ends_the_training():
    class Broken(Exception):
        pass

    def fail(x):
        if threading.active_count() > 1 and x.requires_grad:
            raise Broken
        return x

    model = nn.Sequential(nn.Linear(FEATURES, 4), Call(fail), nn.Linear(4, CLASSES)).double()
    with pytest.raises(Broken):
        in_threads(
            make_plan("2-2", 3, 4), model, minibatches(8), 2, cross_entropy, momentum, timeout_seconds=0.5
        )


def test_a_message_that_never_comes_is_told():
    model = nn.Sequential(
        nn.Linear(FEATURES, 4), Call(lambda x: time.sleep(1) or x), nn.Linear(4, CLASSES)
    ).double()
    with pytest.raises(queue.Empty):
        in_threads(
            make_plan("1-1", 3, 4), model, minibatches(8), 2, cross_entropy, momentum, timeout_seconds=0.2
        )


def test_a_shape_that_changes_is_told():
    widths = iter([6, 6, 5, 6])
    model = nn.Sequential(
        nn.Linear(FEATURES, 6), Call(lambda x: x[:, : next(widths)]), Call(lambda x: x[:, :CLASSES])
    ).double()
    with pytest.raises(ProtocolError, match=r"\(2, 6\) float64 with gradient before, \(2, 5\) float64"):
        in_threads(
            make_plan("1-1", 3, 4), model, minibatches(8), 2, cross_entropy, momentum, timeout_seconds=0.5
        )
