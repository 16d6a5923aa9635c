import json
from dataclasses import astuple, replace

import pytest
from pytest import approx

from hybridpipe.planning import timeline as timelines
from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.schedules.instructions import Forward, Load
from hybridpipe.planning.schedules.registry import SCHEDULES, TRAITS
from hybridpipe.planning.simulator.predict import predict
from hybridpipe.planning.timeline import TimedEvent, Timeline, from_chrome_trace, kind
from tests.planning.helpers import layer, model, parse, plan


def timeline(**ranks: str) -> Timeline:
    """`r0="F0:0-1 B0:2-4"`: the events of rank 0."""
    events = {}
    for rank, line in ranks.items():
        words = [word.split(":") for word in line.split()]
        spans = [tuple(map(float, span.split("-"))) for _, span in words]
        program = parse(" ".join(name for name, _ in words))
        events[int(rank[1:])] = tuple(TimedEvent(i, *span) for i, span in zip(program, spans))
    return Timeline(events)


def test_figures():
    """Waiting, for messages or for the all-reduce, is not busy."""
    seen = timeline(r0="F0:0-1 sa0:1-2 rg0:2-5 B0:5-7 all-reduce:7-9 step:9-10", r1="ra0:0-2 F0:2-3 B0:3-5")
    assert seen.seconds == 10
    assert (seen.busy_seconds(0), seen.busy_seconds(1)) == (4, 3)
    assert seen.bubble_fraction == approx(1 - 7 / 20)
    assert timeline(r0="F0:0-1 I0:1-3 W0.1:4-5").busy_seconds(0) == 4


def test_busy_within_a_window():
    seen = timeline(r0="F0:0-1 sa0:1-2 rg0:2-5 B0:5-7 step:9-10")
    assert [seen.busy_seconds(0, *window) for window in ((0.5, 6), (1, 5), (6, 9.5))] == [1.5, 0, 1.5]


def test_the_typical_minibatch_is_found_in_one_look_at_each(monkeypatch):
    """Each rank's events were shifted by a look at all ranks': a minute at the end of a training on 256."""
    looks, begin = [], timelines._begin
    monkeypatch.setattr(timelines, "_begin", lambda events: looks.append(1) or begin(events))
    made = [timeline(r0=f"F0:1-{2 + n}", r1=f"ra0:0-{2 + n} F0:{2 + n}-{3 + n}").events for n in (5, 1, 3)]
    assert timelines.typical(made) == timeline(r0="F0:0-4", r1="ra0:0-4 F0:4-5") and len(looks) == 3


def test_parts_by_hand():
    """Rank 0 sends at 1; rank 1 waits from 0: idle till then, traffic till it arrives; and so back."""
    seen = timeline(
        r0="F0:0-1 sa0:1-2 rg0:2-9 B0:9-11 all-reduce:11-11 step:11-12",
        r1="ra0:0-3 F0:3-5 B0:5-8 sg0:8-8.5 all-reduce:8.5-8.5 step:8.5-9",
    )
    parts = seen.parts(plan([1, 1], 1))
    assert parts.forward_seconds == approx((1 + 2) / 2)
    assert parts.backward_seconds == approx((2 + 3) / 2)
    assert parts.step_seconds == approx((1 + 0.5) / 2)
    assert parts.traffic_seconds == approx((1 + (9 - 8) + (3 - 1) + 0.5) / 2)
    assert parts.allreduce_seconds == 0
    assert parts.idle_seconds == approx(((8 - 2) + 1 + (12 - 9)) / 2)
    assert parts.seconds == approx(seen.seconds) == approx(12)


def test_what_rounding_leaves_is_not_idle():
    """A summary told of -9e-19 s; here 0.1 + (0.3 - 0.1) + (0.9 - 0.3) is more than 0.9."""
    assert timeline(r0="F0:0-.1 B0:.1-.3 step:.3-.9").parts(plan([1], 1)).idle_seconds == 0


def test_parts_of_an_all_reduce_begin_with_its_last_replica():
    """In each round; a gap between two events is idle."""
    seen = timeline(
        r0="B0:0-2 all-reduce:2-5 B2:5-6 all-reduce:6-10", r1="B1:0-4 all-reduce:4-5 B3:6-7 all-reduce:8-10"
    )
    parts = seen.parts(plan([2], 4))
    assert parts.allreduce_seconds == approx((1 + 2 + 1 + 2) / 2)
    assert parts.idle_seconds == approx((2 + 2 + 1 + 1) / 2)


def test_parts_of_a_message_that_was_there_already_are_its_handling():
    seen = timeline(r0="F0:0-1 sa0:1-2", r1="F9:0-5 ra0:5-5.5 F0:5.5-6")
    assert seen.parts(plan([1, 1], 1)).traffic_seconds == approx((1 + 0.5) / 2)


def test_parts_of_halves_and_of_several_stages_on_a_rank():
    """Stages 0 and 2 on rank 0, 1 and 3 on rank 1: a receive is matched with the send of its own stage."""
    seen = timeline(
        r0="F0:0-1 sa0:1-1 ra0.1:1-4 F0.1:4-5 sa0.1:5-5 rg0.1:5-9 I0.1:9-10 sg0.1:10-10 W0.1:10-12",
        r1="ra0:0-2 F0:2-3 sa0:3-3 ra0.1:3-7 F0.1:7-8 B0.1:8-9 sg0.1:9-9 rg0:9-11",
    )
    parts = seen.parts(plan([1, 1], 1, "interleaved-1f1b", chunks=2))
    assert parts.forward_seconds == approx((2 + 2) / 2)
    assert parts.backward_seconds == approx((3 + 1) / 2)
    assert parts.traffic_seconds == approx(((4 - 3) + (9 - 9) + (2 - 1) + (7 - 5) + (11 - 10)) / 2)
    assert parts.seconds == approx(12)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("replicas", [(1,), (4,), (1, 1, 1), (3, 2, 1), (1, 4, 2)])
def test_parts_add_up_to_the_timeline(schedule, replicas):
    chunks = 1
    if TRAITS[schedule].interleaves:
        replicas, chunks = replicas[:1] * max(2, len(replicas)), 2
    profile = model(*[layer(1, 2, parameters=30, output=9, update=0.5)] * len(replicas) * chunks)
    made = plan(replicas, 1 if schedule == "pipedream" else 7, schedule, chunks=chunks)
    seen, _ = predict(made, profile, replace(Cluster.flat(12, 10.0, 0.25), message_seconds=0.125))
    parts = seen.parts(made)
    assert parts.seconds == approx(seen.seconds)
    assert min(astuple(parts)) >= -1e-9
    busy = sum(map(seen.busy_seconds, seen.events)) / len(seen.events)
    assert parts.compute_seconds == approx(busy)
    assert (parts.allreduce_seconds > 0) == (max(replicas) > 1)
    assert (parts.traffic_seconds > 0) == (len(replicas) > 1)


@pytest.mark.parametrize("empty", [Timeline({}), Timeline({0: ()}), timeline(r0="F0:0-0")])
def test_nothing_has_no_bubble(empty):
    assert (empty.seconds, empty.bubble_fraction) == (0, 0)


def test_kind():
    program = parse("F0 B0 I0 W0 ra0 sa0 rg0 sg0 all-reduce step")
    backwards = ["backward", "backward-input", "backward-weight"]
    expected = ["forward", *backwards, *["message"] * 4, "all-reduce", "step"]
    assert [kind(instruction) for instruction in program] == expected


def test_chrome_trace():
    """What Perfetto needs: complete events in microseconds, names for the process and its threads."""
    seen = timeline(r0="F0:0-1 step:1-1.5", r3="ra0:0-2")
    trace = json.loads(json.dumps(seen.to_chrome_trace("measured", process=7)))
    assert [event for event in trace if event["ph"] == "X"] == [
        {"ph": "X", "name": "F0", "cat": "forward", "pid": 7, "tid": 0, "ts": 0, "dur": 1e6},
        {"ph": "X", "name": "step", "cat": "step", "pid": 7, "tid": 0, "ts": 1e6, "dur": 5e5},
        {"ph": "X", "name": "ra0", "cat": "message", "pid": 7, "tid": 3, "ts": 0, "dur": 2e6},
    ]
    names = [(e["name"], e["pid"], e["tid"], e["args"]["name"]) for e in trace if e["ph"] == "M"]
    assert names == [
        ("process_name", 7, 0, "measured"),
        ("thread_name", 7, 0, "rank 0"),
        ("thread_name", 7, 3, "rank 3"),
    ]


def test_timelines_are_read_back_from_a_chrome_trace():
    predicted, _ = predict(plan([2, 1], 4), model(layer(), layer()), Cluster.flat(3, 1e9, 1e-3))
    measured = timeline(r0="load0:0-1 F0:1-2 products:2-3", r3="")
    trace = predicted.to_chrome_trace("predicted", 1) + measured.to_chrome_trace("measured")
    read = from_chrome_trace(json.loads(json.dumps(trace)))
    for name, expected in (("predicted", predicted), ("measured", measured)):
        assert read[name].events.keys() == expected.events.keys()
        for rank, events in expected.events.items():
            assert [event.instruction for event in read[name].events[rank]] == [e.instruction for e in events]
            assert [event[1:] for event in read[name].events[rank]] == [approx(event[1:]) for event in events]


def test_where_a_ranks_time_goes():
    """A receive is matched with the send of its own minibatch, though others carry the same number."""
    seen = timeline(
        r0="F0:0-1 sa0:1-2 all-reduce:2-3 step:3-4 F0:4-8 sa0:8-9 step:9-10",
        r1="ra0:0-3 F0:3-4 B0:4-6 step:6-7 ra0:7-10 F0:10-11 B0:11-12",
    )
    first, second = seen.spent(plan([1, 1], 1)).values()
    assert (first.forward_seconds, first.copying_seconds, first.optimizer_seconds) == (5, 2, 2)
    assert (first.allreduce_seconds, first.message_seconds, first.idle_seconds) == (1, 0, 0)
    assert (second.message_seconds, second.idle_seconds) == ((3 - 1) + (10 - 8), 1 + (8 - 7))
    assert (second.forward_seconds, second.backward_seconds, second.optimizer_seconds) == (2, 3, 1)
    assert (first.seconds, second.seconds) == (10, 12)


def test_loading_is_no_computing():
    loaded = TimedEvent(Load(0), 0.0, 3.0)
    seen = Timeline({0: (loaded, TimedEvent(Forward(0), 3.0, 4.0))})
    assert seen.spent(plan([1], 1))[0].loading_seconds == 3
    assert seen.busy_seconds(0) == 1
    assert seen.parts(plan([1], 1)).idle_seconds == 3


def test_a_join_is_computing_in_a_pass_of_others():
    seen = timeline(r0="F0:0-1 jf2:1-3 B0:3-4 jb2:4-8")
    spent = seen.spent(plan([1], 1))[0]
    assert (spent.forward_seconds, spent.backward_seconds) == (3, 5)


def test_computing_is_forwards_backwards_and_updates():
    seen = timeline(r0="F0:0-1 B0:1-3 step:3-7 sa0:7-20")
    assert seen.spent(plan([1], 1))[0].compute_seconds == 7
    assert seen.parts(plan([1], 1)).compute_seconds == 7


def test_where_nothing_happened_no_time_goes_anywhere():
    assert sum(astuple(Timeline({}).parts(plan([1, 1], 1)))) == 0
    assert Timeline({}).bubble_fraction == Timeline({0: ()}).seconds == 0
