"""Shards: one rank stands for all of a replica, in searches and simulations."""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import combinations, product

import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster, Collective, Level
from hybridpipe.planning.cost.estimate import estimate
from hybridpipe.planning.cost.memory import peak_memory_bytes
from hybridpipe.planning.layer_parts import SumsProfile
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import Measurement, ModelProfile, SharedParameter
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.search.search import NoPlanFits, search, search_sizes, with_prediction
from hybridpipe.planning.shards import can_pool, pooled, pooled_cluster, unpooled
from hybridpipe.planning.simulator.predict import predict
from tests.planning.helpers import free, layer, model
from tests.thinned import rare

ONE_SUM = SumsProfile(1, 1, 1000, 1000)
NODE = Level("node", 4, 1e6, 1e-5)
NETWORK = Level("network", 8, 1e4, 1e-3, shared_bandwidth=2e4)


def split(
    profile: ModelProfile, *counts: int, faster: float = 1.0, sums: SumsProfile = ONE_SUM
) -> ModelProfile:
    """The profile with the layers of shards, which take their part of the time, or a little more."""
    others = []
    for count in counts:
        layers = tuple(
            replace(
                each,
                forward_seconds=each.forward_seconds / count**faster,
                backward_seconds=each.backward_seconds / count**faster,
                parameter_bytes=each.parameter_bytes // count,
                sums=sums,
            )
            for each in profile.layers
        )
        others.append(Measurement(profile.samples, layers, count))
    return replace(profile, others=tuple(others))


FOUR = model(*[layer(1, 2, parameters=400, output=10)] * 4)


def test_what_shards_take_is_their_time_and_their_sums():
    """Two shards halve 4 layers of 3 s, and make 8 sums of 1000 bytes: 2 latencies and 1000 bytes each."""
    plan = Plan((StageSpec(0, 4, tensor=2),), num_microbatches=3)
    cluster = Cluster((replace(NODE, latency_seconds=0.25, bandwidth=1e4),))
    timeline, predicted = predict(plan, split(FOUR, 2), cluster)
    a_microbatch = 4 * 3 / 2 + 8 * (2 * 0.25 + 1000 / 1e4)
    assert predicted.minibatch_seconds == approx(3 * a_microbatch)
    assert estimate(plan, split(FOUR, 2), cluster) == approx(3 * a_microbatch)
    assert sorted(timeline.events) == [0, 1] and timeline.events[0] == timeline.events[1]
    assert len(predicted.peak_memory_bytes) == 2 and len(set(predicted.peak_memory_bytes)) == 1


def test_a_stage_that_recomputes_makes_the_sums_of_its_forward_again():
    cluster, profile = Cluster((replace(NODE, latency_seconds=0.25, bandwidth=1e4),)), split(FOUR, 2)
    plain, again = (
        predict(Plan((StageSpec(0, 4, tensor=2, recompute=r),)), profile, cluster)[1].minibatch_seconds
        for r in (False, True)
    )
    assert again - plain == approx(4 * (1 / 2 + 2 * 0.25 + 1000 / 1e4))


def test_shards_have_less_memory_than_whole_layers():
    whole, half = (
        peak_memory_bytes(split(FOUR, 2), Plan((StageSpec(0, 4, tensor=t),), num_microbatches=2))
        for t in (1, 2)
    )
    assert half[0] == half[1] == whole[0] - 2 * 4 * 200  # weights and gradients


def test_a_parameter_of_two_stages_is_exchanged_in_parts():
    tied = SharedParameter("embedding", (0, 3), 400)
    profile = replace(split(FOUR, 2), shared=(tied,))
    halves = replace(profile.others[0], shared=(replace(tied, parameter_bytes=200),))
    profile = replace(profile, others=(halves,))
    plans = (Plan((StageSpec(0, 2, tensor=t), StageSpec(2, 4, tensor=t))) for t in (1, 2))
    whole, half = (predict(plan, profile, NODES)[1].minibatch_seconds for plan in plans)
    assert whole > half


NODES = Cluster((NODE, NETWORK))


def test_each_shard_sends_its_own_copy_over_a_link_that_the_machine_shares():
    pairs = pooled_cluster(NODES, 2)
    inner, outer = pairs.levels
    assert (inner.ranks, outer.ranks, pairs.num_ranks, pairs.shards) == (2, 4, 4, 2)
    assert (inner.bandwidth, outer.bandwidth, outer.shared_bandwidth) == (1e6, 1e4, 1e4)
    assert pooled_cluster(NODES, 1) is NODES


def test_machines_keep_what_ranks_that_stand_for_shards_have():
    measured = Collective(2e4, 1e-3)
    cluster = Cluster(
        (NODE, replace(NETWORK, allreduce=measured)),
        memory_bytes=(8, 7, 6, 5, 4, 3, 2, 1),
        relative_speed=(1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.25, 1.0),
        node_ranks=4,
        compute_speeds=(1.0, 0.9, 0.6, 0.5),
        wakeup_seconds=(1e-3, 2e-3, 3e-3, 4e-3),
    )
    pairs = pooled_cluster(cluster, 2)
    assert pairs.memory_bytes == (7, 5, 3, 1) and pairs.relative_speed == (0.5, 1.0, 1.0, 0.25)
    assert pairs.node_ranks == 2 and [pairs.shared_speed(n) for n in (1, 2)] == [0.9, 0.5]
    assert pairs.wakeup_seconds == (2e-3, 4e-3) and pairs.levels[1].allreduce.bandwidth == 1e4
    assert pooled_cluster(replace(cluster, node_ranks=1), 2).compute_speeds is None


def test_shards_are_neighbours_of_one_innermost_unit():
    assert [t for t in range(1, 9) if can_pool(NODES, t)] == [1, 2, 4]
    assert not can_pool(replace(NODES, node_ranks=3), 2)
    with pytest.raises(
        ValueError, match="tensor must divide the 4 ranks of 'node', the innermost level, got 3"
    ):
        pooled_cluster(NODES, 3)


MIXED = Plan((StageSpec(0, 2, tensor=2), StageSpec(2, 4)))
APART = Plan((StageSpec(0, 4, 2, ranks=(0, 2, 1, 3), tensor=2),))


@pytest.mark.parametrize(
    "plan, told",
    [
        (MIXED, "tensor must be the same in all stages of a plan to be predicted, got \\[1, 2\\]"),
        (APART, "must be neighbours, the first a multiple of 2, to be predicted, got \\(0, 2, 1, 3\\)"),
        (Plan((StageSpec(0, 4, tensor=4),)), "tensor must be 1 or 2, as the profile was measured, got 4"),
    ],
)
def test_what_cannot_be_predicted_is_told(plan, told):
    with pytest.raises(ValueError, match=told):
        predict(plan, split(FOUR, 2), NODES)


def test_a_plan_of_all_shards_is_that_of_their_leaders():
    plan = Plan(
        (StageSpec(0, 2, 2, (4, 5, 0, 1), tensor=2), StageSpec(2, 4, 1, (2, 3), tensor=2)), "gpipe", 4
    )
    few, profile, cluster = pooled(plan, split(FOUR, 2), NODES)
    assert [stage.ranks for stage in few.stages] == [(2, 0), (1,)] and not few.splits_tensors
    assert profile.tensor == 2 and cluster.num_ranks == 4
    assert unpooled(few, 2) == plan


def random_case(seed):
    draw = random.Random(seed)
    layers = [
        layer(draw.random(), draw.random(), parameters=draw.randint(0, 10**5), output=draw.randint(0, 10**4))
        for _ in range(draw.randint(2, 4))
    ]
    profile = split(
        model(*layers),
        2,
        4,
        faster=draw.choice([0.5, 0.8, 1.0]),
        sums=SumsProfile(
            draw.randint(0, 2), draw.randint(0, 2), draw.randint(0, 10**4), draw.randint(0, 10**4)
        ),
    )
    bandwidth, latency = 10 ** draw.uniform(3, 6), 10 ** draw.uniform(-5, -2)
    levels = [Level("node", 4, bandwidth, latency)]
    if draw.random() < 0.5:
        slower = bandwidth / draw.choice([1, 10])
        shared = draw.choice([None, 2 * slower])
        levels = [Level("node", 2, bandwidth, latency), Level("network", 4, slower, 2 * latency, shared)]
    memory = draw.choice([None, None, draw.randint(10**5, 10**6)])
    return profile, Cluster(tuple(levels), memory_bytes=memory), draw.choice([1, 2, 4, 6])


def every_plan(num_layers, num_ranks, count, tensor):
    """All cuts and numbers of replicas with one number of shards, on the first ranks."""
    for stages in range(1, num_layers + 1):
        for replicas in product(range(1, num_ranks + 1), repeat=stages):
            if sum(replicas) * tensor > num_ranks:
                continue
            for cuts in combinations(range(1, num_layers), stages - 1):
                spans = zip((0, *cuts), (*cuts, num_layers), replicas, strict=True)
                specs = tuple(StageSpec(a, b, m, tensor=tensor) for a, b, m in spans)
                yield Plan(specs, "1f1b", count)


def best_of(search_for, profile, cluster, count):
    """The seconds of the best candidate; infinite where none fits."""
    try:
        return search_for(profile, cluster, count)[0].seconds
    except NoPlanFits:
        return math.inf


@pytest.mark.parametrize("seeds", [range(12), rare(range(12, 150))])
def test_the_best_number_of_shards_is_found(seeds):
    """The best of searches for each number, and for several no plan is faster that there is."""
    chosen = Counter()
    for seed in seeds:
        profile, cluster, count = random_case(seed)
        best = []
        for tensor in (t for t in (1, 2, 4) if can_pool(cluster, t)):
            alone = replace(profile.split_over(tensor), others=())
            best.append(best_of(search, alone, pooled_cluster(cluster, tensor), count))
            for plan in every_plan(profile.num_layers, 4, count, tensor) if tensor > 1 else ():
                limit, peaks = cluster.memory_bytes, peak_memory_bytes(profile, plan)
                if limit is None or max(peaks) <= limit:
                    seconds = predict(plan, profile, cluster)[1].minibatch_seconds
                    assert best[-1] <= seconds * (1 + 1e-9), seed
        assert best_of(search, profile, cluster, count) == approx(min(best)), seed
        if min(best) < math.inf:
            found = search(profile, cluster, count)[0]
            assert found.seconds == approx(predict(found.plan, profile, cluster)[1].minibatch_seconds)
            chosen[found.plan.stages[0].tensor] += 1
    assert {*chosen} == {1, 2, 4}, chosen


def test_every_size_of_the_microbatch_is_looked_at_with_every_number_of_shards():
    small = replace(FOUR, samples=2)
    sizes = (small.layers, 2), (tuple(replace(each, forward_seconds=3.0) for each in small.layers), 4)
    halves = split(small, 2).others[0].layers
    others = (
        Measurement(4, sizes[1][0]),
        Measurement(2, halves, 2),
        Measurement(4, tuple(replace(each, forward_seconds=0.5) for each in halves), 2),
    )
    found = search_sizes(replace(small, others=others), free(2), 8)
    assert (found[0].plan.name, found[0].samples) == ("1t2", 4)
    assert {(each.plan.stages[0].tensor, each.samples) for each in found} >= {(1, 2), (2, 2), (2, 4)}


def test_an_asynchronous_schedule_has_no_shards():
    found = search(split(FOUR, 2), free(4), 1, PlanRequest("pipedream"))
    assert not any(each.plan.splits_tensors for each in found)


def test_a_given_plan_is_predicted_as_its_leaders_are():
    plan = Plan((StageSpec(0, 2, 2, tensor=2), StageSpec(2, 4, tensor=2)), num_microbatches=4)
    made = with_prediction(plan, split(FOUR, 2), NODES)
    assert made == replace(plan, predicted=made.predicted) and len(made.predicted.peak_memory_bytes) == 6
