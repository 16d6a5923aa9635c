import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.memory import FUSION_BYTES, curves, peak_memory_bytes, stage_memory_bytes
from hybridpipe.planning.plan import SYNCHRONOUS, Plan, StageSpec
from hybridpipe.planning.simulate import predict

from .helpers import free, layer, model, plan


@pytest.mark.parametrize(
    "schedule, expected",
    [
        # weights, gradients, state, Horovod's buffer where replicated; input, activations, output
        ("1f1b", [100 * 4 + 100 + 2 * (3 + 7), 100 * 4 + 100 + 2 * (3 + 7), 10 * 4 + 1 * (7 + 5 + 1)]),
        ("gpipe", [100 * 4 + 100 + 4 * (3 + 7), 100 * 4 + 100 + 4 * (3 + 7), 10 * 4 + 8 * (7 + 5 + 1)]),
    ],
)
def test_peak_memory_of_2_1(schedule, expected):
    profile = model(
        layer(parameters=100, activation=3, output=7),
        layer(parameters=10, activation=5, output=1),
        state_factor=2,
    )
    assert peak_memory_bytes(profile, plan([2, 1], 8, schedule)) == tuple(expected)


def test_the_fusion_buffer_is_limited():
    profile = model(layer(parameters=2 * FUSION_BYTES))
    alone, replicated = (stage_memory_bytes(profile, 0, 1, 1, replicated=r) for r in (False, True))
    assert replicated - alone == FUSION_BYTES


def test_recomputation_keeps_the_input_only():
    """Stage 1 receives 7; what it has inside, 5 + 1, is there for the one microbatch that is computed."""
    profile = model(layer(activation=3, output=7), layer(activation=5, output=1), layer())
    kept, recomputed = (stage_memory_bytes(profile, 1, 2, 4, recompute=r) for r in (False, True))
    assert (kept, recomputed) == (4 * (7 + 5 + 1), 4 * 7 + (5 + 1))


def test_pipedream_keeps_a_version_for_each_minibatch_in_flight():
    profile = model(layer(parameters=100, activation=1), layer(parameters=10, activation=1))
    assert peak_memory_bytes(profile, plan([1, 1], 1, "pipedream")) == (
        2 * 100 + 100 + 2 * 1,
        2 * 10 + 1 * 1,
    )


# Over time


def test_a_curve_by_hand():
    """F 0-1, F 1-2, then B 5-7, F 7-8, ...: two in flight at most, and the same between."""
    profile = model(layer(1, 2, parameters=50, activation=6, output=4), layer(1, 2))
    timeline, _ = predict(plan([1, 1], 3), profile, free(2))
    seen = curves(profile, plan([1, 1], 3), timeline)[0]
    assert [bytes_ for _, bytes_ in seen] == [100, 110, 120, 110, 120, 110, 100]
    assert [at for at, _ in seen] == approx([0, 0, 1, 6, 6, 9, 12])


def test_a_curve_with_versions():
    """Two in flight: an update makes a version, as the second still uses the old; the last stage has one."""
    profile = model(layer(1, 2, parameters=50, update=1), layer(1, 2, parameters=10, update=1))
    made = plan([1, 1], 1, "pipedream")
    timeline, _ = predict(made, profile, free(2))
    seen = curves(profile, made, timeline)
    assert [bytes_ for _, bytes_ in seen[0]][:7] == [100, 100, 100, 100, 150, 150, 100]
    assert {bytes_ for _, bytes_ in seen[1]} == {20}


LAYER = st.builds(
    lambda forward, parameters, output, activation: layer(forward, 2, parameters, output, activation, 0.5),
    st.integers(0, 3),
    st.integers(0, 1000),
    st.integers(0, 100),
    st.integers(0, 100),
)
CASES = st.tuples(
    st.lists(st.tuples(LAYER, st.integers(1, 4)), min_size=1, max_size=4), st.integers(1, 12), st.booleans()
)


def made(case, schedule):
    stages, count, recompute = case
    replicas = [count for _, count in stages]
    specs = tuple(StageSpec(i, i + 1, m) for i, m in enumerate(replicas))
    chosen = Plan(specs, schedule, 1 if schedule == "pipedream" else count, recompute=recompute)
    profile = model(*(each for each, _ in stages), state_factor=1)
    return chosen, profile, Cluster.flat(chosen.num_ranks, 50.0, 0.25)


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@given(CASES)
@settings(deadline=None, derandomize=True, max_examples=50)
def test_the_most_over_time_is_the_peak(schedule, case):
    """On the first replica of each stage; others may have fewer microbatches."""
    chosen, profile, cluster = made(case, schedule)
    timeline, prediction = predict(chosen, profile, cluster)
    seen = curves(profile, chosen, timeline)
    most = [max(bytes_ for _, bytes_ in curve) for curve in seen.values()]
    peaks = dict(zip(chosen.ranks, prediction.peak_memory_bytes))
    assert all(held <= peak for held, peak in zip(most, peaks.values()))
    for stage in chosen.stages:
        assert most[stage.ranks[0]] == peaks[stage.ranks[0]]
    for curve in seen.values():
        assert curve[0] == (0.0, curve[-1][1])  # all that was added is gone
        assert all(before[0] <= after[0] for before, after in itertools.pairwise(curve))


@given(CASES)
@settings(deadline=None, derandomize=True, max_examples=50)
def test_pipedream_never_holds_more_than_the_peak(case):
    chosen, profile, cluster = made(case, "pipedream")
    timeline, prediction = predict(chosen, profile, cluster)
    seen = curves(profile, chosen, timeline)
    for held, peak in zip(seen.values(), prediction.peak_memory_bytes):
        assert max(bytes_ for _, bytes_ in held) <= peak
