"""Replicas that shard their update, by hand: a step of 8 s, and 100 bytes of weights."""

from dataclasses import replace

import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster, Collective, Level
from hybridpipe.planning.cost.estimate import estimate
from hybridpipe.planning.plan import Variant
from hybridpipe.planning.schedules.instructions import AllGather, AllReduce, Backward, ReduceScatter, Step
from hybridpipe.planning.simulator.predict import predict
from tests.planning.helpers import layer, model, plan, times

PROFILE = model(layer(1, 2, parameters=100, update=8.0))
LEVEL = Level("all", 4, 1e9, 0.0, None, Collective(100.0, 0.0))
# An all-reduce over two ranks takes 1 s, a reduce-scatter 0.5 s, an all-gather 1 s.
CLUSTER = Cluster((replace(LEVEL, reduce_scatter=Collective(100.0, 0.0), all_gather=Collective(50.0, 0.0)),))


@pytest.mark.parametrize(
    "variant, reductions, step, gather",
    [
        (Variant(), [(6, 7)], (7, 15), []),
        (Variant(zero=1), [(6, 7)], (7, 11), [(11, 12)]),
        (Variant(zero=1, scatter=True), [(6, 6.5)], (6.5, 10.5), [(10.5, 11.5)]),
        (Variant(zero=2), [(3, 4), (7, 8)], (8, 12), [(12, 13)]),
        (Variant(zero=2, scatter=True), [(3, 3.5), (6.5, 7)], (7, 11), [(11, 12)]),
    ],
)
def test_a_half_of_the_step_and_an_all_gather(variant, reductions, step, gather):
    """Two microbatches a replica, each a forward of 1 s and a backward of 2 s."""
    made = plan([2], 4).running([variant])
    timeline, predicted = predict(made, PROFILE, CLUSTER)
    for rank in (0, 1):
        assert times(timeline, rank, ReduceScatter if variant.scatter else AllReduce) == reductions
        assert times(timeline, rank, Step) == [step]
        assert times(timeline, rank, AllGather) == gather
    assert predicted.minibatch_seconds == approx(estimate(made, PROFILE, replace(CLUSTER, overlap=0.0)))


def test_a_replica_without_a_microbatch_joins_every_reduction():
    """Replica 1 has one microbatch of three; its gradients of the second round are zeros."""
    made = plan([2], 3, zero=2)
    timeline, _ = predict(made, PROFILE, CLUSTER)
    assert times(timeline, 0, AllReduce) == [(3, 4), (7, 8)]
    assert times(timeline, 1, AllReduce) == [(3, 4), (4, 8)]
    assert times(timeline, 1, Backward) == [(1, 3)]


def test_the_weights_come_from_the_last_replica_that_has_updated():
    """Rank 1 is half as fast: backward until 6, step until 15; then 1 s of gathering for both."""
    slow = replace(CLUSTER, relative_speed=(1.0, 0.5, 1.0, 1.0))
    timeline, _ = predict(plan([2], 2, zero=1), PROFILE, slow)
    assert times(timeline, 0, Step) == [(7, 11)] and times(timeline, 1, Step) == [(7, 15)]
    assert times(timeline, 0, AllGather) == [(11, 16)] and times(timeline, 1, AllGather) == [(15, 16)]
    assert timeline.spent(plan([2], 2, zero=1))[0].allreduce_seconds == approx(2), "the wait is idle"


def test_asynchronous_figures_stay_where_nothing_is_sharded():
    made = plan([2, 1], 1, "pipedream")
    profile = model(layer(1, 2, parameters=100), layer(1, 2))
    seconds = predict(made, profile, CLUSTER)[1].minibatch_seconds
    assert seconds == predict(made, profile, Cluster((LEVEL,)))[1].minibatch_seconds
