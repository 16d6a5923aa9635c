import math
import random
import time
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.cost.estimate import estimate, estimates
from hybridpipe.planning.cost.formula import stage_costs
from hybridpipe.planning.cost.memory import peak_memory_bytes
from hybridpipe.planning.layer_parts import ExpertsProfile
from hybridpipe.planning.plan import Plan, Prediction, StageSpec
from hybridpipe.planning.profile import Measurement, ModelProfile
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.schedules.registry import SYNCHRONOUS
from hybridpipe.planning.search import search as search_module
from hybridpipe.planning.search.problem import Problem
from hybridpipe.planning.search.proposals import every_straight
from hybridpipe.planning.search.search import (
    Candidate,
    NoPlanFits,
    data_parallel,
    fits,
    ranked,
    straight,
    with_prediction,
)
from hybridpipe.planning.simulator.predict import is_simulated, predict
from tests.planning.helpers import free, layer, model, search, search_sizes
from tests.thinned import rare

FOUR = model(*[layer(1, 2, parameters=100, output=10)] * 4)


def convolutional(num_layers: int, seed: int) -> ModelProfile:
    """Layers of unequal work whose outputs shrink and whose weights grow from front to back."""
    draw = random.Random(seed)
    work = [draw.uniform(0.2, 1.0) * 1e-3 for _ in range(num_layers)]
    depths = [30 ** (i / num_layers) for i in range(num_layers)]
    return model(
        *(
            layer(w, 2 * w, round(draw.random() * 1e6 * depth), round(draw.uniform(0.5, 1.0) * 2e7 / depth))
            for w, depth in zip(work, depths, strict=True)
        )
    )


def nodes_of_four(num_ranks: int, bandwidth: float) -> Cluster:
    """Ranks of a node share its link."""
    network = Level("network", num_ranks, bandwidth, 2e-5, shared_bandwidth=bandwidth)
    return Cluster((Level("node", 4, 1e10, 5e-6), network))


SCHEDULES = pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])


@SCHEDULES
@pytest.mark.parametrize("bandwidth", [1.0, 100.0, 1e6])
def test_data_parallelism_and_a_straight_pipeline_always_compete(schedule, bandwidth):
    candidates = search(FOUR, Cluster.flat(4, bandwidth, 1e-3), 8, schedule=schedule)
    plans = {candidate.origin: candidate.plan for candidate in candidates if candidate.origin != "exact"}
    assert plans["dp"].name == "4"
    assert set(plans["straight"].replicas) == {1} and plans["straight"].num_stages > 1
    seconds = [candidate.seconds for candidate in candidates]
    assert seconds == sorted(seconds)
    assert len({candidate.plan for candidate in candidates}) == len(candidates)
    assert {candidate.plan.schedule for candidate in candidates} == {schedule}


@pytest.mark.parametrize("schedule, count", [("1f1b", 8), ("pipedream", 1)])
def test_each_candidate_carries_its_prediction(schedule, count):
    cluster = Cluster.flat(4, 100.0, 1e-3)
    for candidate in search(FOUR, cluster, count, schedule=schedule):
        assert candidate.plan.predicted == predict(candidate.plan, FOUR, cluster)[1]
        assert candidate.seconds == candidate.plan.predicted.minibatch_seconds
        assert candidate.samples == FOUR.samples


def test_the_simulator_decides_not_the_formula():
    """All that crosses between two nodes shares one link at once; the formula sees each part alone."""
    layers = [
        layer(3, 2, parameters=100, output=10),
        layer(2, 6, parameters=100, output=10),
        layer(1, 3, parameters=3000, output=10),
    ]
    nodes = Level("node", 2, 1e9, 0.0), Level("network", 4, 1e3, 0.0, shared_bandwidth=30.0)
    candidates = search(model(*layers), Cluster(nodes), 4)
    by_formula = min(candidates, key=lambda c: estimate(c.plan, model(*layers), Cluster(nodes)))
    assert candidates[0].seconds < 0.9 * by_formula.seconds


def each_a_seed(few: bool) -> list[list[Cluster]]:
    flat, nodes = Cluster.flat(8, 1.25e9, 2e-5), nodes_of_four(8, 1.25e8)
    return [[flat], [nodes]] if few else [[flat, nodes]] * 2


@pytest.mark.parametrize("num_layers", [9, rare(12)])
@pytest.mark.parametrize("schedule, count", [("1f1b", 16), ("pipedream", 1), ("pipedream-2bw", 16)])
def test_leaving_hopeless_plans_out_loses_nothing(schedule, count, num_layers, monkeypatch):
    """A plan that takes longer by its bound than another one in the simulator is not simulated."""
    num_simulated = []
    for seed, clusters in enumerate(each_a_seed(num_layers < 12)):
        profile = convolutional(num_layers, seed)
        for cluster in clusters:
            found, counts = {}, []
            for which in ("some", "all"):
                simulated = []
                with monkeypatch.context() as patch:
                    patch.setattr(
                        search_module, "predict", lambda *each, s=simulated: s.append(0) or predict(*each)
                    )
                    if which == "all":
                        patch.setattr(search_module, "least_seconds", lambda *_: 0.0)
                    found[which] = search(profile, cluster, count, schedule=schedule)
                counts.append(len(simulated))
            assert found["some"][0].seconds == approx(found["all"][0].seconds, rel=0.01)
            num_simulated.append(counts)
    some, every = map(sum, zip(*num_simulated, strict=True))
    assert some < every


@pytest.mark.parametrize("num_layers", [9, rare(12)])
@pytest.mark.parametrize("cluster", [Cluster.flat(8, 1.25e8, 2e-5), nodes_of_four(8, 1.25e8)])
def test_no_asynchronous_pipeline_is_faster_than_its_formula(cluster, num_layers, monkeypatch):
    """So none is simulated whose formula says more than the best, where processors are the ranks' own."""
    every = []
    monkeypatch.setattr("hybridpipe.planning.search.search.least_seconds", lambda *_: 0.0)
    for seed in range(2):
        profile = convolutional(num_layers, seed)
        found = search(profile, cluster, 1, schedule="pipedream")
        for candidate in found:
            costs = stage_costs(profile, candidate.plan)
            every.append(candidate.seconds / estimates(candidate.plan, costs, cluster).unhindered)
    assert len(every) > 20 and min(every) > 1 - 1e-9


def test_ranks_that_do_not_help_stay_unused():
    """One exchange takes longer than the whole minibatch on one rank."""
    best = search(FOUR, Cluster.flat(4, 1e9, latency_seconds=100.0), 8)[0]
    assert best.plan.name == "1" and best.seconds == approx(4 * 3 * 8)


def test_ranks_that_share_processors_compete_in_smaller_numbers():
    """Eight ranks on the processors of one: the more compute, the more is lost."""
    speeds = tuple(1 / n**1.2 for n in range(1, 9))
    shared = replace(free(8), node_ranks=8, compute_speeds=speeds)
    candidates = search(FOUR, shared, 8)
    assert {c.plan.name for c in candidates if c.origin == "dp"} >= {"8", "1"}
    assert candidates[0].plan.num_ranks == 1


def test_ties_go_to_fewer_ranks():
    """With one microbatch in free space, a pipeline gains nothing over one rank."""
    best = search(model(*[layer(1, 2)] * 2), free(4), 1)[0]
    assert best.plan.name == "1"


def test_equal_predictions_are_ranked_by_simplicity():
    def candidate(seconds, *replicas, shift=0):
        edge, stages = shift, []
        for i, m in enumerate(replicas):
            stages.append(StageSpec(i, i + 1, m, tuple(range(edge, edge + m))))
            edge += m
        return Candidate("exact", Plan(tuple(stages), predicted=Prediction(seconds, 1.0, 0.0, ())), 1)

    slow = candidate(1.1, 1)
    order = [
        candidate(1.0, 2),
        candidate(1.0 + 1e-10, 2, shift=1),
        candidate(1.0, 1, 1),
        candidate(1.0, 3),
        slow,
    ]
    assert ranked(order[::-1]) == order


def test_fewer_ranks_may_be_asked_for_but_not_more():
    assert {r for c in search(FOUR, free(4), 8, num_ranks=2) for r in c.plan.ranks} == {0, 1}
    with pytest.raises(ValueError, match=r"^ranks must be at most the cluster's 4, got 5$"):
        search(FOUR, free(4), 8, num_ranks=5)


def test_more_ranks_than_layers():
    candidates = search(model(layer(), layer()), free(5), 10)
    assert {c.plan.name for c in candidates if c.origin == "straight"} == {"1-1"}
    assert candidates[0].plan.num_ranks == 5


@SCHEDULES
@pytest.mark.parametrize("limit", [920, 600, 420])
def test_memory_is_respected(schedule, limit):
    """Data parallelism keeps weights, gradients and Horovod's buffer, 3 × 400, and the outputs."""
    for memory in (limit, (limit, 2 * limit, limit, limit)):
        cluster = replace(free(4), memory_bytes=memory)
        candidates = search(FOUR, cluster, 8, schedule=schedule)
        for candidate in candidates:
            assert fits(candidate.plan, FOUR, cluster)
            peaks = candidate.plan.predicted.peak_memory_bytes
            assert all(p <= cluster.memory(r) for p, r in zip(peaks, candidate.plan.ranks, strict=True))
    assert "dp" not in {c.origin for c in candidates}


def test_recomputation_competes_where_memory_is_limited():
    """Activations of 8 microbatches under GPipe do not fit, inputs do."""
    profile = model(*[layer(1, 2, parameters=1, output=1, activation=100)] * 2)
    cluster = replace(free(2), memory_bytes=600)
    best = search(profile, cluster, 16, schedule="gpipe", recompute=True)[0]
    assert all(map(best.plan.recomputes, range(best.plan.num_stages)))
    with pytest.raises(NoPlanFits, match=r"recomputation would help\n"):
        search(profile, cluster, 16, schedule="gpipe")
    for roomy in (replace(free(2), memory_bytes=10**6), free(2)):
        found = search(profile, roomy, 16, recompute=True)
        assert not any(map(found[0].plan.recomputes, range(found[0].plan.num_stages)))
        assert found == search(profile, roomy, 16)


def test_only_stages_that_must_recompute():
    """Under 1f1b the first of two stages holds two microbatches, the second one."""
    profile = model(*[layer(1, 2, parameters=1, output=1, activation=100)] * 2)
    cluster = replace(free(2), memory_bytes=150)
    best = search(profile, cluster, 16, recompute=True)[0].plan
    assert [best.recomputes(s) for s in range(best.num_stages)] == [True, False]


def test_the_size_of_the_microbatch_is_chosen():
    """Twice the samples in less than twice the time: the larger size wins until the pipeline starves."""

    def at(samples, seconds):
        return Measurement(samples, (layer(seconds, 2 * seconds, output=samples),))

    profile = model(layer(1.0, 2.0, output=1), samples=1)
    profile = replace(profile, others=(at(4, 2.0), at(16, 16.0), at(64, 1.0)))
    candidates = search_sizes(profile, free(1), 16)
    assert {(c.samples, c.plan.num_microbatches) for c in candidates} == {(1, 16), (4, 4), (16, 1)}
    assert candidates[0].samples == 4 and candidates[0].seconds == approx(4 * 6)
    assert [c.samples for c in search_sizes(replace(profile, others=()), free(1), 5)] == [1]
    (whole,) = search_sizes(replace(profile, samples=32, others=()), free(1), 16)
    assert (whole.samples, whole.plan.num_microbatches) == (16, 1)


def test_an_asynchronous_minibatch_travels_whole():
    candidates = search_sizes(FOUR, free(4), 12, schedule="pipedream")
    assert {(c.samples, c.plan.num_microbatches) for c in candidates} == {(12, 1)}
    assert candidates[0].seconds == approx(12 * 4 * 3 / 4)


def test_sizes_that_do_not_fit_are_passed_over():
    profile = model(layer(1, 2, activation=10), samples=1)
    profile = replace(profile, others=(Measurement(4, (layer(1, 2, activation=40),)),))
    cluster = replace(free(1), memory_bytes=20)
    assert {c.samples for c in search_sizes(profile, cluster, 8)} == {1}
    with pytest.raises(NoPlanFits, match="needs 10 B on rank 0, which has 5 B; "):
        search_sizes(profile, replace(cluster, memory_bytes=5), 8)


def test_the_two_baselines_on_their_own():
    cluster = replace(free(4), memory_bytes=239)
    assert data_parallel(FOUR, cluster, 4, 8, "gpipe").predicted.minibatch_seconds == approx(24)
    assert straight(FOUR, cluster, 4, 8, "gpipe") is None
    assert straight(FOUR, free(4), 4, 8, "1f1b").replicas == (1, 1, 1, 1)
    assert straight(model(layer()), free(4), 4, 8, "1f1b").name == "1"


@pytest.mark.parametrize("num_stages", [1, 30])
def test_what_would_take_minutes_to_simulate_is_estimated(num_stages, monkeypatch):
    profile = model(*[layer(1, 2, update=1)] * num_stages)
    plan = Plan(tuple(StageSpec(i, i + 1) for i in range(num_stages)), num_microbatches=2 * num_stages)
    simulated = with_prediction(plan, profile, free(num_stages)).predicted
    assert is_simulated(plan)
    monkeypatch.setattr("hybridpipe.planning.simulator.predict.MAX_INSTRUCTIONS", 1)
    assert not is_simulated(plan)
    formula = with_prediction(plan, profile, free(num_stages)).predicted
    assert formula.minibatch_seconds == estimate(plan, profile, free(num_stages))
    assert formula == replace(
        simulated,
        **{
            name: approx(getattr(simulated, name))
            for name in ("minibatch_seconds", "samples_per_second", "bubble_fraction")
        },
    )


@pytest.mark.parametrize(
    "num_layers, cluster, told",
    [
        (1, Cluster.flat(10**6, 1e9, 1e-5), "ranks must be at most 4096 to be planned, got 1000000"),
        (10_000, free(4096), "layers times ranks must be at most 8388608 to be planned, got 40960000"),
        (100_001, free(1), "layers must be at most 100000 to be planned, got 100001"),
    ],
)
def test_what_is_too_large_is_refused(num_layers, cluster, told):
    with pytest.raises(ValueError, match=f"^{told}$"):
        search(model(*[layer()] * num_layers), cluster, 8)


@pytest.mark.parametrize("num_microbatches", [10**9, 4096])
def test_a_long_minibatch_is_judged_at_once(num_microbatches):
    begin = time.monotonic()
    assert search(FOUR, Cluster.flat(16, 1e3, 1e-3), num_microbatches)
    assert time.monotonic() - begin < 30


EQUAL = model(*[layer(1e-2, 2e-2, parameters=10**7, output=10**5)] * 16)


@pytest.mark.parametrize(
    "profile, bandwidth, best",
    [
        (EQUAL, 1e8, "zb-v"),  # weights are heavy, messages light
        (model(*EQUAL.layers[:4]), 1e8, "zero-bubble"),  # a layer a rank: nothing to fold
        (model(*[layer(1, 2, output=1)] * 16), 1e9, "1f1b"),  # data parallelism is perfect
    ],
)
def test_auto_takes_the_schedule_that_is_fastest_in_the_simulator(profile, bandwidth, best):
    cluster = Cluster.flat(4, bandwidth, 1e-5)
    found = search(profile, cluster, 16, schedule="auto")
    alone = {schedule: search(profile, cluster, 16, schedule=schedule)[0].seconds for schedule in SYNCHRONOUS}
    assert found[0].plan.schedule == best
    assert found[0].seconds == approx(min(alone.values()))
    assert all(alone[best] <= seconds * (1 + 1e-9) for seconds in alone.values())


def test_auto_allows_asynchronous_schedules_where_it_is_asked_to():
    cluster = Cluster.flat(4, 1e8, 1e-5)
    schedules = {c.plan.schedule for c in search(EQUAL, cluster, 16, schedule="auto")}
    assert schedules == {"1f1b", "gpipe", "zero-bubble", "interleaved-1f1b", "zb-v"}
    found = search(EQUAL, cluster, 16, schedule="auto", asynchronous=True, vertical_sync=True)
    assert {c.plan.schedule for c in found} == {*schedules, "pipedream", "pipedream-2bw"}
    assert {c.plan.vertical_sync for c in found if c.plan.schedule == "pipedream"} == {True}
    assert {c.samples * c.plan.num_microbatches for c in found} == {16}
    assert found[0].plan.is_asynchronous


@pytest.mark.parametrize("part, best", [(1.0, "v-half"), (0.6, "v-min")])
def test_under_a_limit_auto_takes_the_schedule_that_is_fastest_in_it(part, best):
    """Activations are most of the memory. The limits are parts of the peak of 1F1B on four ranks."""
    profile = model(*[layer(1e-2, 2e-2, parameters=10**6, output=10**6, activation=10**8)] * 16)
    cluster = Cluster.flat(4, 1e9, 1e-5)
    peak = max(straight(profile, cluster, 4, 16, "1f1b").predicted.peak_memory_bytes)
    limited = replace(cluster, memory_bytes=int(part * peak))
    found = search(profile, limited, 16, schedule="auto")[0]
    assert found.plan.schedule == best and fits(found.plan, profile, limited)
    in_line = search(profile, limited, 16, schedule="1f1b")[0]
    assert found.seconds < 0.95 * in_line.seconds
    assert found.seconds == approx(search(profile, limited, 16, schedule=best)[0].seconds)


def test_what_schedules_can_do_limits_auto():
    limited = search(EQUAL, free(4), 16, schedule="auto", max_in_flight=2)
    assert {(c.plan.schedule, c.plan.max_in_flight) for c in limited} == {("1f1b", 2)}
    with pytest.raises(ValueError, match=r"^vertical_sync must be false unless asynchronous schedules"):
        search(EQUAL, free(4), 16, schedule="auto", vertical_sync=True)
    with pytest.raises(ValueError, match=r"^schedule must be one of auto, 1f1b, gpipe, .*, got 'best'$"):
        search(EQUAL, free(4), 16, schedule="best")
    with pytest.raises(ValueError, match=r"^max_in_flight must not be given under gpipe, got 2: what"):
        search(EQUAL, free(4), 16, schedule="gpipe", max_in_flight=2)
    with pytest.raises(
        ValueError, match=r"^schedule interleaved-1f1b needs at least 2 ranks and 4 layers, got 4 and 3$"
    ):
        search(model(*[layer()] * 3), free(4), 16, schedule="interleaved-1f1b")
    assert search(model(*[layer()] * 3), free(4), 16, schedule="auto")


def test_equal_predictions_go_to_the_simpler_schedule():
    def candidate(schedule, num_ranks, seconds=1.0):
        plan = Plan((StageSpec(0, 1, num_ranks),), schedule, predicted=Prediction(seconds, 1.0, 0.0, ()))
        return Candidate("exact", plan, 1)

    order = [candidate("1f1b", 2), candidate("gpipe", 1), candidate("zero-bubble", 1)]
    assert ranked(order[::-1]) == order
    assert ranked([*order, candidate("zero-bubble", 2, 0.9)])[0].seconds == 0.9


@pytest.mark.parametrize("limit", [4 * 10**6, rare(6 * 10**6)])
def test_interleaved_plans_respect_memory(limit):
    profile = model(*[layer(1, 2, parameters=10**5, output=10**4, activation=10**5)] * 16)
    cluster = replace(Cluster.flat(4, 1e5, 1e-3), memory_bytes=limit)
    found = search(profile, cluster, 16, schedule="interleaved-1f1b", recompute=True)
    assert all(fits(candidate.plan, profile, cluster) for candidate in found)
    with pytest.raises(NoPlanFits, match="comes closest and needs"):
        search(profile, replace(cluster, memory_bytes=10**5), 16, schedule="interleaved-1f1b")


def test_the_baselines_of_schedules_that_have_none():
    assert data_parallel(EQUAL, free(4), 4, 8, "auto").schedule == "1f1b"
    assert data_parallel(EQUAL, free(4), 4, 8, "interleaved-1f1b").schedule == "1f1b"
    chunked = straight(EQUAL, free(4), 4, 8, "interleaved-1f1b")
    assert chunked.schedule == "interleaved-1f1b" and set(chunked.replicas) == {1}
    seconds = [straight(EQUAL, free(4), 4, 8, name).predicted.minibatch_seconds for name in SYNCHRONOUS]
    assert straight(EQUAL, free(4), 4, 8, "auto").predicted.minibatch_seconds == approx(min(seconds))
    for ranks, layers in (
        (1, EQUAL),
        (4, model(layer(), layer(), layer())),
    ):  # no schedule needs to interleave
        assert straight(layers, free(ranks), ranks, 8, "auto").chunks == 1


def test_a_stage_that_just_fits_does_not_recompute():
    profile = model(*[layer(1, 2, parameters=1, output=1, activation=100)] * 2)
    two = Plan((StageSpec(0, 1), StageSpec(1, 2)), num_microbatches=16)
    first, second = peak_memory_bytes(profile, two)
    assert first > second
    best = search(profile, replace(free(2), memory_bytes=second), 16, recompute=True)[0].plan
    assert [best.recomputes(s) for s in range(best.num_stages)] == [True, False]


@pytest.mark.timeout(10)
def test_plans_that_take_no_time_are_ranked_too():
    def candidate(*replicas):
        stages = tuple(StageSpec(i, i + 1, m) for i, m in enumerate(replicas))
        return Candidate("exact", Plan(stages, predicted=Prediction(0.0, 0.0, 0.0, ())), 1)

    assert ranked([candidate(1, 1), candidate(1)]) == [candidate(1), candidate(1, 1)]


SLOW_LINKS = [Cluster.flat(8, 1e8, 5e-5), nodes_of_four(8, 3e7)]


@pytest.mark.parametrize("num_layers", [6, rare(8)])
@pytest.mark.parametrize("cluster", SLOW_LINKS)
@pytest.mark.parametrize("schedule, count", [("1f1b", 16), ("pipedream", 1)])
def test_more_ranks_are_never_slower(cluster, schedule, count, num_layers):
    for seed in range(2 if num_layers < 8 else 3):
        profile = convolutional(num_layers, seed)
        seconds = [
            search(profile, cluster, count, num_ranks=n, schedule=schedule)[0].seconds for n in range(1, 9)
        ]
        assert seconds == sorted(seconds, reverse=True), seed


@pytest.mark.parametrize("cluster", SLOW_LINKS)
@pytest.mark.parametrize("schedule, count", [("1f1b", 16), ("pipedream", 1)])
def test_a_limit_of_the_peak_changes_nothing(cluster, schedule, count):
    profile = convolutional(6, 1)
    free_plan = search(profile, cluster, count, schedule=schedule)[0].plan
    for limit in (max(free_plan.predicted.peak_memory_bytes), 10**12):
        limited = replace(cluster, memory_bytes=limit)
        assert search(profile, limited, count, schedule=schedule)[0].plan == free_plan


@pytest.mark.parametrize("cluster", SLOW_LINKS)
@pytest.mark.parametrize(
    "schedule, count", [("1f1b", 16), ("gpipe", 16), ("zero-bubble", 16), ("pipedream", 1)]
)
def test_no_straight_pipeline_is_faster(cluster, schedule, count):
    """All are looked at where they are few, and none is faster than its bound."""
    profile = convolutional(7, 2)
    best = search(profile, cluster, count, schedule=schedule)[0].seconds
    best_straight = straight(profile, cluster, 8, count, schedule).predicted.minibatch_seconds
    seen = 0
    for least, plan in every_straight(Problem(profile, cluster, count, 8, PlanRequest(schedule))):
        seconds = with_prediction(plan, profile, cluster).predicted.minibatch_seconds
        assert least <= seconds * 1.01  # a pace is measured over some rounds
        assert best <= seconds * (1 + 1e-9) and best_straight <= seconds * (1 + 1e-9)
        seen += 1
    assert seen == 2**6 - 1  # every set of cuts but the empty one


FORWARD_AND_BYTES = {  # of weights, outputs and activations
    "1-2-1": [(1, 0, 200, 0), (1, 400, 20, 0), (3, 0, 100, 100), (2, 400, 100, 200)],
    "2-1-1": [(3, 0, 400, 100), (3, 0, 200, 100), (2, 400, 20, 100), (1, 400, 100, 100), (3, 40, 200, 100)],
    "1-2": [(1, 400, 100, 0), (1, 0, 20, 100), (3, 400, 20, 0), (1, 0, 400, 200)],
}


@pytest.mark.parametrize(
    "name, num_ranks, schedule", [("1-2-1", 4, "pipedream"), ("2-1-1", 4, "pipedream"), ("1-2", 3, "1f1b")]
)
def test_the_fastest_of_all_plans_is_found_among_those_of_less_memory(name, num_ranks, schedule):
    """The formula's best plans are alike, and slow: replicas of a later stage pause for their all-reduce."""
    profile = model(*(layer(forward, 2 * forward, *sizes) for forward, *sizes in FORWARD_AND_BYTES[name]))
    cluster, count = Cluster.flat(num_ranks, 100.0, 0.0), 1 if schedule == "pipedream" else 8
    best = search(profile, cluster, count, schedule=schedule)[0]
    every = every_plan(profile.num_layers, num_ranks, schedule, count)
    fastest = min(with_prediction(plan, profile, cluster).predicted.minibatch_seconds for plan in every)
    assert best.plan.name == name and best.seconds == pytest.approx(fastest)


def every_plan(num_layers, num_ranks, schedule, count):
    """All cuts and numbers of replicas, on the first ranks."""
    for used in range(1, num_ranks + 1):
        for stages in range(1, min(used, num_layers) + 1):
            borders, cuts = (
                combinations(range(1, used), stages - 1),
                combinations(range(1, num_layers), stages - 1),
            )
            for between, inner in product(borders, cuts):
                replicas = [b - a for a, b in pairwise((0, *between, used))]
                spans = pairwise((0, *inner, num_layers))
                specs = (StageSpec(*span, m) for span, m in zip(spans, replicas, strict=True))
                yield Plan(tuple(specs), schedule, count)


def test_no_plan_is_simulated_twice_to_its_end(monkeypatch):
    """The searches on fewer ranks meet many plans again."""
    ends = Counter()

    def counted(plan, profile, cluster, limit=math.inf):
        timeline, prediction = predict(plan, profile, cluster, limit)
        ends[plan] += prediction.minibatch_seconds < math.inf
        return timeline, prediction

    monkeypatch.setattr(search_module, "predict", counted)
    search(convolutional(6, 1), Cluster.flat(6, 1e8, 1e-4), 12)
    assert len(ends) > 10 and max(ends.values()) == 1


@pytest.mark.parametrize(
    "bandwidth, memory, splits", [(1e7, None, True), (1e9, None, False), (1e9, 6 * 10**8, True)]
)
def test_experts_are_split_where_their_all_reduce_is_slow_or_memory_is_short(bandwidth, memory, splits):
    """Tokens are uneven, so that a pass takes longer where each replica has its own experts."""
    experts = ExpertsProfile(9 * 10**7, 0.6, 20_000, ((5, 4, 6, 5),))
    small = layer(1, 2, 10**6, 10_000, 100_000)
    mixture = replace(layer(2, 4, 10**8, 10_000, 100_000), experts=experts)
    cluster = replace(Cluster.flat(4, bandwidth, 1e-4), memory_bytes=memory)
    best, *_ = search(model(small, mixture, mixture, small, state_factor=2.0), cluster, 8)
    assert (best.plan.name, best.plan.stages[0].experts) == ("4", splits)
