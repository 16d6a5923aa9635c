import re
from dataclasses import replace

import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.search import NoPlanFits, data_parallel, search, straight
from hybridpipe.planning.simulate import predict

from .helpers import free, layer, model

FOUR = model(*[layer(1, 2, parameters=100, output=10)] * 4)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("bandwidth", [1.0, 100.0, 1e6])
def test_data_parallelism_and_the_straight_pipeline_always_compete(schedule, bandwidth):
    candidates = search(FOUR, Cluster.flat(4, bandwidth, 1e-3), 8, schedule=schedule)
    names = {candidate.origin: candidate.plan.name for candidate in candidates if candidate.origin != "exact"}
    assert names == {"dp": "4", "straight": "1-1-1-1"}
    seconds = [candidate.seconds for candidate in candidates]
    assert seconds == sorted(seconds)
    assert len({candidate.plan for candidate in candidates}) == len(candidates)
    assert {candidate.plan.schedule for candidate in candidates} == {schedule}


def test_each_candidate_carries_its_prediction():
    cluster = Cluster.flat(4, 100.0, 1e-3)
    for candidate in search(FOUR, cluster, 8):
        assert candidate.plan.predicted == predict(candidate.plan, FOUR, cluster)[1]
        assert candidate.seconds == candidate.plan.predicted.minibatch_seconds


def test_ranks_that_do_not_help_stay_unused():
    """One exchange takes longer than the whole minibatch on one rank."""
    best = search(FOUR, Cluster.flat(4, 1e9, latency_seconds=100.0), 8)[0]
    assert best.plan.name == "1" and best.seconds == approx(4 * 3 * 8)


def test_ties_go_to_fewer_ranks():
    """With one microbatch in free space, a pipeline gains nothing over one rank."""
    best = search(model(*[layer(1, 2)] * 2), free(4), 1)[0]
    assert best.plan.name == "1"


def test_fewer_ranks_may_be_asked_for_but_not_more():
    assert {c.plan.num_ranks for c in search(FOUR, free(4), 8, num_ranks=2)} <= {1, 2}
    with pytest.raises(ValueError, match=r"^ranks must be at most the cluster's 4, got 5$"):
        search(FOUR, free(4), 8, num_ranks=5)


def test_more_ranks_than_layers():
    candidates = search(model(layer(), layer()), free(5), 10)
    assert {c.plan.name for c in candidates if c.origin == "straight"} == {"1-1"}
    assert candidates[0].plan.num_ranks == 5


def test_memory_is_respected():
    """Data parallelism keeps all weights and their gradients, 4 × 100 × 2 bytes, and has one output."""
    for limit in (810, 600, 420, 250):
        cluster = replace(free(4), memory_bytes=limit)
        candidates = search(FOUR, cluster, 8)
        assert max(max(c.plan.predicted.peak_memory_bytes) for c in candidates) <= limit
        assert ("dp" in {c.origin for c in candidates}) == (limit >= 810)


def test_no_plan_fits():
    cluster = replace(free(4), memory_bytes=239)
    message = (
        "no plan fits into memory_bytes = 239: the straight pipeline on 4 ranks needs 240 on one rank; "
        "smaller microbatches or more ranks would help"
    )
    with pytest.raises(NoPlanFits, match=f"^{re.escape(message)}$"):
        search(FOUR, cluster, 8)
    assert search(FOUR, replace(cluster, memory_bytes=240), 8)[0].plan.name == "1-1-1-1"


def test_the_two_baselines_on_their_own():
    cluster = replace(free(4), memory_bytes=239)
    assert data_parallel(FOUR, cluster, 4, 8, "gpipe").predicted.minibatch_seconds == approx(24)
    assert straight(FOUR, cluster, 4, 8, "gpipe") is None
    assert straight(FOUR, free(4), 3, 8, "1f1b").replicas == (1, 1, 1)
