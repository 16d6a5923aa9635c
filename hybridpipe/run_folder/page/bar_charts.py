"""Bar charts: the bars of a report, one row a rank or run: timelines, and stacked bars.

Pure: data in; SVG path data and positions in percent out. Predicted and measured timelines have one scale of
time. Invariant: what is left out of a picture is said in it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from hybridpipe.planning import draw
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.quantities import duration
from hybridpipe.planning.timeline import TimedEvent, Timeline, kind, typical
from hybridpipe.run_folder.page.curves import Hover, Tick

WIDTH = 1000.0  # of a row of a timeline, in its own units; the page stretches it
MOST_MARKS = 6_000  # in a timeline: about 300 kB
STREAM = 8  # updates of a stream that are shown
WIDE, NARROW = 800, 300  # pixels of a row on a desk and on a telephone, at least
CHARACTER = 8.0  # pixels of a digit


class PlacedNumber(NamedTuple):
    """A microbatch's number, its place in percent, its kind, and whether only a wide page has room for it."""

    left: float
    text: str
    kind: str
    wide: bool


class Row(NamedTuple):
    """A rank in a timeline: path data by colour."""

    label: str
    detail: str
    paths: Mapping[str, str]
    numbers: Sequence[PlacedNumber]
    hovers: Sequence[Hover]
    value: str


@dataclass(frozen=True)
class TimelineView:
    """A timeline. `legend` has colour and name of each kind of event."""

    title: str
    note: str
    rows: tuple[Row, ...]
    across: tuple[Tick, ...]
    legend: tuple[tuple[str, str], ...]
    kind: str = "timeline"


class Segment(NamedTuple):
    """A piece of a bar, in percent of the page's scale."""

    style: str
    left: float
    width: float
    text: str


class StackedBar(NamedTuple):
    """A row of segments, with a mark such as a limit at `mark` percent."""

    label: str
    segments: tuple[Segment, ...]
    value: str
    mark: float | None = None


@dataclass(frozen=True)
class StackedBars:
    """Bars of one scale. `legend` has style and name of each kind of segment."""

    title: str
    legend: tuple[tuple[str, str], ...]
    rows: tuple[StackedBar, ...]
    note: str = ""
    kind: str = "stacked_bars"


def timelines(found: Mapping[str, Timeline], plan: Plan) -> list[TimelineView]:
    """Draw timelines, by name, on the scale of the longest. None is cut within a minibatch.

    Of several minibatches the one of median length is shown; of a stream, whose minibatches overlap, the
    first updates.
    """
    pick = _first if plan.is_asynchronous else _typical
    shown = {name: pick(each) for name, each in found.items()}
    span = max((each.seconds for each, _ in shown.values()), default=0.0)
    return [_view(name, each, note, plan, span) for name, (each, note) in shown.items() if span]


def _typical(timeline: Timeline) -> tuple[Timeline, str]:
    """Return the minibatch of median length, from time 0 on, and a note."""
    updates = {rank: _updates(events) for rank, events in timeline.events.items()}
    count = min(map(len, updates.values()), default=0)
    if count < 2:
        return timeline, ""
    minibatches = [{rank: each[i] for rank, each in updates.items()} for i in range(count)]
    return typical(minibatches), f"the median one of {count}"


def _first(timeline: Timeline) -> tuple[Timeline, str]:
    """Return the first STREAM updates, and a note."""
    updates = {rank: _updates(events) for rank, events in timeline.events.items()}
    total = min(map(len, updates.values()), default=0)
    if total <= STREAM:
        return timeline, ""
    first = {rank: tuple(chain(*each[:STREAM])) for rank, each in updates.items()}
    return Timeline(first), f"the first {STREAM} of {total} updates"


def _updates(events: Iterable[TimedEvent]) -> list[list[TimedEvent]]:
    """Split a rank's events behind each update."""
    found: list[list[TimedEvent]] = []
    ended = True
    for event in events:
        name = kind(event.instruction)
        if ended and name != "all-gather":
            found.append([])
        found[-1].append(event)
        ended = name in ("step", "all-gather")
    return found


def _view(name: str, timeline: Timeline, note: str, plan: Plan, span: float) -> TimelineView:
    used = [rank for rank in plan.ranks if rank in timeline.events]
    ranks = draw.shown_ranks(used)
    events = {rank: timeline.events[rank] for rank in ranks}
    length = timeline.seconds or 1.0
    finest = draw.finest_grid([len(events[rank]) for rank in ranks], WIDTH, MOST_MARKS)
    rows = []
    for rank in ranks:
        paths, numbers = draw.bars(events[rank], 0, 0, WIDTH / span, finest)
        place = plan.place(rank)
        rows.append(
            Row(
                f"rank {rank}",
                draw.place_name(plan, place) if place else "",
                paths,
                [each for number in numbers for each in _number(number)],
                [*_hovers(events[rank], WIDTH / span)],
                f"{timeline.busy_seconds(rank) / length:.0%} computing",
            )
        )
    kinds = {kind(event.instruction) for of_rank in events.values() for event in of_rank}
    legend = tuple((colour, each) for each, colour in draw.COLOURS.items() if each in kinds)
    notes = [f"{duration(timeline.seconds)} from first to last instruction", *filter(None, [note])]
    notes += [f"{len(ranks)} of {len(used)} ranks"] if len(ranks) < len(used) else []
    notes += ["finest bars left out"] if finest else []
    return TimelineView(name, ", ".join(notes), tuple(rows), _seconds(span), legend)


def _hovers(events: Iterable[TimedEvent], per_second: float) -> Iterator[Hover]:
    """Yield what a reader sees who points at an event that is long enough for that."""
    for event in events:
        left, width = event.start_seconds * per_second, event.seconds * per_second
        if width >= WIDTH / 100 and (name := kind(event.instruction)) in draw.COLOURS:
            yield Hover(left, width, f"{name} {event.instruction}: {duration(event.seconds)}")


def _number(number: draw.MicrobatchNumber) -> Iterable[PlacedNumber]:
    """Yield the number of a bar if the bar has room for it."""
    wanted = CHARACTER * len(number.text) + 4
    if number.length / WIDTH * WIDE > wanted:
        left = 100 * (number.x + number.length / 2) / WIDTH
        yield PlacedNumber(left, number.text, number.kind, number.length / WIDTH * NARROW <= wanted)


def _seconds(span: float) -> tuple[Tick, ...]:
    """Return the ticks of an axis of time from 0 on."""
    unit, scale = draw.unit_of(span)
    step = draw.tick(2 * span / scale)
    count = int(span / scale / step + 1e-9)
    return tuple(
        Tick(100 * i * step * scale / span, f"{i * step:g}" + (f" {unit}" if i == count else ""))
        for i in range(count + 1)
    )


def stack(label: str, parts: Iterable[tuple[str, float, str]], whole: float, value: str = "") -> StackedBar:
    """Lay parts side by side.

    Args:
        parts: style, amount and text of each, in order.
        whole: the amount that is as long as the page is wide.
        value: the text behind the bar.
    """
    laid, left = [], 0.0
    for style, amount, text in parts:
        if amount > 0:
            laid.append(Segment(style, left, 100 * amount / whole, text))
            left += 100 * amount / whole
    return StackedBar(label, tuple(laid), value)
