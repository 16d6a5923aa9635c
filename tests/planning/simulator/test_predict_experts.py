"""Stages that split experts: replicas run every pass together, and exchange tokens in it."""

from dataclasses import replace

import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.cost.estimate import estimate
from hybridpipe.planning.cost.formula import stage_costs
from hybridpipe.planning.cost.memory import peak_memory_bytes
from hybridpipe.planning.layer_parts import ExpertsProfile
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.schedules.generators import programs
from hybridpipe.planning.schedules.instructions import Backward, Forward, JoinForward
from hybridpipe.planning.simulator.predict import predict, simulate
from tests.planning.helpers import free, layer, model, plan, times

EVEN = ExpertsProfile(parameter_bytes=600, share=0.5, token_bytes=100, tokens=((2, 2), (1, 1)))


def mixture(experts=EVEN, **given):
    return replace(layer(**{"parameters": 1000, **given}), experts=experts)


def split(replicas, count, schedule="1f1b", **options):
    made = plan(replicas, count, schedule, **options)
    return replace(made, stages=tuple(replace(each, experts=True) for each in made.stages))


def seconds(profile, cluster, made):
    return predict(made, profile, cluster)[1].minibatch_seconds


def run(profile, cluster, made):
    return simulate(programs(made), made, stage_costs(profile, made), cluster)


def test_the_busiest_replica_sets_the_pace():
    """Tokens are 5 and 3 of 8, so half of a pass takes 5/4 of the mean."""
    uneven = replace(EVEN, tokens=((4, 2), (1, 1)))
    assert uneven.imbalance(2) == 5 * 2 / 8 and EVEN.imbalance(2) == 1
    for experts, factor in ((EVEN, 1), (uneven, 1 + 0.5 * 0.25)):
        assert seconds(model(mixture(experts)), free(2), split([2], 4)) == approx(2 * 3 * factor)


def test_replicas_begin_a_pass_together():
    """The second replica's first activation comes a second later, and the first waits for it."""
    profile, made = model(layer(1, 2), mixture()), split([1, 2], 2)
    timeline = run(profile, free(3), made)
    assert times(timeline, 1, Forward) == [(1, 3)]  # waits inside of the pass
    assert times(timeline, 2, Forward) == [(2, 3)]
    assert times(timeline, 1, Backward) == [(3, 5)]
    assert times(timeline, 2, Backward) == [(3, 5)]


def test_a_replica_without_a_microbatch_joins():
    timeline = run(model(mixture()), free(2), split([2], 3))
    assert [len(times(timeline, rank, JoinForward)) for rank in (0, 1)] == [0, 1]
    assert timeline.seconds == approx(2 * 3)


def test_tokens_go_out_and_come_back():
    """Two modules: three calls each in a forward, two in a backward; half of the bytes are for the other."""
    cluster = Cluster((Level("network", 2, bandwidth=50.0, latency_seconds=0.25),))
    ring = cluster.all_to_all((0, 1))
    assert (ring.latency_seconds, ring.seconds_per_byte) == (0.25, 0.5 / 50)
    alone = 1 + 2 + 2 * (3 + 2) * 0.25 + 4 * 100 * 0.5 / 50
    reduced = 2 * 0.25 + (1000 - 600) * 2 * 0.5 / 50  # the rest's gradients, in one bucket
    made = split([2], 2)
    assert seconds(model(mixture()), cluster, made) == approx(alone + reduced)
    assert estimate(made, model(mixture()), cluster) == approx(alone + reduced - 2)  # the backward hides


def test_an_exchange_between_units_shares_their_links():
    """Of four ranks on two machines each machine's link carries both ranks' halves."""
    levels = (Level("machine", 2, 1e9, 0.0), Level("network", 4, 100.0, 0.5, shared_bandwidth=50.0))
    ring = Cluster(levels).all_to_all((0, 1, 2, 3))
    assert ring.latency_seconds == approx(2 * 0.5)
    assert ring.seconds_per_byte == approx(2 * 2 / 4 / 50)


def test_a_replica_holds_its_part():
    profile, cluster = model(mixture(), state_factor=2.0), free(2)
    whole, halved = (peak_memory_bytes(profile, made)[0] for made in (plan([2], 2), split([2], 2)))
    weights, gradients, state = 300, 300, 2 * 300
    assert whole - halved - (weights + gradients + state) in range(2 * 301)  # and less room to reduce
    sharded = peak_memory_bytes(profile, replace(split([2], 2), zero=1))[0]
    assert halved - sharded == 400 * 2 / 2  # the rest's state; the experts' has one owner
    assert predict(split([2], 2), profile, cluster)[1].peak_memory_bytes == (halved, halved)


@pytest.mark.parametrize("replicas", [1, 3])
def test_where_there_is_nothing_to_split_all_is_as_before(replicas):
    """One replica, or several that do not divide the experts."""
    profile, made = model(mixture()), split([replicas], 6)
    assert predict(made, profile, free(3)) == predict(plan([replicas], 6), profile, free(3))


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"share": 1.5}, "share must be a finite number <= 1, got 1.5"),
        ({"tokens": ()}, "tokens must hold at least one expert of at least one module, got none"),
        ({"tokens": ((1, -1),)}, "tokens must be an integer >= 0, got -1"),
    ],
)
def test_figures_of_experts_are_checked(wrong, told):
    with pytest.raises(ValueError, match=told):
        replace(EVEN, **wrong)
    with pytest.raises(
        ValueError, match=r"experts\.parameter_bytes must be <= parameter_bytes = 10, got 600"
    ):
        mixture(parameters=10)


def test_the_plan_says_which_stage_splits():
    made = Plan((StageSpec(0, 1, 2), StageSpec(1, 2, 2, experts=True)), num_microbatches=4)
    assert predict(made, model(layer(1, 2), mixture()), free(4))[1].minibatch_seconds > 0
