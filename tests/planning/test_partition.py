"""The partitioner against brute force, with the cost model written anew from the docstring of cost.py."""

import itertools
import math
import random
import time
from dataclasses import replace

import pytest
from pytest import approx

from hybridpipe.planning.cluster import AllReduce, Cluster, Level
from hybridpipe.planning.cost import estimate
from hybridpipe.planning.partition import partition
from hybridpipe.planning.plan import SCHEDULES, Plan, StageSpec
from hybridpipe.planning.profile import LayerProfile, ModelProfile

from .helpers import free, layer, model

NUM_INSTANCES = 1000  # of which more than half have a plan that fits


def reference(cuts, replicas, profile, cluster, num_microbatches, schedule):
    """Seconds of the plan with these edges between its stages; infinite where it does not fit."""
    M = num_microbatches
    used = sum(replicas)
    node = [r // (cluster.node_ranks or 1) for r in range(used)]
    slots = cluster.compute_slots or cluster.node_ranks or 1
    speeds = cluster.relative_speed or [1.0] * used
    speed = [speeds[r] * min(1.0, slots / node.count(node[r])) for r in range(used)]
    total, maxima, first = 0.0, [], 0
    for s, m in enumerate(replicas):
        layers, last = profile.layers[cuts[s] : cuts[s + 1]], first + m - 1
        slowest = min(speed[first : last + 1])
        f = sum(one.forward_seconds for one in layers) / slowest
        b = sum(one.backward_seconds for one in layers) / slowest
        u = sum(one.update_seconds for one in layers) / slowest
        weights = sum(one.parameter_bytes for one in layers)
        ring = cluster.allreduce or crossed(cluster, first, last)
        a = ring.latency_seconds + 2 * (m - 1) / m * weights / ring.bandwidth if m > 1 and weights else 0.0
        w = f + b + 2 * ((s > 0) + (s + 1 < len(replicas))) * cluster.message_seconds / slowest
        total += w
        maxima.append((math.ceil(M / m) - 1) * w + max(0.0, a - b) + u)

        stashes = stashes_of(replicas, M, schedule)[s]
        received = profile.layers[cuts[s] - 1].output_bytes if s else 0
        stashed = sum(one.activation_bytes for one in layers) + received
        memory = round(weights * (2 + profile.state_factor)) + stashes * stashed + layers[-1].output_bytes
        if cluster.memory_bytes is not None and memory > cluster.memory_bytes:
            return math.inf

        if s + 1 < len(replicas):
            link = crossed(cluster, first, last + replicas[s + 1])
            x = layers[-1].output_bytes / link.bandwidth
            total += 2 * (x + link.latency_seconds)
            maxima.append((math.ceil(M / min(m, replicas[s + 1])) - 1) * x)
        first = last + 1
    return total + max(maxima)


def stashes_of(replicas, M, schedule):
    """1F1B: the microbatch at work and a share of what the next stage holds; GPipe: every microbatch."""
    found, held = [], 0
    for m in reversed(replicas):
        found.insert(
            0, math.ceil(M / m) if schedule == "gpipe" else min(math.ceil(M / m), 1 + math.ceil(held / m))
        )
        held = m * found[0]
    return found


def crossed(cluster, first, last):
    return next(level for level in cluster.levels if first // level.ranks == last // level.ranks)


def compositions(total):
    if total == 0:
        yield ()
    for first in range(1, total + 1):
        for rest in compositions(total - first):
            yield (first, *rest)


def every_plan(num_layers, num_ranks, max_replicas=None):
    """Edges and replicas of every plan on exactly that many ranks."""
    for replicas in compositions(num_ranks):
        if len(replicas) <= num_layers and max(replicas) <= (max_replicas or num_ranks):
            for inner in itertools.combinations(range(1, num_layers), len(replicas) - 1):
                yield (0, *inner, num_layers), replicas


def random_instance(seed):
    """Few layers and ranks, and everything that can differ: levels, speeds, slots, memory, schedule."""
    draw = random.Random(seed)
    figure = (lambda: draw.randint(0, 4)) if seed % 5 == 0 else draw.random  # small integers: exact ties
    profile = ModelProfile(
        tuple(
            LayerProfile(
                str(i),
                figure(),
                2 * figure(),
                draw.choice([0, draw.randint(0, 10**6)]),
                draw.randint(0, 10**6),
                draw.randint(0, 10**6),
                0.1 * figure(),
            )
            for i in range(draw.randint(1, 7))
        ),
        samples=8,
        state_factor=draw.choice([0.0, 1.0, 0.5]),
    )
    in_node = draw.choice([1, 2, 3])
    cluster = Cluster(
        (
            Level("node", in_node, 10 ** draw.uniform(5, 8), 0.01 * figure()),
            Level("network", 6 * in_node, 10 ** draw.uniform(4, 7), 0.1 * figure()),
        ),
        allreduce=draw.choice([None, AllReduce(10 ** draw.uniform(5, 8), 0.01 * figure())]),
        memory_bytes=draw.choice([None, draw.randint(10**6, 10**7)]),
        relative_speed=draw.choice([None, tuple(draw.choice([1.0, 0.5]) for _ in range(6 * in_node))]),
        node_ranks=draw.choice([None, in_node]),
        compute_slots=draw.choice([None, 0.75, 1.5]),
        message_seconds=draw.choice([0.0, 0.1 * figure()]),
    )
    options = {
        "num_ranks": draw.randint(1, 6),
        "num_microbatches": draw.choice([1, 2, 3, 4, 8, 16, 17]),
        "schedule": draw.choice(SCHEDULES),
    }
    return profile, cluster, options, draw.choice([None, None, 1, 2])


@pytest.mark.parametrize("batch", range(10))
def test_equals_brute_force(batch):
    fitting = 0
    for seed in range(batch, NUM_INSTANCES, 10):
        profile, cluster, options, max_replicas = random_instance(seed)
        costs = [
            reference(cuts, replicas, profile, cluster, options["num_microbatches"], options["schedule"])
            for cuts, replicas in every_plan(profile.num_layers, options["num_ranks"], max_replicas)
        ]
        best = min(costs, default=math.inf)
        found = partition(profile, cluster, max_replicas=max_replicas, **options)
        if found is None:
            assert best == math.inf, seed
            continue
        fitting += 1
        edges = (0, *(stage.stop for stage in found.stages))
        assert found.num_ranks == options["num_ranks"] and max(found.replicas) <= (max_replicas or 6), seed
        mine = reference(
            edges, found.replicas, profile, cluster, options["num_microbatches"], options["schedule"]
        )
        assert mine == approx(best, rel=1e-9) and estimate(found, profile, cluster) == approx(mine), seed
    assert fitting >= NUM_INSTANCES / 10 / 2


def test_equal_plans_are_told_apart_the_same_way_each_time():
    profile, cluster = model(*[layer(1, 1)] * 6), free(4)
    found = [partition(profile, cluster, num_ranks=4, num_microbatches=4) for _ in range(3)]
    assert found[0] == found[1] == found[2]
    assert estimate(found[0], profile, cluster) == min(
        reference(cuts, replicas, profile, cluster, 4, "1f1b") for cuts, replicas in every_plan(6, 4)
    )


def test_layers_may_cost_nothing():
    nothing = layer(0, 0)
    found = partition(model(*[nothing] * 3), free(3), num_ranks=3, num_microbatches=2)
    assert found is not None and estimate(found, model(*[nothing] * 3), free(3)) == 0
    ends = partition(
        model(nothing, layer(1, 2), nothing), free(2), num_ranks=2, num_microbatches=4, max_replicas=1
    )
    assert ends is not None and ends.name == "1-1"


def test_very_unequal_layers():
    """Sums over a range are differences of running sums; a small layer beside a huge one is not lost."""
    profile = model(layer(1e9, 1e9), layer(1e-6, 1e-6), layer(1e-6, 1e-6))
    found = partition(profile, free(2), num_ranks=2, num_microbatches=64, max_replicas=1)
    assert found is not None and found.stages[0].stop == 1


@pytest.mark.parametrize("num_ranks, max_replicas", [(3, 1), (4, 1)])
def test_more_ranks_than_layers_need_replicas(num_ranks, max_replicas):
    profile = model(layer(), layer())
    options = {"num_ranks": num_ranks, "num_microbatches": 4}
    assert partition(profile, free(num_ranks), max_replicas=max_replicas, **options) is None
    assert partition(profile, free(num_ranks), **options).num_ranks == num_ranks


def test_one_layer_is_data_parallel():
    found = partition(model(layer(parameters=10)), free(3), num_ranks=3, num_microbatches=6)
    assert found == Plan.data_parallel(1, 3, 6)


def test_known_optima():
    """Heavy weights on a slow network: do not replicate them. Heavy activations: do not cut there."""
    cluster = Cluster.flat(4, bandwidth=100.0, latency_seconds=0.0)
    heavy_weights = model(layer(3, 6), layer(1, 2, parameters=10**6))
    found = partition(heavy_weights, cluster, num_ranks=4, num_microbatches=12)
    assert found.stages == (StageSpec(0, 1, 3, (0, 1, 2)), StageSpec(1, 2, 1, (3,)))
    heavy_activations = model(*[layer(1, 2, output=10**6)] * 4)
    assert partition(heavy_activations, cluster, num_ranks=4, num_microbatches=12).name == "4"


def test_memory_forces_a_cut():
    profile, cluster = model(*[layer(parameters=100)] * 4), free(4)
    options = {"num_ranks": 4, "num_microbatches": 4}
    assert partition(profile, replace(cluster, memory_bytes=800), **options).name == "4"
    assert partition(profile, replace(cluster, memory_bytes=799), **options).num_stages > 1
    assert partition(profile, replace(cluster, memory_bytes=200), **options).name == "1-1-1-1"
    assert partition(profile, replace(cluster, memory_bytes=199), **options) is None


def test_a_real_size_takes_milliseconds():
    draw = random.Random(0)
    profile = model(
        *(
            layer(draw.random(), draw.random(), draw.randrange(10**7), draw.randrange(10**6))
            for _ in range(21)
        )
    )
    cluster = replace(Cluster.flat(4, 1e7, 1e-5), memory_bytes=10**9)
    start = time.process_time()
    assert partition(profile, cluster, num_ranks=4, num_microbatches=16) is not None
    assert time.process_time() - start < 0.2
