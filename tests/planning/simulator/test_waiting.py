"""Ranks that wait for their messages: sends and receives take the time that the messages take."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.cost.estimate import estimate
from hybridpipe.planning.cost.formula import StageCost
from hybridpipe.planning.profile import SharedParameter
from hybridpipe.planning.schedules.generators import programs
from hybridpipe.planning.schedules.instructions import (
    Forward,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)
from hybridpipe.planning.schedules.registry import SCHEDULES, TRAITS
from hybridpipe.planning.simulator.predict import predict, simulate
from tests.planning.helpers import forward_programs, layer, model, plan, times

LINK = Cluster.flat(2, bandwidth=10.0, latency_seconds=0.5)  # 1.5 s for a message of 10 bytes
WAITING = replace(LINK, waits_for_messages=True)
COSTS = [StageCost(1.0, 2.0, output_bytes=10, gradient_bytes=10)] * 2


def test_a_pipeline_by_hand():
    """Rank 1 asks for the second activation at 7 s, two seconds after it has come, and spends 1.5 s in it."""
    made = plan([1, 1], 2)
    timeline = simulate(programs(made), made, COSTS, WAITING)
    assert times(timeline, 0, Forward) == [(0, 1), (2.5, 3.5)]
    assert times(timeline, 0, SendActivation) == [(1, 2.5), (3.5, 5)]
    assert times(timeline, 0, ReceiveGradient) == [(5, 7), (9, 13)]
    assert times(timeline, 1, ReceiveActivation) == [(0, 2.5), (7, 8.5)]
    assert times(timeline, 1, SendGradient) == [(5.5, 7), (11.5, 13)]
    assert timeline.seconds == pytest.approx(15)
    assert simulate(programs(made), made, COSTS, LINK).seconds == pytest.approx(12)


def test_a_message_that_others_slow_down_is_received_when_it_has_come():
    """Two messages share a link of 10 bytes a second; alone the second ones would be there at 5.5 s."""
    levels = Level("node", 2, 1e9, 0.0), Level("network", 4, 10.0, 0.0, shared_bandwidth=10.0)
    cluster = Cluster(levels, waits_for_messages=True)
    made = plan([2, 2], 4)
    costs = [replace(COSTS[0], forward_seconds=1.0), replace(COSTS[1], forward_seconds=1.5)]
    timeline = simulate(forward_programs(made, 4), made, costs, cluster)
    for sender, receiver in ((0, 2), (1, 3)):
        assert times(timeline, sender, SendActivation) == [(1, 3), (4, 6)]
        assert times(timeline, receiver, ReceiveActivation) == [(0, 3), (4.5, 6)]


def test_handling_comes_before_a_send_and_after_a_receive():
    made = plan([1, 1], 1)
    cluster = replace(WAITING, message_seconds=0.25)
    timeline = simulate(programs(made), made, COSTS, cluster)
    assert times(timeline, 0, SendActivation) == [(1, 2.75)]
    assert times(timeline, 1, ReceiveActivation) == [(0, 3)]


def test_gradients_of_shared_parameters_are_waited_for_too():
    shared = (SharedParameter("embedding", (0, 1), 100),)
    profile = replace(model(*[layer(parameters=100)] * 2), shared=shared)
    made = plan([1, 1], 2)
    overlapping, waiting = (predict(made, profile, each)[1].minibatch_seconds for each in (LINK, WAITING))
    assert waiting > overlapping


@given(
    st.sampled_from([each for each in SCHEDULES if not TRAITS[each].interleaves]),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(1, 8),
    st.integers(0, 30),
)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_no_plan_waits_for_ever_and_ranks_spend_their_messages_time(schedule, replicas, count, output):
    made = plan(replicas, 1 if schedule == "pipedream" else count, schedule)
    profile = model(*[layer(1, 2, 1, output)] * len(replicas))
    cluster = replace(Cluster.flat(made.num_ranks, 10.0, 0.5), waits_for_messages=True)
    timeline, _ = predict(made, profile, cluster)
    messages = SendActivation | SendGradient | ReceiveActivation | ReceiveGradient
    events = [event for each in timeline.events.values() for event in each[:-1]]
    assert all(
        event.seconds >= 0.5 + output / 10 - 1e-9
        for event in events
        if isinstance(event.instruction, messages)
    )


def test_the_closed_formula_counts_the_messages_of_the_busiest_stage():
    """A microbatch takes 3 s in the middle stage, and four messages of 1.5 s."""
    profile = model(*[layer(output=10)] * 3)
    cluster = replace(Cluster.flat(3, 10.0, 0.5), waits_for_messages=True)
    few, many = (estimate(plan([1] * 3, count), profile, cluster) for count in (10, 20))
    assert many - few == pytest.approx(10 * 9)
    few, many = (predict(plan([1] * 3, count), profile, cluster)[1].minibatch_seconds for count in (10, 20))
    assert many - few == pytest.approx(10 * 9)
