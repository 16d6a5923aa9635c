import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.cost import (
    BUCKET_BYTES,
    GradientBucket,
    StageCost,
    compute_share,
    estimate,
    peak_memory_bytes,
    stage_costs,
)
from hybridpipe.planning.plan import Plan, StageSpec

from .helpers import layer, model, plan

HALF = BUCKET_BYTES // 2


def test_a_stage_adds_up_its_layers():
    profile = model(
        layer(1, 2, update=0.1, output=7), layer(10, 20, update=0.2, output=8), layer(100, 200, output=9)
    )
    first, second = stage_costs(profile, Plan((StageSpec(0, 2), StageSpec(2, 3))))
    assert first == StageCost(11, 22, approx(0.3), output_bytes=8)
    assert second == StageCost(100, 200, 0.0, output_bytes=9)


@pytest.mark.parametrize(
    "layers, buckets",
    [
        ([(1, 0), (1, 0)], []),
        ([(1, 5)], [(5, 1.0)]),
        ([(1, HALF), (3, HALF)], [(BUCKET_BYTES, 1.0)]),  # gathered
        ([(1, HALF), (3, BUCKET_BYTES)], [(BUCKET_BYTES, 0.75), (HALF, 1.0)]),  # the last layer comes first
        ([(0, BUCKET_BYTES), (0, BUCKET_BYTES)], [(BUCKET_BYTES, 0.0), (BUCKET_BYTES, 0.0)]),
    ],
)
def test_buckets_fill_in_backward_order(layers, buckets):
    profile = model(*(layer(backward=backward, parameters=size) for backward, size in layers))
    (cost,) = stage_costs(profile, Plan.data_parallel(len(layers), 2, 2))
    assert cost.buckets == tuple(GradientBucket(*bucket) for bucket in buckets)


@pytest.mark.parametrize(
    "schedule, expected",
    [
        # weights, gradients, state; stashes: activations and the received input; one output
        ("1f1b", [100 * 4 + 2 * 3 + 7, 100 * 4 + 2 * 3 + 7, 10 * 4 + 1 * (5 + 7) + 1]),
        ("gpipe", [100 * 4 + 4 * 3 + 7, 100 * 4 + 4 * 3 + 7, 10 * 4 + 8 * (5 + 7) + 1]),
    ],
)
def test_peak_memory_of_2_1(schedule, expected):
    profile = model(
        layer(parameters=100, activation=3, output=7),
        layer(parameters=10, activation=5, output=1),
        state_factor=2,
    )
    assert peak_memory_bytes(profile, plan([2, 1], 8, schedule)) == tuple(expected)


def test_compute_share():
    cluster = Cluster(
        (Level("network", 6, 1.0, 0.0),),
        node_ranks=3,
        compute_slots=1.5,
        relative_speed=(1.0, 1.0, 0.5, 1.0, 1.0, 1.0),
    )
    assert compute_share(cluster, (0, 1, 2, 3)) == {0: 0.5, 1: 0.5, 2: 0.25, 3: 1.0}


def test_estimate_by_hand():
    """2-1, five microbatches, 10 bytes/s and 0.5 s of latency: sums 3 + 6 and 2 (2 + 0.5), then a maximum."""
    profile = model(layer(1, 2, parameters=100, output=20, update=0.25), layer(2, 4))
    cluster = Cluster.flat(3, 10.0, 0.5)
    stage_0 = 2 * 3 + (100 / 10 + 0.5 - 2) + 0.25
    stage_1 = 4 * 6
    assert max(stage_0, stage_1) == stage_1
    assert estimate(plan([2, 1], 5), profile, cluster) == approx(3 + 6 + 5 + stage_1)
    heavy = model(layer(1, 2, parameters=1000, output=20, update=0.25), layer(2, 4))
    assert estimate(plan([2, 1], 5), heavy, cluster) == approx(3 + 6 + 5 + stage_0 + 90)
    slow = Cluster.flat(3, 1.0, 0.5)
    assert estimate(plan([2, 1], 5), model(layer(output=20), layer()), slow) == approx(3 + 3 + 41 + 4 * 20)
