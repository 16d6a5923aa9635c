import random
import re
import xml.etree.ElementTree as ET

import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.formula import StageCost
from hybridpipe.planning.cost.memory import curves
from hybridpipe.planning.draw import BAR, COLOURS, LEFT, MAX_RANKS, MEMORY_COLOUR, SPAN, _shade, svg, text
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.schedules.generators import programs
from hybridpipe.planning.schedules.instructions import Step
from hybridpipe.planning.simulator.predict import predict, simulate
from hybridpipe.planning.timeline import TimedEvent, Timeline
from tests.planning.helpers import free, layer, model, parse, plan

SVG = "{http://www.w3.org/2000/svg}"
PLAN = plan([2, 1], 4)
TIMELINE, _ = predict(PLAN, model(layer(2e-3, 4e-3, update=2e-3), layer(1e-3, 2e-3)), free(3))
EMPTY = Timeline({0: (), 1: ()})


def noisy(num_microbatches: int) -> Timeline:
    """A measured timeline: gaps everywhere, many short events."""
    draw = random.Random(0)
    events = predict(plan([1, 1], num_microbatches), model(layer(), layer()), free(2))[0].events
    return Timeline(
        {
            rank: tuple(
                event._replace(start_seconds=event.start_seconds + 0.3 * draw.random() * event.seconds)
                for event in rank_events
            )
            for rank, rank_events in events.items()
        }
    )


def words(picture: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(picture).iter(f"{SVG}text")]


def widths(picture: str, colour: str) -> list[float]:
    """Of all bars of a colour, in pixels, row by row."""
    return [
        float(width)
        for path in ET.fromstring(picture).iter(f"{SVG}path")
        if path.get("fill") == colour
        for width in re.findall(r"h([\d.]+)", path.get("d"))
    ]


def test_text():
    assert text(TIMELINE, width=55).splitlines() == [
        "rank 0 |F0---F2--..B0========....B2=======*****.......|",
        "rank 1 |F1---F3--.........B1========....B3=======*****|",
        "rank 2 |.....F0B0==F1-B1==F2-B2==F3-B3==..............|",
        "0 to 20 ms; F forward, B backward, ~ all-reduce, * step, . waiting",
    ]


@pytest.mark.parametrize("width", [12, 40, 100, 200])
@pytest.mark.parametrize("timeline", [TIMELINE, noisy(1000), EMPTY], ids=["predicted", "noisy", "empty"])
def test_text_is_as_wide_as_asked(timeline, width):
    rows = text(timeline, width).splitlines()[:-1]
    assert {len(row) for row in rows} == {width} and all(row.isascii() for row in rows)


def test_text_drops_the_number_before_the_letter():
    assert text(predict(plan([1], 12), model(layer()), free(1))[0], width=8 + 12 * 6 + 1).startswith(
        "rank 0 |F0B0==F1B1==F2B2==F3B3==F4B4==F5B5==F6B6==F7B7==F8B8==F9B9==F-B10=F-B11=|"
    )


def test_text_shows_halves_and_the_stages_of_a_rank():
    made = plan([1, 1], 2, "zero-bubble")
    costs = [StageCost(1.0, 2.0, weight_seconds=1.0)] * 4
    halved = simulate(programs(made), made, costs[:2], free(2))
    assert text(halved, width=7 * 5 + 9).splitlines() == [
        "rank 0 |F0---F1---.....I0===W0+++I1===W1+++|",
        "rank 1 |.....F0---I0===F1---I1===W0+++W1+++|",
        "0 to 7 s; F forward, B backward, I and W its halves, ~ all-reduce, * step, . waiting",
    ]
    made = plan([1, 1], 2, "interleaved-1f1b", chunks=2)
    several = simulate(programs(made), made, costs, free(2))
    assert text(several, width=15 * 6 + 9).splitlines()[:2] == [
        "rank 0 |F0----F1----F0.1--F1.1--............B0.1========......B1.1========B0==========B1==========|",
        "rank 1 |......F0----F1----F0.1--B0.1========F1.1--B1.1========B0==========B1==========............|",
    ]


def test_svg_shows_halves_and_the_stages_of_a_rank_in_shades_of_their_own():
    made = plan([2, 2], 4, "interleaved-1f1b", chunks=2)
    costs = [StageCost(1.0, 2.0)] * 4
    picture = svg(simulate(programs(made), made, costs, free(4)), made)
    assert "stages 1, 3 · replica 0" in words(picture) and "3.1" in words(picture)
    fills = {path.get("fill") for path in ET.fromstring(picture).iter(f"{SVG}path")}
    for kind in ("forward", "backward"):
        assert {COLOURS[kind], _shade(COLOURS[kind], 1.0)} <= fills
    assert "backward-weight" not in words(picture)
    made = plan([1, 1], 4, "zero-bubble")
    halved = svg(simulate(programs(made), made, [StageCost(1.0, 2.0, weight_seconds=1.0)] * 2, free(2)), made)
    assert {"backward-input", "backward-weight"} <= {*words(halved)}
    assert len(widths(halved, COLOURS["backward-weight"])) == 8
    assert COLOURS["backward-input"] != COLOURS["backward-weight"]


def test_a_rank_of_many_stages_has_a_short_label():
    made = plan([1] * 2, 2, "interleaved-1f1b", chunks=5)
    timeline = simulate(programs(made), made, [StageCost(1.0, 2.0)] * 10, free(2))
    assert "stages 1, 3 … 9" in words(svg(timeline, made))


def test_text_shows_the_all_reduce():
    timeline, _ = predict(plan([1, 2], 1), model(layer(), layer(parameters=2)), Cluster.flat(3, 1.0, 0.0))
    assert "~~~" in text(timeline).splitlines()[2]


def test_svg_says_who_does_what():
    seen = words(svg(TIMELINE, PLAN, "2-1 under 1F1B"))
    assert seen[:2] == ["2-1 under 1F1B", "20 ms a minibatch · bubble 33%"]
    assert {"forward", "backward", "all-reduce", "step", "busy"} <= {*seen}
    rows = ["rank 0", "stage 0 · replica 0", "rank 1", "stage 0 · replica 1", "rank 2", "stage 1"]
    assert [word for word in seen if word.startswith(("rank", "stage"))] == rows
    assert [word for word in seen if word.endswith("%")][-3:] == ["70%", "70%", "60%"]


def test_svg_numbers_microbatches():
    numbers = re.findall(r'class="number (\w+)">(\d)<', svg(TIMELINE, PLAN))
    expected = [(kind, b) for kind in ("backward", "forward") for b in "0123" for _ in PLAN.stages]
    assert sorted(numbers) == expected


def test_svg_without_a_plan_has_ranks_only():
    seen = words(svg(TIMELINE))
    assert "rank 2" in seen and not any("stage" in word for word in seen)


def test_svg_rows_stand_in_the_order_of_the_plan():
    placed = Plan((StageSpec(0, 1, 1, (2,)), StageSpec(1, 2, 2, (0, 1))))
    assert [word for word in words(svg(TIMELINE, placed)) if word.startswith("rank")] == [
        "rank 2",
        "rank 0",
        "rank 1",
    ]


def test_svg_lengths_are_times():
    """Two forwards of 2 ms on ranks 0 and 1, four of 1 ms on rank 2; the picture spans 20 ms."""
    forward = widths(svg(TIMELINE), COLOURS["forward"])
    assert forward == approx([0.1 * SPAN] * 4 + [0.05 * SPAN] * 4, abs=1.1)  # less a gap between neighbours


def test_svg_time_axis():
    ticks = [word for word in words(svg(TIMELINE)) if re.fullmatch(r"\d+( ms)?", word)]
    assert ticks[:11] == ["0 ms", *map(str, range(2, 21, 2))]


@pytest.mark.parametrize(
    "seconds, first, second",
    [(3e-5, "0 µs", "5"), (0.8, "0 ms", "100"), (7.0, "0 s", "1"), (9e5, "0 s", "100000")],
)
def test_svg_time_axis_takes_the_unit_that_fits(seconds, first, second):
    seen = words(svg(Timeline({0: (TimedEvent(Step(), 0.0, seconds),)})))
    assert seen[seen.index(first) + 1] == second


def test_svg_escapes_names():
    assert words(svg(TIMELINE, PLAN, "a < b & </text>"))[0] == "a < b & </text>"


def test_svg_of_a_noisy_timeline_stays_small():
    """Thousands of events: all drawn, none numbered, some tens of bytes each."""
    timeline = noisy(1000)
    picture = svg(timeline, plan([1, 1], 1000), "measured")
    for kind in ("forward", "backward"):
        assert len(widths(picture, COLOURS[kind])) == 2000
    assert len(picture) < 4000 * 50
    assert 'class="number' in svg(TIMELINE) and 'class="number' not in picture


def test_svg_of_nothing():
    assert "rank 1" in words(svg(EMPTY)) and words(svg(Timeline({})))


def test_svg_draws_memory_below_the_timeline():
    """To one scale, with each rank's most: two microbatches in flight on ranks 0 and 1, one on rank 2."""
    profile = model(layer(2e-3, 4e-3, activation=500_000, update=2e-3), layer(1e-3, 2e-3, activation=250_000))
    memory = curves(profile, PLAN, TIMELINE)
    picture = svg(TIMELINE, PLAN, memory=memory)
    assert [word for word in words(picture) if word.endswith("B")] == ["1 MB", "1 MB", "250 kB"]
    areas = [
        path.get("d")
        for path in ET.fromstring(picture).iter(f"{SVG}path")
        if path.get("fill") == MEMORY_COLOUR
    ]
    heights = [BAR - min(float(y) for y in re.findall(r"V([\d.]+)", area)) for area in areas]
    bottoms = [float(re.match(r"M\d+ (\d+)", area)[1]) for area in areas]
    assert [bottom - BAR + height for bottom, height in zip(bottoms, heights)] == approx([BAR, BAR, BAR / 4])
    assert "memory" not in words(svg(TIMELINE, PLAN))


def test_figures_at_the_right_do_not_reach_into_the_bars():
    """The longest is a peak of memory, "12.9 MB"; a letter is 0.7 times as wide as it is high at most."""
    profile = model(layer(2e-3, 4e-3, activation=12_900_000), layer(1e-3, 2e-3, activation=129_000_000))
    picture = ET.fromstring(svg(TIMELINE, PLAN, memory=curves(profile, PLAN, TIMELINE)))
    font = int(re.search(r"text { font: (\d+)px", picture.find(f"{SVG}style").text)[1])
    right = [each for each in picture.iter(f"{SVG}text") if each.get("class") == "end"]
    assert max(len(each.text) for each in right) >= 7
    for each in right:
        assert float(each.get("x")) - 0.7 * font * len(each.text) > LEFT + SPAN, each.text


def test_svg_takes_the_figures_of_a_minibatch_from_the_prediction():
    made = plan([1, 1], 1, "pipedream")
    timeline, prediction = predict(made, model(layer(1, 2), layer(1, 2)), free(2))
    assert words(svg(timeline, made, prediction=prediction))[1] == "3 s a minibatch · bubble 0%"
    assert words(svg(timeline, made))[1] != words(svg(timeline, made, prediction=prediction))[1]


def test_of_many_ranks_some_are_shown():
    made = plan([1] * 300, 8)
    profile = model(*[layer(activation=9)] * 300)
    timeline, _ = predict(made, profile, free(300))
    picture = svg(timeline, made, memory=curves(profile, made, timeline))
    rows = [word for word in words(picture) if word.startswith("rank ")]
    assert len(rows) == 2 * MAX_RANKS and rows[0] == "rank 0" and rows[-1] == "rank 299"
    assert words(picture)[1].endswith(f" · {MAX_RANKS} of 300 ranks")
    lines = text(timeline).splitlines()
    assert len(lines) == MAX_RANKS + 1 and lines[-1].endswith(f"; {MAX_RANKS} of 300 ranks")
    assert " of " not in words(svg(TIMELINE))[1] + text(TIMELINE)


def test_a_picture_of_very_many_events_stays_light_and_keeps_their_outline():
    made = plan([1], 100_000)
    profile = model(layer(1, 1.618, activation=10))
    timeline, _ = predict(made, profile, free(1))
    picture = svg(timeline, made, memory=curves(profile, made, timeline))
    assert len(picture) < 2_000_000
    assert "10 B" in words(picture) and words(picture)[1].endswith(" · finest bars left out")
    starts = [
        float(x)
        for path in ET.fromstring(picture).iter(f"{SVG}path")
        if path.get("fill") == COLOURS["backward"]
        for x in re.findall(r"M([\d.]+) ", path.get("d"))
    ]
    assert min(starts) < LEFT + 2 and max(starts) > LEFT + SPAN - 2
    assert len(starts) == approx(20_000 / 2.618, rel=0.05)  # in proportion to their time


@pytest.mark.parametrize("pixels, shown", [(10.4, False), (10.6, True)])
def test_a_number_stands_in_a_bar_that_has_room_for_it(pixels, shown):
    """A digit and a pixel on either side."""
    one = TimedEvent(parse("F0")[0], 0.0, pixels)
    picture = svg(Timeline({0: (one, TimedEvent(Step(), pixels, SPAN))}))
    assert ('class="number' in picture) == shown


@pytest.mark.parametrize(
    "seconds, told", [(1.0, "1 s"), (0.999, "999 ms"), (1e-3, "1 ms"), (9.9e-4, "990 µs")]
)
def test_text_tells_the_time_in_the_unit_that_fits(seconds, told):
    assert f"0 to {told};" in text(Timeline({0: (TimedEvent(Step(), 0.0, seconds),)}))


def test_text_of_no_time_and_of_next_to_none():
    assert "0 to 0 s;" in text(EMPTY)
    assert "0 to 0.1 µs;" in text(Timeline({0: (TimedEvent(Step(), 0.0, 1e-7),)}))
