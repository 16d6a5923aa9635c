import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.memory import (
    FUSION_BYTES,
    curves,
    peak_memory_bytes,
    versions_per_stage,
)
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import JoinedProducts
from hybridpipe.planning.schedules.generators import delay_of, programs, version_of, weights_numbers
from hybridpipe.planning.schedules.instructions import Backward, Forward, Step
from hybridpipe.planning.schedules.registry import SYNCHRONOUS, TRAITS
from hybridpipe.planning.simulator.predict import predict
from tests.planning.helpers import free, layer, model, plan


@pytest.mark.parametrize(
    "schedule, expected",
    [
        # weights, gradients, state; Horovod's and MPI's where replicated; input, activations, output
        ("1f1b", [100 * 4 + 200 + 2 * (3 + 7), 100 * 4 + 200 + 2 * (3 + 7), 10 * 4 + 1 * (7 + 5 + 1)]),
        ("gpipe", [100 * 4 + 200 + 4 * (3 + 7), 100 * 4 + 200 + 4 * (3 + 7), 10 * 4 + 8 * (7 + 5 + 1)]),
    ],
)
def test_peak_memory_of_2_1(schedule, expected):
    """And messages of 7 bytes: a gradient, one that is sent, two that are received ahead."""
    profile = model(
        layer(parameters=100, activation=3, output=7),
        layer(parameters=10, activation=5, output=1),
        state_factor=2,
    )
    assert peak_memory_bytes(profile, plan([2, 1], 8, schedule)) == tuple(each + 4 * 7 for each in expected)


@pytest.mark.parametrize("replicas, room", [(2, 6 * FUSION_BYTES), (3, 4 * FUSION_BYTES)])
def test_an_all_reduce_takes_a_buffer_and_room_for_the_largest_parameter(replicas, room):
    """Of 6 buffers' size: two ranks exchange it whole, in a ring of three there are two thirds of it."""
    profile = model(replace(layer(parameters=9 * FUSION_BYTES), largest_bytes=6 * FUSION_BYTES))
    alone, replicated = (peak_memory_bytes(profile, plan([m], m))[0] for m in (1, replicas))
    assert replicated - alone == FUSION_BYTES + room


def test_what_a_pass_needs_for_a_moment_counts_less_what_later_layers_have_freed():
    """Each of two layers keeps 5: the first has 9 more in its backward, when the last one's 5 are free."""
    layers = [replace(layer(activation=5), workspace_bytes=needed) for needed in (9, 1)]
    made = Plan((StageSpec(0, 2),), "gpipe", 3)
    assert peak_memory_bytes(model(*layers), made) == (3 * 10 + 9 - 5,)
    assert peak_memory_bytes(model(*layers[::-1]), made) == (3 * 10 + 9,)


def test_a_gradient_is_there_twice_while_it_is_added_to_those_of_earlier_microbatches():
    measured = replace(layer(parameters=100), workspace_bytes=7, largest_bytes=60)
    once, often = (peak_memory_bytes(model(measured), plan([1], count))[0] for count in (1, 2))
    assert (once, often) == (2 * 100 + 7, 2 * 100 + 7 + 60)
    # one product of both microbatches needs no gradients of each, but their rows in one piece
    batched = replace(measured, joined=JoinedProducts(1.0, 1.0, 1.0, microbatches=4, kept_bytes=5))
    assert peak_memory_bytes(model(batched), plan([1], 2)) == (2 * 100 + 2 * 5 + 7 + 2 * 5,)


def test_frozen_weights_are_there_once_under_any_schedule():
    """They were not counted: a plan that could not hold a frozen base was said to fit."""
    frozen = replace(layer(parameters=100), frozen_bytes=7_000)
    for schedule, versions in (("1f1b", 1), ("pipedream", 1), ("pipedream-2bw", 2)):
        count = 1 if schedule == "pipedream" else 2
        peak = peak_memory_bytes(model(frozen), plan([1], count, schedule))
        assert peak == ((1 + versions) * 100 + 7_000,), schedule


def test_recomputation_keeps_the_input_only():
    """Stage 1 receives 7; what it has inside, 5 + 1, is there for the one that is computed, of two.

    Messages: of 7 and 1 a gradient each and one that is sent; two of 7 received ahead.
    """
    profile = model(layer(activation=3, output=7), layer(activation=5, output=1), layer())
    kept, recomputed = (peak_memory_bytes(profile, plan([1, 1, 1], 4, recompute=r))[1] for r in (False, True))
    messages = 2 * (7 + 1) + 2 * 7
    assert (kept, recomputed) == (2 * (7 + 5 + 1) + messages, 2 * 7 + (5 + 1) + messages)


def test_pipedream_keeps_a_version_for_each_minibatch_in_flight():
    profile = model(layer(parameters=100, activation=1), layer(parameters=10, activation=1))
    assert peak_memory_bytes(profile, plan([1, 1], 1, "pipedream")) == (
        2 * 100 + 100 + 2 * 1,
        2 * 10 + 1 * 1,
    )


def test_recomputation_may_be_of_one_stage_only():
    profile = model(layer(activation=5, output=1), layer(activation=5, output=1))
    stages = (StageSpec(0, 1), StageSpec(1, 2, recompute=True))
    assert peak_memory_bytes(profile, Plan(stages, "gpipe", 4)) == (4 * 6 + 4, 4 * 1 + 6 + 4)


def test_a_limit_in_flight_saves_weights_and_activations():
    profile = model(*[layer(parameters=100, activation=1)] * 3)
    full, limited = (plan([1, 1, 1], 1, "pipedream", max_in_flight=most) for most in (None, 2))
    assert peak_memory_bytes(profile, full) == (4 * 100 + 3, 3 * 100 + 2, 2 * 100 + 1)
    assert peak_memory_bytes(profile, limited) == (3 * 100 + 2, 3 * 100 + 2, 2 * 100 + 1)


def test_2bw_has_two_versions_and_at_most_two_minibatches():
    profile = model(*[layer(parameters=100, activation=1)] * 4)
    assert peak_memory_bytes(profile, plan([1] * 4, 8, "pipedream-2bw")) == (304, 303, 302, 301)
    assert peak_memory_bytes(profile, plan([1] * 4, 1, "pipedream-2bw")) == (302, 302, 302, 301)


def test_zero_bubble_keeps_activations_until_the_weights_half():
    profile = model(*[layer(activation=5, output=1)] * 3)
    assert peak_memory_bytes(profile, plan([1] * 3, 8, "zero-bubble")) == (3 * 6 + 4, 3 * 7 + 6, 3 * 7 + 4)
    # What is computed again stays until then, too: by the last stage, of three microbatches
    recomputed = plan([1] * 3, 8, "zero-bubble", recompute=True)
    assert peak_memory_bytes(profile, recomputed) == (6 + 4, 3 * 1 + 2 * 6 + 6, 3 * 1 + 3 * 6 + 4)


def test_zero_bubble_keeps_between_the_halves_what_the_profile_says():
    layers = [replace(layer(activation=5, output=1), split_bytes=2)] * 3
    assert peak_memory_bytes(model(*layers), plan([1] * 3, 8, "zero-bubble")) == (
        3 * 6 + 4,
        2 * 7 + 1 * 2 + 6,
        1 * 7 + 2 * 2 + 4,
    )


def test_more_in_flight_and_a_longer_lag_take_memory_where_they_are():
    """Of 3 stages with 5, 3 and 1 in flight, the last is 6 microbatches late, the second 3."""
    profile = model(*[replace(layer(activation=5, output=1), split_bytes=2)] * 3)
    made = plan([1] * 3, 8, "zero-bubble", in_flight=5, weight_lag=6)
    assert peak_memory_bytes(profile, made) == (5 * 6 + 4, 3 * 7 + 3 * 2 + 6, 1 * 7 + 6 * 2 + 4)
    # In a minibatch of 4, three are between the halves when the last one is in flight
    short = replace(made, num_microbatches=4)
    assert peak_memory_bytes(profile, short) == (4 * 6 + 4, 3 * 7 + 1 * 2 + 6, 1 * 7 + 3 * 2 + 4)


def test_halves_may_keep_more_than_the_whole():
    """The gradients of outputs come on top. At the end of the last inputs' half all four are between."""
    profile = model(*[replace(layer(activation=5), split_bytes=50)] * 2)
    made = plan([1] * 2, 4, "zero-bubble", weight_lag=4)
    assert peak_memory_bytes(profile, made) == (5 + 50, 4 * 50)


def test_a_rank_that_holds_several_stages_holds_what_they_hold():
    """Two ranks, four stages: rank 0 has F0 F1 F0.1 F1.1 before the first backward, rank 1 one less."""
    profile = model(*[layer(parameters=10 * 10**i, activation=10**i) for i in range(4)])
    made = plan([1, 1], 2, "interleaved-1f1b", chunks=2)
    assert peak_memory_bytes(profile, made) == (
        2 * (10 + 1000) + 2 * 1 + 2 * 100,
        2 * (100 + 10000) + 2 * 10 + 1000,
    )


def test_ranks_that_hold_several_stages_have_one_fusion_buffer():
    profile = model(*[layer(parameters=FUSION_BYTES)] * 4)
    made = plan([2, 2], 2, "interleaved-1f1b", chunks=2)
    assert peak_memory_bytes(profile, made) == (4 * FUSION_BYTES + 2 * FUSION_BYTES,) * 4


# Versions


@pytest.mark.parametrize(
    "replicas, expected",
    [
        ((1, 1, 1, 1), (4, 4, 4, 4)),  # without vertical sync 4, 3, 2, 1
        ((2, 2, 2), (3, 3, 3)),
        ((2, 1), (2, 3)),  # only every other version is used
        ((1, 2), (3, 2)),
    ],
)
def test_versions_under_vertical_sync(replicas, expected):
    assert versions_per_stage(plan(replicas, 1, "pipedream", vertical_sync=True)) == expected


def held_versions(made, count):
    """By definition: all that some minibatch not yet done asks for, and the newest; each stage's most."""
    most = [1] * made.num_stages
    for rank, program in programs(made, count).items():
        stage = made.place(rank).stage
        to_come = [i.microbatch for i in program if isinstance(i, Forward)]
        newest = 0
        for instruction in program:
            if isinstance(instruction, Backward):
                to_come.remove(instruction.microbatch)
            newest += isinstance(instruction, Step)
            asked = {version_of(made, stage, m) for m in to_come}
            most[stage] = max(most[stage], len({newest, *(v for v in asked if v <= newest)}))
    return tuple(most)


@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1), (1, 2), (3, 2), (2, 3, 1), (1, 3, 2), (4, 1, 1)])
@pytest.mark.parametrize("options", [{}, {"vertical_sync": True}, {"max_in_flight": 2}])
def test_versions_are_as_many_as_are_asked_for(replicas, options):
    made = plan(replicas, 1, "pipedream", **options)
    assert versions_per_stage(made) == held_versions(made, 80)


@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1), (3, 2), (1, 3, 2)])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_2bw_holds_two_versions(replicas, size):
    made = plan(replicas, size, "pipedream-2bw")
    assert versions_per_stage(made) == held_versions(made, 8 * size)


def held_predicted(made, count):
    """By definition: the newest, and those of an update whose forwards have begun; each stage's most.

    Under 2BW they are made before the update of the minibatch before theirs.
    """
    most = [1] * made.num_stages
    for rank, program in programs(made, count).items():
        stage, lag = made.place(rank).stage, delay_of(made, made.place(rank).stage)
        number, to_come = weights_numbers(made, stage), Counter()
        forwards = [number(i.microbatch) for i in program if isinstance(i, Forward)]
        done, newest, begun = 0, 0, set()
        for instruction in program:
            match instruction:
                case Forward(m):
                    done += 1
                    to_come[number(m)] += 1
                    begun |= {number(m)} if lag else set()
                case Backward(m):
                    to_come[number(m)] -= 1
                    begun -= set() if to_come[number(m)] or number(m) in forwards[done:] else {number(m)}
                case Step():
                    begun |= {n for n in forwards[done : done + 1] if lag and n - lag <= newest}
                    newest += 1
            most[stage] = max(most[stage], 1 + len(begun))
    return tuple(most)


@pytest.mark.parametrize("replicas", [(1,), (1, 1, 1), (2, 1), (1, 2), (3, 2), (2, 3, 1), (1, 3, 2)])
@pytest.mark.parametrize("schedule, size", [("pipedream", 1), ("pipedream-2bw", 3), ("pipedream-2bw", 8)])
@pytest.mark.parametrize("limit", [None, 1, 2])
def test_predicted_weights_are_held_besides_the_newest(replicas, schedule, size, limit):
    made = plan(replicas, size, schedule, prediction="spectrain", max_in_flight=limit)
    assert versions_per_stage(made) == held_predicted(made, 40 * size)


def test_a_plan_with_predictions_takes_as_many_weights_more():
    """By the first of three stages: four instead of three of 100 bytes; by the last: one, as without."""
    profile = model(*[layer(parameters=100)] * 3)
    off, on = (
        peak_memory_bytes(profile, plan([1, 1, 1], 1, "pipedream", prediction=prediction))
        for prediction in ("off", "xpipe")
    )
    assert [a - b for a, b in zip(on, off)] == [100, 100, 0]


@pytest.mark.parametrize("replicas", [(3, 2), (2, 3, 1), (1, 3, 2), (4, 1, 1)])
def test_long_rounds_count_no_fewer_versions(monkeypatch, replicas):
    made = plan(replicas, 1, "pipedream", vertical_sync=True)
    walked = versions_per_stage(made)
    monkeypatch.setattr("hybridpipe.planning.cost.memory.MAX_ROUND", 0)
    assert all(few <= many for few, many in zip(walked, versions_per_stage(made), strict=True))


# Over time


def test_a_curve_by_hand():
    """F 0-1, F 1-2, then B 5-7, F 7-8, ...: two in flight at most, and the same between; messages, 16."""
    profile = model(layer(1, 2, parameters=50, activation=6, output=4), layer(1, 2))
    timeline, _ = predict(plan([1, 1], 3), profile, free(2))
    seen = curves(profile, plan([1, 1], 3), timeline)[0]
    assert [bytes_ for _, bytes_ in seen] == [116, 126, 136, 126, 136, 126, 116]
    assert [at for at, _ in seen] == approx([0, 0, 1, 6, 6, 9, 12])


def test_a_curve_with_versions():
    """Two in flight: an update makes a version, as the second still uses the old; the last stage has one."""
    profile = model(layer(1, 2, parameters=50, update=1), layer(1, 2, parameters=10, update=1))
    made = plan([1, 1], 1, "pipedream")
    timeline, _ = predict(made, profile, free(2))
    seen = curves(profile, made, timeline)
    assert [bytes_ for _, bytes_ in seen[0]][:7] == [100, 100, 100, 100, 150, 150, 100]
    assert {bytes_ for _, bytes_ in seen[1]} == {20}


@pytest.mark.parametrize("schedule, size", [("pipedream", 1), ("pipedream-2bw", 4)])
def test_curves_with_predictions_reach_the_peak(schedule, size):
    profile = model(*[layer(1, 2, parameters=50)] * 3)
    made = plan([1, 1, 1], size, schedule, prediction="spectrain")
    timeline, prediction = predict(made, profile, free(3))
    seen = curves(profile, made, timeline)
    most = [max(bytes_ for _, bytes_ in curve) for curve in seen.values()]
    assert most == list(prediction.peak_memory_bytes)


LAYER = st.builds(
    lambda forward, parameters, output, activation: layer(forward, 2, parameters, output, activation, 0.5),
    st.integers(0, 3),
    st.integers(0, 1000),
    st.integers(0, 100),
    st.integers(0, 100),
)
CASES = st.tuples(
    st.lists(st.tuples(LAYER, st.integers(1, 4), st.booleans()), min_size=1, max_size=4), st.integers(1, 12)
)


def made(case, schedule, **options):
    stages, count = case
    if TRAITS[schedule].interleaves:
        stages = [(each, stages[0][1], recompute) for each, _, recompute in stages] * 2
        stages, options = (stages * 2 if len(stages) == 2 else stages), {"chunks": 2}
    specs = tuple(StageSpec(i, i + 1, m, recompute=recompute) for i, (_, m, recompute) in enumerate(stages))
    chosen = Plan(specs, schedule, 1 if schedule == "pipedream" else count, **options)
    profile = model(*(each for each, _, _ in stages), state_factor=1)
    return chosen, profile, Cluster.flat(chosen.num_ranks, 50.0, 0.25)


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@given(CASES)
@settings(deadline=None, derandomize=True, max_examples=50)
def test_the_most_over_time_is_the_peak(schedule, case):
    check_most_over_time(*made(case, schedule))


@given(
    CASES,
    st.lists(st.none() | st.integers(0, 300), min_size=4, max_size=4),
    st.none() | st.integers(1, 12),
    st.none() | st.integers(0, 12),
)
@settings(deadline=None, derandomize=True, max_examples=150)
def test_the_most_over_time_is_the_peak_with_any_lag(case, split_bytes, in_flight, weight_lag):
    numbers = {"in_flight": in_flight, "weight_lag": weight_lag}
    chosen, profile, cluster = made(case, "zero-bubble", **numbers)
    kept = zip(profile.layers, split_bytes, strict=False)
    layers = tuple(replace(each, split_bytes=num_bytes) for each, num_bytes in kept)
    check_most_over_time(chosen, replace(profile, layers=layers), cluster)


def check_most_over_time(chosen, profile, cluster):
    """The peak is reached on some replica of each stage; others may have fewer microbatches."""
    timeline, prediction = predict(chosen, profile, cluster)
    seen = curves(profile, chosen, timeline)
    most = {rank: max(bytes_ for _, bytes_ in curve) for rank, curve in seen.items()}
    peaks = dict(zip(chosen.ranks, prediction.peak_memory_bytes))
    assert all(held <= peaks[rank] for rank, held in most.items())
    for stage in chosen.stages:
        assert max(most[rank] for rank in stage.ranks) == peaks[stage.ranks[0]]
    for curve in seen.values():
        assert curve[0] == (0.0, curve[-1][1])  # all that was added is gone
        assert all(before[0] <= after[0] for before, after in itertools.pairwise(curve))


@pytest.mark.parametrize(
    "schedule, options",
    [
        ("pipedream", {}),
        ("pipedream", {"vertical_sync": True}),
        ("pipedream", {"max_in_flight": 2}),
        ("pipedream-2bw", {}),
        ("pipedream-2bw", {"max_in_flight": 2}),
        ("pipedream", {"prediction": "spectrain"}),
        ("pipedream-2bw", {"prediction": "xpipe"}),
    ],
)
@given(CASES)
@settings(deadline=None, derandomize=True, max_examples=50)
def test_without_a_flush_no_rank_holds_more_than_the_peak(schedule, options, case):
    chosen, profile, cluster = made(case, schedule, **options)
    timeline, prediction = predict(chosen, profile, cluster)
    seen = curves(profile, chosen, timeline)
    for held, peak in zip(seen.values(), prediction.peak_memory_bytes):
        assert max(bytes_ for _, bytes_ in held) <= peak


def keeping_rows(profile):
    joined = JoinedProducts(0.0, 0.0, 0.0, microbatches=3, kept_bytes=7)
    return replace(profile, layers=tuple(replace(each, joined=joined) for each in profile.layers))


@pytest.mark.parametrize("num_microbatches, kept", [(2, 2), (4, 3)])
def test_rows_kept_for_products_weigh_until_these_are_made(num_microbatches, kept):
    profile = model(*[layer(1, 1, parameters=10)] * 2)
    plan = Plan((StageSpec(0, 2),), num_microbatches=num_microbatches)
    (with_rows,), (without,) = (peak_memory_bytes(each, plan) for each in (keeping_rows(profile), profile))
    assert with_rows == without + 2 * 7 * kept


@pytest.mark.parametrize("schedule", ["zero-bubble", "pipedream", "pipedream-2bw"])
def test_a_schedule_that_joins_no_products_keeps_no_rows(schedule):
    profile = model(*[layer(1, 1, parameters=10)] * 2)
    plan = Plan((StageSpec(0, 2),), schedule, num_microbatches=1 if schedule == "pipedream" else 4)
    assert peak_memory_bytes(keeping_rows(profile), plan) == peak_memory_bytes(profile, plan)


def test_copies_of_weights_are_on_every_replica():
    """Of 100 bytes of weights there are copies of 50; a state of 200 may be sharded."""
    lean = model(layer(1, 2, parameters=100), state_factor=2.0)
    copying = replace(lean, copied_factor=0.5)
    for zero in (0, 1, 2):
        made = plan([2], 2, zero=zero)
        bare, more = (peak_memory_bytes(each, made)[0] for each in (lean, copying))
        assert more - bare == 50
