"""The cuts of interleaved plans against all that there are, and the plans that are proposed."""

import random
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.cost.estimate import estimate
from hybridpipe.planning.cost.pass_times import with_pass_times
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.search.interleave import SLACKS, _cuts, interleaved_plans, slowest_stage
from hybridpipe.planning.search.search import straight
from hybridpipe.planning.simulator.predict import predict
from tests.planning.helpers import free, layer, model, search

INTERLEAVED = 8, PlanRequest("interleaved-1f1b")
SIXTEEN = model(*[layer(1, 2, parameters=100, output=10)] * 16)


@pytest.mark.parametrize("seed", range(200))
def test_cuts_are_the_best_of_all(seed):
    """No cuts have a faster slowest stage; of those within each slack none send less."""
    draw = random.Random(seed)
    n = draw.randint(2, 8)
    k = draw.randint(1, n)
    work = [draw.choice([draw.random(), 0.0, 1.0]) for _ in range(n - 1)] + [1.0]
    moved = np.array([0.0, *(float(draw.randint(0, 9)) for _ in range(n))])
    every = {}  # slowest stage and traffic
    for inner in combinations(range(1, n), k - 1):
        edges = (0, *inner, n)
        every[edges] = max(sum(work[a:b]) for a, b in pairwise(edges)), sum(moved[e] for e in inner)
    least = min(slowest for slowest, _ in every.values())
    found = list(_cuts(work, moved, [1.0] * k, SLACKS))
    for slack, edges in zip(SLACKS, found * 2, strict=False):
        slowest, sent = every[tuple(edges)]
        bound = least * slack * (1 + 1e-8)
        assert slowest <= bound
        assert sent == min(sent for slowest, sent in every.values() if slowest <= bound)


def test_slow_ranks_get_less():
    done = [float(i) for i in range(10)]
    assert slowest_stage(done, [1.0, 0.5]) == approx(6)
    (edges, *_) = _cuts([1.0] * 9, np.zeros(10), [1.0, 0.5, 1.0, 0.5], SLACKS)
    sizes = [b - a for a, b in pairwise(edges)]
    assert max(sizes[0], 2 * sizes[1], sizes[2], 2 * sizes[3]) == 4


def test_very_many_layers_are_cut_without_a_table(monkeypatch):
    monkeypatch.setattr("hybridpipe.planning.search.interleave.MAX_CELLS", 0)
    (edges,) = _cuts([1.0] * 12, np.zeros(13), [1.0] * 4, [1.0])
    assert edges == [0, 3, 6, 9, 12]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_what_is_proposed(num_ranks):
    cluster = Cluster.flat(num_ranks, 1e3, 1e-3)
    plans = interleaved_plans(SIXTEEN, cluster, *INTERLEAVED, range(num_ranks))
    assert {plan.chunks for plan in plans} == {2, 3, 4}
    assert {plan.replicas[0] for plan in plans} >= {m for m in (1, 2, 4) if 2 * m <= num_ranks}
    assert len(set(plans)) == len(plans) and all(plan.schedule == "interleaved-1f1b" for plan in plans)
    seconds = [estimate(plan, SIXTEEN, cluster) for plan in plans]
    assert seconds == sorted(seconds)
    straight = interleaved_plans(SIXTEEN, cluster, *INTERLEAVED, range(num_ranks), max_replicas=1)
    assert {plan.replicas[0] for plan in straight} == {1}


def test_nothing_where_two_groups_of_two_stages_are_too_many():
    assert not interleaved_plans(model(*[layer()] * 3), free(4), *INTERLEAVED, range(4))
    assert not interleaved_plans(SIXTEEN, free(1), *INTERLEAVED, range(1))


def test_groups_stand_one_behind_the_other():
    """Two replicas of a group are on one node, or on two, as the line has it."""
    cluster = Cluster((Level("node", 2, 1e9, 0.0), Level("network", 4, 1e3, 0.0)))
    plans = interleaved_plans(SIXTEEN, cluster, *INTERLEAVED, range(4))
    groups = {tuple(stage.ranks for stage in plan.stages[: plan.num_groups]) for plan in plans}
    assert groups >= {((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0,), (1,), (2,), (3,))}


@pytest.mark.parametrize("num_microbatches", [4, 8, 16])
@pytest.mark.parametrize("chunks", [2, 4])
def test_equal_stages_take_the_papers_count(num_microbatches, chunks):
    """(M + (p - 1) / v) (f + b), by the formula and in the simulator."""
    plans = interleaved_plans(SIXTEEN, free(4), num_microbatches, INTERLEAVED[1], range(4), max_replicas=1)
    plan = next(plan for plan in plans if plan.chunks == chunks)
    expected = (num_microbatches + 3 / chunks) * 12
    assert estimate(plan, SIXTEEN, free(4)) == approx(expected)
    assert predict(plan, SIXTEEN, free(4))[1].minibatch_seconds == approx(expected)


@pytest.mark.parametrize("dear", range(4))
def test_no_cut_crosses_the_dearest_place_where_another_is_as_fast(dear):
    """Five equal layers in four stages: one holds two, those that much is sent between, there and back."""
    sends = [layer(1, 2, output=50 if i == dear else 1) for i in range(5)]
    cluster = Cluster.flat(2, 1e3, 0.0)
    plans = interleaved_plans(model(*sends), cluster, *INTERLEAVED, range(2), max_replicas=1)
    edges = {tuple(stage.stop for stage in plan.stages[:-1]) for plan in plans if plan.num_stages == 4}
    assert edges == {tuple(edge for edge in range(1, 5) if edge != dear + 1)}


def test_where_layers_times_ranks_are_many_only_two_chunks_are_tried(monkeypatch):
    monkeypatch.setattr("hybridpipe.planning.search.interleave.MANY", 16 * 4 - 1)
    assert {plan.chunks for plan in interleaved_plans(SIXTEEN, free(4), *INTERLEAVED, range(4))} == {2}
    assert {plan.chunks for plan in interleaved_plans(SIXTEEN, free(3), *INTERLEAVED, range(3))} == {2, 3, 4}


def test_groups_of_three_are_tried_as_well_as_powers_of_two():
    plans = interleaved_plans(SIXTEEN, Cluster.flat(6, 1e3, 1e-3), *INTERLEAVED, range(6))
    assert {plan.replicas[0] for plan in plans} == {1, 2, 3}
    twelve = interleaved_plans(SIXTEEN, Cluster.flat(12, 1e3, 1e-3), *INTERLEAVED, range(12))
    assert {plan.replicas[0] for plan in twelve} == {1, 2, 3, 4, 6}


def test_plans_in_a_v_have_pairs_of_stages_that_take_equally_long():
    """Of 24 equal layers over eight ranks each rank has three, two of them in one of its stages."""
    best = straight(model(*[layer(1, 2)] * 24), free(8), 8, 32, "zb-v")
    assert best.placement == "v" and len(best.pass_times) == best.num_stages == 16
    layers = [stage.stop - stage.start for stage in best.stages]
    assert {a + b for a, b in zip(layers, reversed(layers), strict=True)} == {3}


@pytest.mark.parametrize("schedule", ["zb-v", "v-half", "v-min"])
def test_a_plan_in_a_v_is_ordered_by_the_times_of_its_own_stages(schedule):
    """Whatever the search has done to a plan, also under a limit, where its stages recompute."""
    profile = model(*[layer(1 + i % 3, 2 + i % 2, 10, 50, 400) for i in range(12)])
    cluster = replace(Cluster.flat(4, 100.0, 0.1), memory_bytes=30_000)
    free_of_limits = search(profile, replace(cluster, memory_bytes=None), 16, schedule=schedule)
    peak = max(free_of_limits[0].plan.predicted.peak_memory_bytes)
    limited = replace(cluster, memory_bytes=int(0.7 * peak))
    for each in [*free_of_limits, *search(profile, limited, 16, schedule=schedule, recompute=True)]:
        untimed = replace(each.plan, pass_times=None, predicted=None)
        timed = with_pass_times(untimed, profile, cluster)
        assert each.plan.pass_times in (timed.pass_times, None)
    assert any(map(free_of_limits[0].plan.pass_times.count, free_of_limits[0].plan.pass_times))
