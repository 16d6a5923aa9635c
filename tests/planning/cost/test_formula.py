from dataclasses import replace

import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.cost.estimate import estimate
from hybridpipe.planning.cost.formula import (
    BUCKET_BYTES,
    GradientBucket,
    StageCost,
    compute_share,
    measured_speed,
    stage_costs,
)
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import JoinedProducts
from hybridpipe.planning.simulator.predict import predict
from tests.planning.helpers import free, layer, model, plan

HALF = BUCKET_BYTES // 2


def test_a_stage_adds_up_its_layers():
    profile = model(
        layer(1, 2, update=0.1, output=7), layer(10, 20, update=0.2, output=8), layer(100, 200, output=9)
    )
    first, second = stage_costs(profile, Plan((StageSpec(0, 2), StageSpec(2, 3))))
    assert first == StageCost(11, 22, approx(0.3), output_bytes=8, gradient_bytes=8)
    assert second == StageCost(100, 200, 0.0, output_bytes=9, gradient_bytes=9)


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


def test_recomputation_puts_a_forward_into_the_backward():
    profile = model(layer(1, 2, output=7), layer(3, 4, output=9))
    (cost,) = stage_costs(profile, Plan((StageSpec(0, 2),), recompute=True))
    assert (cost.forward_seconds, cost.backward_seconds) == (4, 10)


def test_costs_are_those_of_a_rank_alone():
    """Measured while two ranks shared the machine at half speed: alone it is twice as fast."""
    profile = replace(model(layer(1, 2, update=3, output=7)), load=2)
    cluster = replace(Cluster.flat(2, 1.0, 0.0), node_ranks=2, compute_speeds=(1.0, 0.5))
    assert measured_speed(profile, cluster) == 0.5
    (cost,) = stage_costs(profile, Plan.data_parallel(1, 1, 1), measured_speed(profile, cluster))
    assert (cost.forward_seconds, cost.backward_seconds, cost.update_seconds) == (0.5, 1.0, 1.5)
    assert estimate(Plan.data_parallel(1, 2, 2), profile, cluster) == approx(1 + 2 + 3)


def test_plan_and_profile_must_have_the_same_layers():
    with pytest.raises(ValueError, match="the plan cuts 2 layers, the profile has 1"):
        stage_costs(model(layer()), plan([1, 1], 1))


def test_compute_share():
    cluster = Cluster(
        (Level("network", 6, 1.0, 0.0),),
        node_ranks=3,
        compute_speeds=(1.0, 0.75, 0.5),
        relative_speed=(1.0, 1.0, 0.5, 1.0, 1.0, 1.0),
    )
    assert compute_share(cluster, (0, 1, 2, 3)) == {0: 0.5, 1: 0.5, 2: 0.25, 3: 1.0}


def test_estimate_by_hand():
    """2-1, five microbatches, 10 bytes/s and 0.5 s of latency: sums 3 + 6 and 2 (4 + 0.5), then a maximum.

    The ring over two ranks has two steps. Two activations at once share the receiver's port.
    """
    profile = model(layer(1, 2, parameters=100, output=20, update=0.25), layer(2, 4))
    cluster = Cluster.flat(3, 10.0, 0.5)
    stage_0 = 2 * 3 + (100 / 10 + 2 * 0.5 - 2) + 0.25
    stage_1 = 4 * 6
    assert max(stage_0, stage_1) == stage_1
    assert estimate(plan([2, 1], 5), profile, cluster) == approx(3 + 6 + 9 + stage_1)
    heavy = model(layer(1, 2, parameters=1000, output=20, update=0.25), layer(2, 4))
    assert estimate(plan([2, 1], 5), heavy, cluster) == approx(3 + 6 + 9 + stage_0 + 90)
    half_hidden = replace(cluster, overlap=0.5)
    assert estimate(plan([2, 1], 5), heavy, half_hidden) == approx(3 + 6 + 9 + stage_0 + 90 + 0.5 * 2)
    slow = Cluster.flat(3, 1.0, 0.5)
    assert estimate(plan([2, 1], 5), model(layer(output=20), layer()), slow) == approx(3 + 3 + 81 + 4 * 20)


def test_a_load_is_taken_out_where_the_cluster_says_how_ranks_hamper_each_other():
    profile, alone = model(layer(1, 2)), plan([1], 1)
    loaded = replace(profile, load=4)
    contended = replace(Cluster.flat(4, 1.0, 0.0), node_ranks=4, compute_speeds=(1.0, 1.0, 0.6, 0.5))
    assert estimate(alone, loaded, contended) == approx(1.5)
    assert estimate(alone, loaded, Cluster.flat(4, 1.0, 0.0)) == approx(3)  # nothing is known of it


def test_horovods_thread_slows_the_replicas_down():
    cluster = replace(free(2), replicated_speed=0.5)
    assert estimate(plan([2], 2), model(layer(1, 2)), cluster) == approx(6)
    assert estimate(plan([1], 2), model(layer(1, 2)), cluster) == approx(6)


def test_less_may_come_back_than_goes_forward():
    profile = model(replace(layer(1, 2, output=20), gradient_bytes=4), layer(1, 2))
    cluster = Cluster.flat(2, 10.0, 0.5)
    assert estimate(plan([1, 1], 1), profile, cluster) == approx(3 + 3 + 2 * 0.5 + 24 / 10)


def test_messages_take_their_ranks_time():
    """Two messages at each side of a cut, 0.25 s each and 0.01 s a byte; nothing behind the last stage."""
    profile, cluster = model(layer(1, 2, output=20), layer(1, 1)), Cluster.flat(2, 1e300, 0.0)
    busy = replace(cluster, message_seconds=0.25, message_seconds_per_byte=0.01)
    handling = 2 * 0.25 + 40 * 0.01
    slowest = 3 * (3 + handling)
    assert estimate(plan([1, 1], 4), profile, busy) == approx(3 + handling + 2 + handling + slowest)


def test_an_asynchronous_pipeline_is_as_fast_as_its_slowest_part():
    profile = model(layer(1, 2, parameters=100, output=20, update=0.25), layer(2, 4, update=1))
    fast, slow = Cluster.flat(3, 10.0, 0.5), Cluster.flat(3, 1.0, 0.0)
    stage_0 = (3 + (10 + 2 * 0.5 - 2) + 0.25) / 2
    assert estimate(plan([2, 1], 1, "pipedream"), profile, fast) == approx(max(stage_0, 6 + 1))
    assert estimate(plan([2, 1], 1, "pipedream"), profile, slow) == approx((3 + 98 + 0.25) / 2)
    way = 3 + 6 + 20 + 20  # there and back, with two minibatches on it
    assert estimate(plan([1, 1], 1, "pipedream"), profile, slow) == approx(max(20, way / 2))


@pytest.mark.parametrize("num_stages, num_microbatches", [(1, 1), (2, 3), (4, 8)])
def test_equal_stages_take_the_papers_count(num_stages, num_microbatches):
    profile = model(*[layer(1, 2)] * num_stages)
    straight = plan([1] * num_stages, num_microbatches)
    assert estimate(straight, profile, free(num_stages)) == approx((num_microbatches + num_stages - 1) * 3)


HALVED = replace(layer(1, 2, parameters=1), weight_seconds=0.5)


@pytest.mark.parametrize("num_stages, num_microbatches", [(1, 1), (2, 3), (4, 8)])
@pytest.mark.parametrize("weight", [0.5, 1.0, 1.5])
def test_equal_stages_take_zero_bubbles_count(num_stages, num_microbatches, weight):
    """ZB-H1: M(f + b) + (p - 1)(f + i - g), with b = i + g."""
    profile = model(*[replace(HALVED, weight_seconds=weight)] * num_stages)
    straight = plan([1] * num_stages, num_microbatches, "zero-bubble")
    expected = num_microbatches * 3 + (num_stages - 1) * (3 - 2 * weight)
    assert estimate(straight, profile, free(num_stages)) == approx(expected)


def test_only_the_weights_half_hides_an_all_reduce_under_zero_bubble():
    profile = model(replace(layer(1, 2, parameters=100), weight_seconds=0.5))
    assert estimate(plan([2], 4, "zero-bubble"), profile, Cluster.flat(2, 10.0, 0.0)) == approx(6 + 10 - 0.5)
    assert estimate(plan([2], 4), profile, Cluster.flat(2, 10.0, 0.0)) == approx(6 + 10 - 2)


def test_two_buffered_updates_once_a_minibatch():
    profile = model(layer(1, 2, parameters=100, output=20, update=0.25), layer(2, 4, update=1))
    stage_0 = 3 * 3 + (100 / 10 - 2) + 0.25
    assert estimate(plan([2, 1], 5, "pipedream-2bw"), profile, Cluster.flat(3, 10.0, 0.0)) == approx(
        max(stage_0, 5 * 6 + 1)
    )
    slow = Cluster.flat(3, 1.0, 0.0)
    assert estimate(plan([2, 1], 5, "pipedream-2bw"), profile, slow) == approx(
        max(9 + 98 + 0.25, 5 * 20, 5 * (3 + 6 + 40 + 40) / 4)
    )


def test_ranks_that_hold_several_stages_by_hand():
    """Two ranks of two stages: sums 12 / 2 and three ways over a cut; then (4 - 1/2) 7 s and two updates."""
    profile = model(*[layer(1, seconds - 1, output=10, update=0.5) for seconds in (2, 3, 4, 3)])
    stages = tuple(StageSpec(i, i + 1) for i in range(4))
    chunked = Plan(stages, "interleaved-1f1b", 4, chunks=2)
    assert estimate(chunked, profile, free(2)) == approx(6 + 3.5 * 6 + 1)
    cluster = Cluster.flat(2, 10.0, 0.25)
    assert estimate(chunked, profile, cluster) == approx(6 + 3 * (0.5 + 2) + 3.5 * 6 + 1)
    slow = Cluster.flat(2, 1.0, 0.0)  # 0 to 1 and 2 to 3 share a link
    assert estimate(chunked, profile, slow) == approx(6 + 3 * 20 + 2 * 3 * 10)


def test_stages_recompute_one_by_one():
    stages = (StageSpec(0, 1, recompute=True), StageSpec(1, 2))
    costs = stage_costs(model(layer(1, 2), layer(1, 2)), Plan(stages))
    assert [cost.backward_seconds for cost in costs] == [3, 2]


def test_the_weights_part_of_a_backward():
    """As measured, else half of it; nothing where there are no weights."""
    layers = HALVED, layer(1, 2, parameters=1), layer(1, 2)
    one = stage_costs(model(*layers), Plan((StageSpec(0, 3),)), load_speed=0.5)
    assert one[0].weight_seconds == approx((0.5 + 1) / 2)


JOINING = replace(layer(1, 4, parameters=1), joined=JoinedProducts(2.0, 1.0, 0.5, 8))


def test_a_backward_that_joins_products_is_shorter():
    for schedule, expected in (("1f1b", (2, 1.5)), ("zero-bubble", (4, 0)), ("pipedream", (4, 0))):
        (cost,) = stage_costs(model(JOINING), Plan((StageSpec(0, 1),), schedule=schedule))
        assert (cost.backward_seconds, cost.products_seconds) == expected


def test_a_microbatch_s_share_of_an_update_is_that_of_the_replica_with_most():
    costs = stage_costs(model(JOINING, JOINING), plan([2, 1], 3))
    assert [cost.products_seconds for cost in costs] == [1 + 2 * 0.5, 1 + 3 * 0.5]


def test_products_follow_once_the_gradient_is_sent():
    """f + b = 3 and products of 1 + 4/2 = 3 on each of two ranks, which make theirs at the same time."""
    assert estimate(plan([1, 1], 4), model(JOINING, JOINING), free(2)) == approx((4 + 1) * 3 + 3)


def test_the_stage_before_waits_for_products_of_a_stage_whose_all_reduce_begins_early():
    """Two microbatches a replica: products of 2 each, the second stage's in the way of the first."""
    profile = model(JOINING, JOINING)
    assert estimate(plan([2, 2], 4), profile, free(4)) == approx(2 * 3 + 2 + (3 + 2))


def test_an_allreduce_hides_behind_the_sending_of_a_gradient_too():
    """3-2 with messages of a second: the sum behind the cut, 1 s long, is done when the gradient is sent."""
    front, behind = layer(0.01, 0.01, parameters=1), layer(0.01, 0.01, parameters=100)
    cluster = Cluster((Level("switch", 5, 100.0, 0.0),), message_seconds=1.0)
    two = plan([3, 2], 1, "pipedream")
    assert estimate(two, model(front, behind), cluster) == approx((0.02 + 2) / 2)
    simulated = predict(two, model(front, behind), cluster)[1].minibatch_seconds
    assert estimate(two, model(front, behind), cluster) <= simulated
