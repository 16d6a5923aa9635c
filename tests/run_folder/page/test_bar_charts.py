import re

from pytest import approx

from hybridpipe.planning.draw import COLOURS, MAX_RANKS
from hybridpipe.planning.schedules.instructions import Step
from hybridpipe.planning.simulator.predict import predict
from hybridpipe.planning.timeline import Timeline, shifted
from hybridpipe.run_folder.page.bar_charts import MOST_MARKS, STREAM, stack, timelines
from tests.planning.helpers import free, layer, model, plan

PLAN = plan([2, 1], 4)
TIMELINE, _ = predict(PLAN, model(layer(2e-3, 4e-3, update=2e-3), layer(1e-3, 2e-3)), free(3))


def slowed(timeline: Timeline, factor: float) -> Timeline:
    return Timeline(
        {
            rank: tuple(e._replace(start_seconds=factor * e[1], end_seconds=factor * e[2]) for e in events)
            for rank, events in timeline.events.items()
        }
    )


def ends(row) -> float:
    """Where the last bar of a row ends, in units."""
    bars = [re.findall(r"M([\d.]+) 0h([\d.]+)", data) for data in row.paths.values()]
    return max(float(x) + float(length) for of_colour in bars for x, length in of_colour)


def test_predicted_and_measured_have_one_scale():
    predicted, measured = timelines({"predicted": TIMELINE, "measured": slowed(TIMELINE, 1.25)}, PLAN)
    assert predicted.across == measured.across
    assert [row.label for row in predicted.rows] == ["rank 0", "rank 1", "rank 2"]
    assert predicted.rows[0].detail == "stage 0 · replica 0" and predicted.rows[2].detail == "stage 1"
    assert max(map(ends, measured.rows)) == approx(1000, abs=1)
    assert max(map(ends, predicted.rows)) == approx(800, abs=1)
    assert predicted.note == "20 ms from first to last instruction"
    assert measured.note == "25 ms from first to last instruction"
    assert [row.value for row in predicted.rows] == [row.value for row in measured.rows]
    assert predicted.rows[0].value == f"{TIMELINE.busy_seconds(0) / TIMELINE.seconds:.0%} computing"


def traced(*factors: float) -> Timeline:
    """Minibatches behind each other, each so many times as long as the predicted one."""
    events, begin = dict.fromkeys(TIMELINE.events, ()), 0.0
    for factor in factors:
        one = slowed(TIMELINE, factor)
        for rank, of_rank in one.events.items():
            events[rank] += tuple(shifted(of_rank, -begin))
        begin += one.seconds
    return Timeline(events)


def test_of_several_minibatches_the_median_one_is_shown_whole():
    """A traced run holds up to 64: they were cut at the predicted length, in the middle of the first."""
    one, many = timelines({"predicted": TIMELINE, "measured": traced(9.0, 1.5, 1.0)}, PLAN)
    assert one.across == many.across
    assert many.note == "30 ms from first to last instruction, the median one of 3"
    assert max(map(ends, many.rows)) == approx(1000, abs=1)
    assert [number.text for number in many.rows[2].numbers] == ["0", "0", "1", "1", "2", "2", "3", "3"]


def test_of_a_stream_the_first_updates_are_shown_whole():
    """Its minibatches overlap, so that none stands alone."""
    stream = plan([1, 1], 1, "pipedream")
    timeline, _ = predict(stream, model(layer(2e-3, 4e-3), layer(2e-3, 4e-3)), free(2))
    total = sum(isinstance(event.instruction, Step) for event in timeline.events[0])
    long = Timeline({rank: events * STREAM for rank, events in timeline.events.items()})
    short, found = timelines({"predicted": timeline, "measured": long}, stream)
    assert total < STREAM and "updates" not in short.note
    assert found.note.endswith(f"the first {STREAM} of {STREAM * total} updates")
    steps = [row.paths[COLOURS["step"]].count("M") for row in found.rows]
    assert steps == [STREAM, STREAM] and max(map(ends, found.rows)) <= 1000


def test_who_points_at_a_bar_sees_what_it_is():
    (view,) = timelines({"predicted": TIMELINE}, PLAN)
    assert [hover.text for hover in view.rows[2].hovers][:2] == ["forward F0: 1 ms", "backward B0: 2 ms"]


def test_a_number_stands_where_its_bar_has_room():
    (view,) = timelines({"predicted": TIMELINE}, PLAN)
    assert [number.text for number in view.rows[2].numbers] == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert {number.wide for number in view.rows[2].numbers} == {False}
    long = plan([1], 40)
    (view,) = timelines({"predicted": predict(long, model(layer()), free(1))[0]}, long)
    assert {(number.kind, number.wide) for number in view.rows[0].numbers if len(number.text) == 1} == {
        ("backward", True)
    }


def test_large_timelines_are_thinned_and_say_so():
    wide = plan([1] * 40, 200)
    (view,) = timelines({"predicted": predict(wide, model(*[layer()] * 40), free(40))[0]}, wide)
    assert len(view.rows) == MAX_RANKS
    assert view.note.endswith(f"{MAX_RANKS} of 40 ranks, finest bars left out")
    assert sum(data.count("M") for row in view.rows for data in row.paths.values()) < MOST_MARKS


def test_the_legend_names_the_kinds_that_are_there():
    (view,) = timelines({"predicted": TIMELINE}, PLAN)
    assert [name for _, name in view.legend] == ["forward", "backward", "all-reduce", "step"]
    assert dict(map(reversed, view.legend)).items() <= COLOURS.items()


def test_nothing_is_no_picture():
    assert timelines({}, PLAN) == [] and timelines({"measured": Timeline({0: ()})}, PLAN) == []


def test_parts_lie_side_by_side():
    bar = stack("rank 0", [("forward", 1.0, "a"), ("backward", 0.0, "b"), ("idle", 3.0, "c")], 8.0, "4 s")
    assert [(each.style, each.left, each.width) for each in bar.segments] == [
        ("forward", 0, 12.5),
        ("idle", 12.5, 37.5),
    ]
