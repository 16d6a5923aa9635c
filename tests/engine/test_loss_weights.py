"""Losses that return (sum, weight): one process's mean over all tokens, under any plan and without MPI."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from hybridpipe.engine.loss_weights import LossWeights
from hybridpipe.optim.update import UpdateRule
from hybridpipe.stage.losses import MicrobatchLoss
from tests.engine.helpers import assert_same, in_threads, make_plan, one_process

TOKENS, CLASSES, PAD = 5, 3, -100
cross_entropy = nn.functional.cross_entropy
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3)


def of_tokens(outputs, targets):
    """Sum over the tokens that are not padding, and their number."""
    total = cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != PAD).sum()


def mean_of_tokens(outputs, targets):
    total, weight = of_tokens(outputs, targets)
    return total / weight


def tagger() -> nn.Sequential:
    """A model of each token by itself; its embedding's gradients are sparse."""
    return nn.Sequential(
        nn.Embedding(7, 4, sparse=True), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, CLASSES)
    ).double()


def minibatches(*sizes: int):
    """Sentences whose third and fourth are padding only, which is the second microbatch of two."""
    found = []
    for size in sizes:
        targets = torch.randint(0, CLASSES, (size, TOKENS))
        lengths = torch.randint(1, TOKENS + 1, (size, 1))
        lengths[2:4] = 0
        targets[torch.arange(TOKENS) >= lengths] = PAD
        found.append((torch.randint(0, 7, (size, TOKENS)), targets))
    return found


@pytest.mark.parametrize(
    "name, schedule, options",
    [
        ("1", "1f1b", {}),
        ("1-1", "1f1b", {}),
        ("2-1", "1f1b", {}),
        ("1-3", "gpipe", {}),
        ("2-2", "zero-bubble", {}),
        ("1-1-1", "zero-bubble", {"recompute": True}),
        ("1-1", "interleaved-1f1b", {"chunks": 2}),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant")
def test_the_loss_is_the_mean_over_the_tokens_of_the_minibatch(name, schedule, options):
    """The last minibatch has a single microbatch, and the one before it two."""
    model, data = tagger(), minibatches(12, 7, 3, 2)
    plan = make_plan(name, len(model), 6, schedule, **options)
    result = in_threads(plan, model, data, 2, of_tokens, torch.optim.SGD)
    expected = one_process(model, data, mean_of_tokens, torch.optim.SGD)
    assert_same(result._replace(gradients=[]), expected, within=1e-10)  # those seen are not scaled yet


@pytest.mark.parametrize("name, schedule", [("1-1", "1f1b"), ("2-1", "1f1b"), ("2-1", "zero-bubble")])
def test_clipping_sees_the_gradients_of_that_mean(name, schedule):
    model, data = tagger(), minibatches(12, 7, 3, 2)
    model[0].sparse = False
    plan, limit = make_plan(name, len(model), 6, schedule), 0.05
    rule = UpdateRule(momentum, clip_grad_norm=limit)
    expected = one_process(model, data, mean_of_tokens, momentum, clip_grad_norm=limit)
    norms = [torch.stack([g.norm() for g in each]).norm() for each in expected.gradients]
    assert max(norms) > limit > 0
    result = in_threads(plan, model, data, 2, of_tokens, rule=rule)
    assert_same(result._replace(gradients=[]), expected, within=1e-10)


@pytest.mark.parametrize("name, schedule", [("1-1-1", "pipedream"), ("1-1", "pipedream-2bw")])
def test_a_minibatch_of_one_microbatch_needs_nobodys_weights(name, schedule):
    """A pair is then no other loss than its quotient."""
    model, data = tagger(), minibatches(2, 2, 2, 2, 1)
    model[0].sparse = False
    plan = make_plan(name, len(model), 1, schedule)
    found, expected = (
        in_threads(plan, model, data, 2, loss, momentum) for loss in (of_tokens, mean_of_tokens)
    )
    assert_same(found, expected)


def weights_of(schedule: str = "1f1b", *others: list[float]) -> tuple[LossWeights, list[np.ndarray]]:
    """Make the weights of one rank; further ranks add `others`, one after the other."""
    told, rest = [], iter(others)

    def add_up(numbers):
        told.append(numbers)
        return numbers + next(rest, 0.0)

    return LossWeights(make_plan("1-1", 4, 2, schedule), add_up), told


def pair(weight: float) -> MicrobatchLoss:
    return MicrobatchLoss(torch.ones(()), weight)


MEAN = MicrobatchLoss(torch.ones(()))


def test_means_cost_one_exchange_in_a_training():
    weights, told = weights_of()
    assert [weights.weigh({0: MEAN, 1: MEAN}, [2, 2]).factor for _ in range(3)] == [1.0] * 3
    assert len(told) == 1


def test_a_rank_without_a_loss_learns_of_weights_from_the_others():
    weights, told = weights_of("1f1b", [3.0, 0.0, 2], [1.0, 1.0, 2])
    assert weights.weigh({}, [2, 2]).factor == 4 / 3
    assert weights.weigh({}, [2, 1]).factor == 3 / 2
    assert len(told) == 2


def test_a_minibatch_of_one_microbatch_is_not_exchanged_and_settles_nothing():
    weights, told = weights_of("1f1b", [0.0, 5.0, 1])
    assert weights.weigh({}, [2]).factor == 1.0 and weights.weigh({0: pair(3.0)}, [2]).factor == 1.0
    assert not told
    assert weights.weigh({0: pair(3.0)}, [2, 2]).factor == 4 / 8


def test_without_weight_the_gradients_are_zero():
    weights, _ = weights_of()
    assert weights.weigh({0: pair(0.0), 1: pair(0.0)}, [2, 2]).factor == 0.0
    assert weights.weigh({0: pair(0.0)}, [2]) == (1.0, False)  # its gradients are right as they are


def test_means_and_pairs_are_refused_on_one_rank_and_across_ranks():
    told = r"^loss must return the same kind for every microbatch.*got both$"
    weights, _ = weights_of()
    weights.check(MEAN, 0.5, updates=True)
    with pytest.raises(ValueError, match=told):
        weights.check(pair(1.0), 0.5, updates=True)
    weights, _ = weights_of("1f1b", [0.0, 1.0, 1])
    with pytest.raises(ValueError, match=told):
        weights.weigh({0: MEAN}, [2, 2])
    weights, _ = weights_of()
    weights.weigh({}, [2, 2])  # the others have returned means
    with pytest.raises(ValueError, match=told):
        weights.check(pair(1.0), 0.5, updates=True)


@pytest.mark.parametrize(
    "schedule, updates, told",
    [
        (
            "1f1b",
            False,
            r"^no_sync makes no sense with a loss that returns \(sum, weight\): .*one train_step$",
        ),
        ("pipedream-2bw", True, r"under pipedream-2bw: use microbatch_size = minibatch_size or a synch.*$"),
    ],
)
def test_what_cannot_be_exact_is_refused(schedule, updates, told):
    weights, _ = weights_of(schedule)
    weights.check(MEAN, 0.5, updates)
    weights, _ = weights_of(schedule)
    with pytest.raises(ValueError, match=told):
        weights.check(pair(1.0), 0.5, updates)
