import math
import re

import pytest
from pytest import approx

from hybridpipe.run_folder.page.curves import BUCKETS, HEIGHT, Series, chart


def numbers(data: str) -> list[tuple[float, float]]:
    """The points of a path."""
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) (-?[\d.]+)", data)]


def drawn(points, form="median", **options):
    return chart("Loss", [Series("training", "accent", points, form)], "minibatches", **options)


def test_a_line_goes_from_the_first_to_the_last_point():
    made = drawn([(0, 1.0), (5, 2.0), (10, 3.0)])
    (path,) = made.paths
    first, middle, last = numbers(path.data)
    assert (first[0], middle[0], last[0]) == (0, 500, 1000)
    assert first[1] + last[1] == approx(HEIGHT) and middle[1] == approx(HEIGHT / 2)
    assert 0 < last[1] < first[1] < HEIGHT


def test_ticks_are_round_and_where_their_values_are():
    made = drawn([(0, 0.0), (322, 87.0)], from_zero=True)
    assert [tick.text for tick in made.across] == ["0", "100", "200", "300"]
    assert [tick.at for tick in made.across] == [approx(100 * x / 322) for x in (0, 100, 200, 300)]
    assert [tick.text for tick in made.upward] == ["0", "50"]
    (path,) = made.paths
    (_, zero), _ = numbers(path.data)
    assert made.upward[0].at == zero == HEIGHT


@pytest.mark.parametrize(
    "values, ticks",
    [
        ((2.3, 0.001), ["0.001", "0.01", "0.1", "1"]),
        ((1.0, 1e-12), ["1e-12", "1e-09", "1e-06", "0.001", "1"]),
    ],
)
def test_far_values_have_a_logarithmic_axis(values, ticks):
    made = drawn([(i, value) for i, value in enumerate(values)])
    assert made.title == "Loss (logarithmic)"
    assert [tick.text for tick in made.upward] == ticks
    steps = [b.at - a.at for a, b in zip(made.upward, made.upward[1:], strict=False)]
    assert steps == [approx(steps[0])] * len(steps) and steps[0] < 0


@pytest.mark.parametrize("values", [(1000.0, -1.0), (1000.0, 0.0), (20.0, 1.0)])
def test_other_axes_are_linear(values):
    assert drawn([(i, value) for i, value in enumerate(values)]).title == "Loss"


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-300, 1e300])
def test_equal_values_are_drawn(value):
    made = drawn([(0, value), (1, value)])
    assert all(y == approx(HEIGHT / 2) for _, y in numbers(made.paths[0].data))


def test_many_points_are_thinned_and_a_band_shows_the_extremes():
    """The charts of a million minibatches are as large as those of a thousand."""
    points = [(float(i), math.sin(i)) for i in range(100_000)]
    band, line = drawn(points, "mean").paths
    assert (band.form, line.form) == ("band", "mean")
    assert len(numbers(line.data)) <= BUCKETS and len(numbers(band.data)) <= 2 * BUCKETS
    heights = [y for _, y in numbers(band.data)]
    assert max(heights) - min(heights) == approx(HEIGHT / 1.12, abs=0.5)
    assert all(abs(y - HEIGHT / 2) < 1 for _, y in numbers(line.data))


def test_what_is_not_finite_is_left_out():
    made = drawn([(0, 1.0), (1, math.nan), (2, math.inf), (3, 2.0)])
    assert [x for x, _ in numbers(made.paths[0].data)] == [0, 1000]
    assert drawn([(0, math.nan)]) is None and drawn([]) is None


def test_dots_say_their_values():
    made = drawn([(5, 0.5), (10, 0.25)], "dots")
    assert [(dot.left, dot.text) for dot in made.dots] == [(50, "training 0.5"), (100, "training 0.25")]
    assert made.dots[0].top < made.dots[1].top


def test_series_share_their_axes():
    low, high = (
        Series("a", "accent", [(0, 1.0), (10, 1.0)], "line"),
        Series("b", "second", [(20, 2.0)], "dots"),
    )
    made = chart("Loss", [low, high], "minibatches")
    assert made.legend == (("accent", "a"), ("second", "b"))
    assert [x for x, _ in numbers(made.paths[0].data)] == [0, 500] and made.dots[0].left == 100


def series(name, values, form="line"):
    return Series(name, "accent", list(enumerate(values)), form)


def test_lines_that_lie_on_each_other_are_said_to_coincide():
    """Of two plans with one process's losses the reader saw only the line that was drawn last."""
    dp, auto, off = [3.0, 2.0, 1.0], [3.0, 2.001, 1.0], [3.0, 2.1, 1.0]
    made = chart("Loss", [series("dp", dp), series("auto", auto), series("off", off)], "minibatches")
    assert made.below == "minibatches; dp and auto coincide"
    made = chart("Loss", [series(name, dp) for name in "abc"], "minibatches")
    assert made.below == "minibatches; a, b and c coincide"
    assert chart("Loss", [series("dp", dp), series("short", dp[:2])], "minibatches").below == "minibatches"


def test_who_points_at_a_place_sees_all_its_values():
    made = chart("Loss", [series("training", [3.0, 2.0]), series("held out", [4.0], "dots")], "minibatches")
    assert [hover.text for hover in made.hovers] == ["0: training 3, held out 4", "1: training 2"]
    assert [(hover.left, hover.width) for hover in made.hovers] == [(0, 500), (500, 500)]
    many = drawn([(float(i), float(i % 2)) for i in range(10_000)], "mean")
    assert len(many.hovers) <= BUCKETS and many.hovers[0].text.endswith("training 0.5 (0 to 1)")


def test_an_outlier_is_cut_off_but_keeps_its_value():
    made = drawn([(0, 10.0), (1, 12_700.0), (2, 11.0)], from_zero=True, most=30.0)
    assert [tick.text for tick in made.upward] == ["0", "10", "20", "30"]
    assert min(y for _, y in numbers(made.paths[0].data)) == 0
    assert made.hovers[1].text == "1: training 12700"


def test_ends_of_epochs_stand_on_the_axis():
    points = [(float(i), 1.0) for i in range(101)]
    made = drawn(points, epochs={i: 10.0 * i for i in range(1, 11)})
    assert [(tick.text, tick.at) for tick in made.epochs] == [("epoch 5", 50), ("epoch 10", 100)]
    assert [tick.text for tick in drawn(points, epochs={1: 50.0, 2: 100.0, 3: 150.0}).epochs] == [
        "epoch 1",
        "epoch 2",
    ]
