"""The choice of how stages run in plans of given cuts and ranks, against all choices that there are."""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster, Collective, Level
from hybridpipe.planning.cost.estimate import Between, estimate
from hybridpipe.planning.cost.memory import peak_memory_bytes
from hybridpipe.planning.plan import Plan, StageSpec, Variant
from hybridpipe.planning.profile import JoinedProducts, ModelProfile
from hybridpipe.planning.request import AUTO, PlanRequest
from hybridpipe.planning.search import variants
from hybridpipe.planning.search.problem import fits
from hybridpipe.planning.search.search import with_prediction
from hybridpipe.planning.search.variants import fitted, least_together
from tests.planning.brute_force import random_layer
from tests.planning.helpers import free, layer, model, search
from tests.thinned import rare

EITHER = PlanRequest(recompute=True).variants
WAYS = [
    ("1f1b", {}),
    ("1f1b", {"max_in_flight": 2}),
    ("gpipe", {}),
    ("zero-bubble", {}),
    ("pipedream", {}),
    ("pipedream", {"vertical_sync": True}),
    ("pipedream-2bw", {}),
    ("interleaved-1f1b", {"chunks": 2}),
    ("interleaved-1f1b", {"chunks": 3}),
]


def random_plan(draw, schedule, options) -> tuple[ModelProfile, Plan]:
    """A plan of at most six stages, and a model whose activations need more memory than the rest."""
    chunks = options.get("chunks", 1)
    groups = draw.randint(2, 3 if chunks == 2 else 2) if chunks > 1 else draw.randint(1, 4)
    replicas = [draw.randint(1, 2)] * groups if chunks > 1 else [draw.randint(1, 2) for _ in range(groups)]
    count = 1 if schedule == "pipedream" else draw.choice([1, 2, 4, 8, 9])
    layers = (random_layer(draw, draw.random, str(i)) for i in range(groups * chunks))
    layers = (replace(one, parameter_bytes=draw.randint(0, 10**6)) for one in layers)
    layers = tuple(replace(one, activation_bytes=draw.randint(0, 10**7)) for one in layers)
    stages = tuple(StageSpec(i, i + 1, m) for i, m in enumerate(replicas * chunks))
    return ModelProfile(layers, 1), Plan(stages, schedule, count, **options)


@pytest.mark.parametrize("num_seeds", [20, rare(60)])
@pytest.mark.parametrize("schedule, options", WAYS)
def test_no_other_choice_is_faster(schedule, options, num_seeds):
    """By the formula, of all choices that fit."""
    mixed = 0
    for seed in range(num_seeds):
        draw = random.Random(seed)
        profile, plan = random_plan(draw, schedule, options)
        cluster = replace(
            Cluster.flat(8, 10 ** draw.uniform(5, 9), 0.05 * draw.random()),
            memory_bytes=draw.randint(10**7, 2 * 10**7) * plan.chunks,
            overlap=draw.choice([1.0, 0.5, 0.0]),
        )
        every = map(plan.running, product(EITHER, repeat=plan.num_stages))
        seconds = [estimate(each, profile, cluster) for each in every if fits(each, profile, cluster)]
        found = fitted(plan, profile, cluster, EITHER)
        assert (found is None) == (not seconds), seed
        if found is not None:
            assert fits(found, profile, cluster), seed
            assert estimate(found, profile, cluster) == approx(min(seconds), rel=1e-9), seed
            mixed += len({stage.recompute for stage in found.stages}) == 2
    assert mixed > num_seeds / 30


def measured(draw) -> Collective:
    return Collective(10 ** draw.uniform(5, 8), 0.01 * draw.random(), wait_seconds=0.01 * draw.random())


SHARED_OUT = [
    ("1f1b", 1, None),
    ("gpipe", 1, None),
    ("zero-bubble", 1, None),
    ("pipedream", 1, None),
    ("pipedream-2bw", 1, None),
    ("1f1b", 1, 0.6),
    ("gpipe", 1, 0.6),
    ("interleaved-1f1b", 2, 0.6),
]


@pytest.mark.parametrize("num_seeds", [15, rare(25)])
@pytest.mark.parametrize("schedule, chunks, memory", SHARED_OUT)
def test_no_other_way_to_share_out_the_update_is_faster(schedule, chunks, memory, num_seeds):
    """By the formula, of all choices of recomputation, zero and scatter that fit."""
    request = PlanRequest(schedule, recompute=memory is not None, zero=AUTO)
    seen = Counter()
    for seed in range(num_seeds):
        draw = random.Random(seed)
        groups = 2 if chunks == 2 else draw.randint(1, 3)
        replicas = (
            [draw.randint(1, 3)] * groups if chunks > 1 else [draw.randint(1, 3) for _ in range(groups)]
        )
        layers = (random_layer(draw, draw.random, str(i)) for i in range(groups * chunks))
        layers = (replace(one, parameter_bytes=draw.randint(1, 10**7)) for one in layers)
        layers = tuple(replace(one, activation_bytes=draw.randint(0, 10**6)) for one in layers)
        profile = ModelProfile(layers, 1, state_factor=2.0)
        stages = tuple(StageSpec(i, i + 1, m) for i, m in enumerate(replicas * chunks))
        count = 1 if schedule == "pipedream" else draw.choice([1, 2, 8])
        plan = Plan(stages, schedule, count, chunks=chunks)
        figures = [draw.choice([None, measured(draw)]) for _ in range(3)]
        level = Level("all", 9, 10 ** draw.uniform(6, 9), 0.01 * draw.random(), None, figures[0])
        level = replace(level, reduce_scatter=figures[1], all_gather=figures[2])
        most = max(peak_memory_bytes(profile, plan))
        cluster = Cluster(
            (level,),
            memory_bytes=memory and int(most * draw.uniform(memory, 1)),
            overlap=draw.choice([1.0, 0.5, 0.0]),
        )
        ways = request.variants
        seconds = []
        for choice in product(ways, repeat=plan.num_stages):
            shared = [choice[s % groups][1:] for s in range(plan.num_stages)]
            if shared == [each[1:] for each in choice]:  # chunks of a rank share one update
                each = plan.running(choice)
                if fits(each, profile, cluster):
                    seconds.append(estimate(each, profile, cluster))
        found = fitted(plan, profile, cluster, request.variants)
        assert (found is None) == (not seconds), seed
        if found is not None:
            assert fits(found, profile, cluster), seed
            assert estimate(found, profile, cluster) == approx(min(seconds), rel=1e-9), seed
            seen.update(Variant.of(stage) for stage in found.stages)
    assert {variant.zero for variant in seen} >= ({0, 1, 2} if memory and chunks == 1 else {0, 1})
    assert len({variant.scatter for variant in seen}) == 2


def test_the_update_is_sharded_for_speed_or_memory_that_is_there():
    """A step of 8 s, and 100 bytes of weights that take 1 s to gather from one other replica."""
    profile = model(layer(1, 2, parameters=100, update=8.0), state_factor=2.0)
    fast = Cluster((Level("all", 2, 1e9, 0.0, all_gather=Collective(50.0, 0.0)),))
    slow = Cluster((Level("all", 2, 1e9, 0.0, all_gather=Collective(10.0, 0.0)),))
    ways = PlanRequest(zero=AUTO).variants
    pair = Plan((StageSpec(0, 1, 2),), num_microbatches=2)
    assert fitted(pair, profile, fast, ways).stages[0].zero == 1, "4 + 1 s are less than 8"
    assert fitted(pair, profile, slow, ways) == pair, "4 + 5 s are more"
    assert fitted(pair, profile, slow, PlanRequest(zero=1).variants).stages[0].zero == 1
    alone = Plan((StageSpec(0, 1),), num_microbatches=2)
    assert fitted(alone, profile, fast, ways) == alone
    assert fitted(alone, profile, fast, PlanRequest(zero=2).variants) == alone
    needed = peak_memory_bytes(profile, pair)[0]
    tight = replace(slow, memory_bytes=needed - 100)  # half of the state
    assert fitted(pair, profile, tight, ways).stages[0].zero == 1


def test_equal_ways_go_to_the_simplest():
    """A product in the backward or behind it: with one microbatch of a replica the sum is the same."""
    joined = JoinedProducts(0.1, 0.2, 0.3, microbatches=4)
    profile = model(replace(layer(0.7, 0.6, parameters=100, update=0.3), joined=joined))
    pair = Plan((StageSpec(0, 1, 2),), num_microbatches=2)
    fast = Cluster((Level("all", 2, 1e9, 0.0),))
    assert fitted(pair, profile, fast, PlanRequest(zero=AUTO).variants).stages[0].zero == 1


def no_cuts(groups: int, busiest: float) -> Between:
    return Between(*np.zeros((3, groups)), busiest=busiest, is_asynchronous=False)


def test_ranks_with_several_stages_may_have_to_choose_together():
    """The choice of least sum has the greatest maximum; the other group has a greater one anyway, or not."""
    sums, maxima = np.array([[1.0, 1.0], [3.0, 1.0]]), np.array([[9.0, 8.0], [5.0, 8.0]])
    assert least_together(sums, maxima, no_cuts(2, 0.0)).tolist() == [0, 0]
    assert least_together(sums, np.array([[9.0, 2.0], [5.0, 2.0]]), no_cuts(2, 0.0)).tolist() == [1, 0]
    assert least_together(sums, np.array([[9.0, 2.0], [5.0, 2.0]]), no_cuts(2, 8.0)).tolist() == [0, 0]


def test_the_least_sum_plus_maximum_is_found():
    for seed in range(300):
        draw = np.random.default_rng(seed)
        shape = int(draw.integers(1, 5)), int(draw.integers(1, 4))
        sums, maxima = draw.integers(0, 6, (2, *shape)).astype(float)
        sums[1:][draw.random((shape[0] - 1, shape[1])) < 0.3] = math.inf
        floor = float(draw.integers(0, 8))

        def total(chosen, sums=sums, maxima=maxima, floor=floor):
            each = list(chosen), range(len(chosen))
            return sums[each].sum() + max(floor, maxima[each].max())

        best = min(map(total, product(range(shape[0]), repeat=shape[1])))
        assert total(least_together(sums, maxima, no_cuts(shape[1], floor))) == best, seed


def test_nothing_recomputes_without_a_limit_or_where_it_may_not():
    profile = model(*[layer(1, 2, activation=100)] * 2)
    plan = Plan((StageSpec(0, 1), StageSpec(1, 2)), num_microbatches=4)
    for given in (plan, plan.running([Variant(recompute=True)] * 2), replace(plan, recompute=True)):
        assert fitted(given, profile, free(2), EITHER) == plan
        assert fitted(given, profile, replace(free(2), memory_bytes=10**6), EITHER) == plan
    tight = replace(free(2), memory_bytes=150)
    assert fitted(plan, profile, tight) is None
    found = fitted(plan, profile, tight, EITHER)
    assert [stage.recompute for stage in found.stages] == [True, False]


def every_straight_that_fits(profile, cluster, schedule, count):
    """Every straight pipeline on the first ranks that fits, with every choice of what recomputes."""
    for num_stages in range(1, cluster.num_ranks + 1):
        for inner in combinations(range(1, profile.num_layers), num_stages - 1):
            edges = pairwise((0, *inner, profile.num_layers))
            stages = tuple(StageSpec(a, b, 1, (s,)) for s, (a, b) in enumerate(edges))
            plan = Plan(stages, schedule, count)
            every = map(plan.running, product(EITHER, repeat=num_stages))
            yield from (each for each in every if fits(each, profile, cluster))


@pytest.mark.parametrize("num_seeds", [7, rare(14)])
@pytest.mark.parametrize(
    "schedule, count", [("1f1b", 8), ("gpipe", 8), ("zero-bubble", 8), ("pipedream", 1), ("pipedream-2bw", 8)]
)
def test_under_a_limit_no_straight_pipeline_is_faster(schedule, count, num_seeds):
    """None that recomputes where it must; one that recomputes more may be, as messages then meet less."""
    recomputing = 0
    for seed in range(num_seeds):
        draw = random.Random(seed)
        layers = (
            layer(
                0.01 * draw.random(),
                0.02 * draw.random(),
                *map(draw.randrange, (4 * 10**6, 10**6, 2 * 10**7)),
            )
            for _ in range(draw.randint(4, 5))
        )
        profile = model(*layers, state_factor=1.0)
        whole = sum(2 * (one.parameter_bytes + one.activation_bytes) for one in profile.layers)
        cluster = Cluster.flat(3, draw.choice([1e7, 1e8, 1e9]), draw.choice([1e-5, 1e-3]))
        cluster = replace(cluster, memory_bytes=int(whole * draw.uniform(0.25, 0.6)))
        every = list(every_straight_that_fits(profile, cluster, schedule, count))
        if not every:
            continue
        needed = {fitted(each, profile, cluster, EITHER) for each in every}
        seconds = [with_prediction(each, profile, cluster).predicted.minibatch_seconds for each in needed]
        best = search(profile, cluster, count, schedule=schedule, recompute=True)[0]
        assert fits(best.plan, profile, cluster)
        assert best.seconds <= min(seconds) * (1 + 1e-9), seed
        recomputing += any(stage.recompute for stage in best.plan.stages)
    assert recomputing > num_seeds / 7


def test_a_rank_of_many_stages_has_few_choices():
    """All of 16 chunks would be 65,536."""
    assert len(variants._choices(EITHER, 4)) == 16
    many = variants._choices(EITHER, 16)
    assert len(many) == 17 and many[0] == EITHER[:1] * 16 and many[-1] == EITHER[-1:] * 16
