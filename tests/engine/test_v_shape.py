"""Schedules whose chunks lie in a V, in threads, against one process in float64."""

import random
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

from hybridpipe import Plan, StageSpec
from hybridpipe.planning.plan import PassTimes
from hybridpipe.planning.schedules.generators import programs
from hybridpipe.planning.schedules.instructions import SendActivation, SendGradient
from tests.engine.helpers import Call, OnFirst, assert_same, in_threads, make_plan, one_process

FEATURES, CLASSES = 4, 3
SCHEDULES = ["zb-v", "v-half", "v-min"]
cross_entropy = nn.functional.cross_entropy
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3)


def minibatches(*sizes: int):
    return [(torch.randn(n, FEATURES, dtype=torch.float64), torch.randint(0, CLASSES, (n,))) for n in sizes]


def model() -> nn.Sequential:
    """Eight layers: one or more for each stage of four ranks, some of which work in place."""
    widths = [FEATURES, 6, 5, 5]
    hidden = [(nn.Linear(a, b), nn.ReLU(inplace=True)) for a, b in pairwise(widths)]
    return nn.Sequential(
        *(each for pair in hidden for each in pair), nn.Tanh(), nn.Linear(5, CLASSES)
    ).double()


def uneven(num_stages: int) -> tuple[PassTimes, ...]:
    draw = random.Random(num_stages)
    return tuple(PassTimes(*(draw.randint(0, 9) for _ in range(4))) for _ in range(num_stages))


@pytest.mark.parametrize("recompute", [False, True], ids=["stashed", "recomputed"])
@pytest.mark.parametrize("name", ["1-1", "2-2", "1-1-1", "2-2-2", "1-1-1-1", "2-2-2-2"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_plan_equals_one_process(schedule, name, recompute):
    """Full minibatches, one of four microbatches and one of one, where some replicas get none."""
    layers, data = model(), minibatches(24, 24, 7, 1)
    num_stages = 2 * len(name.split("-"))
    plan = make_plan(
        name, len(layers), 12, schedule, chunks=2, recompute=recompute, pass_times=uneven(num_stages)
    )
    result = in_threads(plan, layers, data, 2, cross_entropy, momentum)
    assert_same(result, one_process(layers, data, cross_entropy, momentum))


@pytest.mark.parametrize(
    "name, schedule, room", [("1-1-1", "v-min", 7), ("2-2-2-2", "v-half", 7), ("1-1", "zb-v", 6)]
)
def test_a_plan_with_more_room_equals_one_process(name, schedule, room):
    layers, data = model(), minibatches(24, 24, 7, 1)
    times = uneven(2 * len(name.split("-")))
    more = make_plan(name, len(layers), 12, schedule, chunks=2, pass_times=times, in_flight=room)
    assert programs(more) != programs(replace(more, in_flight=None))
    result = in_threads(more, layers, data, 2, cross_entropy, momentum)
    assert_same(result, one_process(layers, data, cross_entropy, momentum))


def tuples() -> nn.Sequential:
    """A model whose cuts carry a tensor with gradient, one of integers, one that is used later or never."""
    return nn.Sequential(
        nn.Linear(FEATURES, 6),
        Call(lambda x: (x, x.argmax(1), x, x + 1)),
        OnFirst(nn.Linear(6, 6)),
        OnFirst(nn.ReLU(inplace=True)),
        Call(lambda v: v[0] + v[2] * nn.functional.one_hot(v[1], 6)),
        nn.Linear(6, CLASSES),
    ).double()


@pytest.mark.parametrize("recompute", [False, True], ids=["stashed", "recomputed"])
@pytest.mark.parametrize("edges", [(0, 1, 2, 3, 6), (0, 1, 3, 4, 6), (0, 2, 4, 5, 6)])
def test_what_a_rank_hands_to_itself_is_what_it_would_send(edges, recompute):
    """Tuples, integers, in-place layers and tensors without a gradient pass the turn of the V."""
    layers, data = tuples(), minibatches(8, 5)
    stages = tuple(StageSpec(*each, recompute=recompute) for each in pairwise(edges))
    result = in_threads(Plan(stages, "zb-v", 4, chunks=2), layers, data, 2, cross_entropy, momentum)
    assert_same(result, one_process(layers, data, cross_entropy, momentum))


def test_a_tensor_without_a_gradient_has_none_behind_the_turn():
    """All that is trained lies before the turn, where the gradient ends: told as under any plan."""
    layers = [nn.Linear(FEATURES, CLASSES), Call(torch.Tensor.detach), nn.Tanh(), nn.Identity()]
    with pytest.raises(ValueError, match="the loss depends on nothing that is trained"):
        plan, made = make_plan("1-1", 4, 4, "zb-v", chunks=2), nn.Sequential(*layers).double()
        in_threads(plan, made, minibatches(8), 2, cross_entropy, momentum, timeout_seconds=0.5)


def test_nothing_is_sent_at_the_turn():
    """Of three cuts over two ranks two are crossed: the last rank sends no outputs of its first stage."""
    layers, data = model(), minibatches(8)
    result = in_threads(
        make_plan("1-1", len(layers), 4, "zb-v", chunks=2), layers, data, 2, cross_entropy, momentum
    )
    sent = {rank: [type(e.instruction) for part in result.events[rank] for e in part] for rank in (0, 1)}
    for rank in (0, 1):
        assert sent[rank].count(SendActivation) == sent[rank].count(SendGradient) == 4


@pytest.mark.parametrize("recompute", [False, True], ids=["stashed", "recomputed"])
def test_a_layer_behind_the_turn_that_overwrites_what_is_needed_before_it_is_told(recompute):
    """The stages at the turn share memory: a gradient of what was overwritten was silently another."""
    hidden = nn.Linear(FEATURES, 6), nn.Tanh(), nn.LeakyReLU(0.5, inplace=True)
    layers = nn.Sequential(*hidden, nn.Linear(6, CLASSES)).double()
    stages = [StageSpec(i, i + 1, recompute=recompute and i == 2) for i in range(4)]
    needed = "needed for gradient computation has been modified by an inplace operation"
    with pytest.raises(RuntimeError, match=needed):  # as in one process
        one_process(layers, minibatches(8), cross_entropy, momentum)
    with pytest.raises(RuntimeError, match=needed):
        plan = Plan(tuple(stages), "zb-v", 4, chunks=2)
        in_threads(plan, layers, minibatches(8), 2, cross_entropy, momentum, timeout_seconds=0.5)
