"""Curves: charts of numbers over the minibatches, as SVG path data and positions in percent.

Pure: numbers in, numbers out; letters and colours are the page's, which stretches a chart to its own width.
Invariant: a chart does not grow with the run: a series has at most BUCKETS points.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

BUCKETS = 120
NUM_TICKS = 4  # of an axis, about
LOGARITHMIC = 50.0  # highest over lowest value from which on an axis is logarithmic
NEAR = 0.01  # of the height: lines nowhere further apart look like one
WIDTH, HEIGHT = 1000.0, 100.0  # of the drawing, in its own units

Point = tuple[float, float]


class Series(NamedTuple):
    """Numbers over minibatches or seconds.

    Args:
        name: for the legend.
        style: CSS class of its colour.
        points: in ascending order of x; what is not finite is left out.
        form: "mean" with a band from the least to the most of a bucket, "median", "dots" or "rule".
    """

    name: str
    style: str
    points: Sequence[Point]
    form: str


class Tick(NamedTuple):
    """A number beside an axis, at a percentage of its length."""

    at: float
    text: str


class SvgPath(NamedTuple):
    """A line or, with the form "band", an area."""

    style: str
    form: str
    data: str


class Dot(NamedTuple):
    """A point, at percentages from the left and the top, and its value."""

    style: str
    left: float
    top: float
    text: str


class Hover(NamedTuple):
    """A column from `left` on, in units of the drawing, and the values in it."""

    left: float
    width: float
    text: str


@dataclass(frozen=True)
class Chart:
    """A chart.

    Args:
        title: what the numbers are.
        legend: style and name of each series.
        epochs: ends of epochs, on the horizontal axis.
        hovers: what a reader sees who points there.
    """

    title: str
    legend: tuple[tuple[str, str], ...]
    paths: tuple[SvgPath, ...]
    dots: tuple[Dot, ...]
    across: tuple[Tick, ...]
    upward: tuple[Tick, ...]
    below: str
    epochs: tuple[Tick, ...] = ()
    hovers: tuple[Hover, ...] = ()
    kind: str = "chart"


@dataclass(frozen=True)
class _Axis:
    least: float
    most: float
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """Return the place of a value, from 0 to 1."""
        if self.logarithmic:
            return math.log(value / self.least) / math.log(self.most / self.least)
        return (value - self.least) / (self.most - self.least)

    def ticks(self) -> Iterator[float]:
        if self.logarithmic:
            decades = range(math.floor(math.log10(self.least)), math.ceil(math.log10(self.most)) + 1)
            every = max(1, math.ceil(len(decades) / (NUM_TICKS + 2)))
            values: Iterable[float] = (10.0**power for power in decades if power % every == 0)
        else:
            step = _step((self.most - self.least) / NUM_TICKS)
            first, last = math.ceil(self.least / step - 1e-9), math.floor(self.most / step + 1e-9)
            values = (i * step for i in range(first, last + 1))
        return (value for value in values if -1e-9 <= self.share(value) <= 1 + 1e-9)


def chart(
    title: str,
    series: Sequence[Series],
    below: str,
    from_zero: bool = False,
    epochs: Mapping[int, float] | None = None,
    most: float = math.inf,
) -> Chart | None:
    """Draw series over a common axis; None if there is nothing to draw.

    The vertical axis is logarithmic if all values are positive and far apart, and `from_zero` is False.

    Args:
        title: what the numbers are, and their unit.
        below: what the horizontal axis is.
        epochs: by number, where an epoch ends.
        most: larger values stand at the upper edge.
    """
    drawn = [each._replace(points=_finite(each.points)) for each in series]
    drawn = [each for each in drawn if each.points]
    thin = [_thinned(each) for each in drawn]
    if not drawn:
        return None
    values = [y for buckets in thin for bucket in buckets for y in bucket[1:]]
    across = _Axis(0.0, max(x for each in drawn for x, _ in each.points) or 1.0)
    upward = _axis(min(values), min(max(values), most), from_zero)
    styles = [(each.style, each.name) for each in drawn]
    same = _coinciding(drawn, thin, upward)
    note = " (logarithmic)" if upward.logarithmic else ""
    return Chart(
        title + note,
        tuple(styles),
        tuple(path for each, found in zip(drawn, thin) for path in _paths(each, found, across, upward)),
        tuple(dot for each, found in zip(drawn, thin) for dot in _dots(each, found, across, upward)),
        tuple(Tick(100 * across.share(value), f"{value:,.10g}") for value in across.ticks()),
        tuple(Tick(100 - 100 * upward.share(value), f"{value:.6g}") for value in upward.ticks()),
        f"{below}; {same}" if same else below,
        tuple(_epochs(epochs or {}, across)),
        tuple(_hovers(drawn, thin, across)),
    )


class _Bucket(NamedTuple):
    x: float
    value: float
    least: float
    most: float


def _epochs(epochs: Mapping[int, float], across: _Axis) -> Iterator[Tick]:
    """Yield the ends of epochs; of many, of those whose number is a multiple."""
    step = max(1, round(_step(max(epochs, default=1) / NUM_TICKS)))
    for number, end in epochs.items():
        if number % step == 0 and end <= across.most:
            yield Tick(100 * across.share(end), f"epoch {number}")


def _coinciding(drawn: Sequence[Series], thin: Sequence[Sequence[_Bucket]], upward: _Axis) -> str:
    """Say which lines coincide, since the last one drawn hides the others."""
    heights = [[(each.x, upward.share(each.value)) for each in buckets] for buckets in thin]
    groups: dict[int, list[int]] = {}
    for i, line in enumerate(heights):
        twin = next((j for j in groups if drawn[i].form == "line" and _is_near(line, heights[j])), i)
        groups.setdefault(twin, []).append(i)
    found = [[drawn[i].name for i in group] for group in groups.values() if len(group) > 1]
    return "; ".join(f"{', '.join(names[:-1])} and {names[-1]} coincide" for names in found)


def _is_near(line: Sequence[Point], other: Sequence[Point]) -> bool:
    return len(line) == len(other) and all(
        math.isclose(x, z) and abs(y - w) < NEAR for (x, y), (z, w) in zip(line, other, strict=True)
    )


def _hovers(drawn: Sequence[Series], thin: Sequence[Sequence[_Bucket]], across: _Axis) -> Iterator[Hover]:
    """Yield a column around each place that has values, and these."""
    told: dict[float, list[str]] = {}
    for each, buckets in zip(drawn, thin, strict=True):
        for bucket in buckets if each.form != "rule" else ():
            spread = f" ({bucket.least:.4g} to {bucket.most:.4g})" if bucket.least < bucket.most else ""
            told.setdefault(bucket.x, []).append(f"{each.name} {bucket.value:.5g}{spread}")
    places = sorted(told)
    middles = [(x + y) / 2 for x, y in pairwise(places)]
    for x, left, right in zip(places, [0.0, *middles], [*middles, across.most], strict=True):
        begin, end = (WIDTH * across.share(each) for each in (left, right))
        yield Hover(begin, end - begin, f"{x:,.6g}: {', '.join(told[x])}")


def _finite(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(y)]


def _thinned(series: Series) -> list[_Bucket]:
    """Return neighbouring points in one, of which a band shows the least and the most."""
    size = math.ceil(len(series.points) / BUCKETS)
    middle = median if series.form == "median" else fmean
    found = []
    for i in range(0, len(series.points), size):
        xs, ys = zip(*series.points[i : i + size])
        value = float(middle(ys))
        found.append(
            _Bucket(fmean(xs), value, *((min(ys), max(ys)) if series.form == "mean" else [value] * 2))
        )
    return found


def _axis(least: float, most: float, from_zero: bool) -> _Axis:
    if from_zero:
        return _Axis(0.0, most * 1.08 or 1.0)
    if least > 0 and most / least >= LOGARITHMIC:
        return _Axis(least / 1.1, most * 1.1, True)
    room = 0.06 * (most - least) or 0.1 * abs(most) or 1.0
    return _Axis(least - room, most + room)


def _step(least: float) -> float:
    """Return the smallest of 1, 2 or 5 times a power of ten that is no less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _paths(series: Series, buckets: Sequence[_Bucket], across: _Axis, upward: _Axis) -> Iterator[SvgPath]:
    def line(points: Iterable[Point]) -> str:
        return "L".join(
            f"{WIDTH * across.share(x):.1f} {HEIGHT * (1 - upward.share(min(y, upward.most))):.2f}"
            for x, y in points
        )

    if series.form == "mean":
        over = line((each.x, each.most) for each in buckets)
        under = line((each.x, each.least) for each in reversed(buckets))
        yield SvgPath(series.style, "band", f"M{over}L{under}z")
    yield SvgPath(series.style, series.form, f"M{line((each.x, each.value) for each in buckets)}")


def _dots(series: Series, buckets: Sequence[_Bucket], across: _Axis, upward: _Axis) -> Iterator[Dot]:
    for each in buckets if series.form == "dots" else ():
        left, top = 100 * across.share(each.x), 100 - 100 * upward.share(each.value)
        yield Dot(series.style, left, top, f"{series.name} {each.value:.5g}")
