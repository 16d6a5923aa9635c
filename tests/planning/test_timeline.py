import json

import pytest
from pytest import approx

from hybridpipe.planning.instructions import parse
from hybridpipe.planning.timeline import Event, Timeline, kind


def timeline(**ranks: str) -> Timeline:
    """`r0="F0:0-1 B0:2-4"`: the events of rank 0."""
    events = {}
    for rank, line in ranks.items():
        words = [word.split(":") for word in line.split()]
        spans = [tuple(map(float, span.split("-"))) for _, span in words]
        program = parse(" ".join(name for name, _ in words))
        events[int(rank[1:])] = tuple(Event(i, *span) for i, span in zip(program, spans))
    return Timeline(events)


def test_figures():
    """Waiting, for messages or for the all-reduce, is not busy."""
    seen = timeline(r0="F0:0-1 sa0:1-2 rg0:2-5 B0:5-7 all-reduce:7-9 step:9-10", r1="ra0:0-2 F0:2-3 B0:3-5")
    assert seen.seconds == 10
    assert (seen.busy_seconds(0), seen.busy_seconds(1)) == (4, 3)
    assert seen.bubble_fraction == approx(1 - 7 / 20)


@pytest.mark.parametrize("empty", [Timeline({}), Timeline({0: ()}), timeline(r0="F0:0-0")])
def test_nothing_has_no_bubble(empty):
    assert (empty.seconds, empty.bubble_fraction) == (0, 0)


def test_kind():
    program = parse("F0 B0 ra0 sa0 rg0 sg0 all-reduce step")
    expected = ["forward", "backward", *["message"] * 4, "all-reduce", "step"]
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
