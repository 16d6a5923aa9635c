"""Draw: a timeline as text for terminals and logs, and as an SVG picture, with memory over time below it.

Pure: strings out, no files. One row a rank, time to the right. Receives are blank, because a rank that waits
for a message idles. Predicted and measured timelines look alike, for comparison. Invariant: the picture
states when it leaves out ranks, or bars too fine to be seen.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from hybridpipe.planning.cost.memory import Curve
from hybridpipe.planning.plan import Place, Plan, Prediction
from hybridpipe.planning.schedules.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Load,
    Products,
)
from hybridpipe.planning.timeline import BACKWARDS, COLLECTIVES, TimedEvent, Timeline, kind

UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
MEMORY_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
MAX_RANKS = 32  # in a picture
MAX_MARKS = 20_000  # bars, or steps of memory, in a picture: about a megabyte
ON_MICROBATCH = (Forward, Backward, BackwardInput, BackwardWeight)  # instructions with a number in their bars
FILLS = {
    **dict.fromkeys(BACKWARDS, "="),
    "forward": "-",
    "backward-weight": "+",
    "products": "+",
    "all-reduce": "~",
    "reduce-scatter": "~",
    "all-gather": "^",
    "step": "*",
}


def text(timeline: Timeline, width: int = 100) -> str:
    """Return one line a rank, at most `width` characters wide, in ASCII so that any log can hold it.

        rank 0 |F0---F2--..B0========....B2=======*****.......|
        rank 1 |F1---F3--.........B1========....B3=======*****|
        rank 2 |.....F0B0==F1-B1==F2-B2==F3-B3==..............|
        0 to 20 ms; F forward, B backward, ~ all-reduce, * step, . waiting

    A column shows the event at its middle, so much shorter events may not show. Of many ranks some are shown.
    In a split backward `I3==` computes the gradients of the inputs and `W3++` those of the weights. `F3.1` is
    on the rank's second stage. `+++` are deferred products.
    """
    ranks = shown_ranks(list(timeline.events))
    names = [f"rank {rank}" for rank in ranks]
    margin = max(map(len, names), default=0)
    columns = max(width - margin - 3, 1)
    rows = [
        f"{name:<{margin}} |{_row(timeline.events[rank], timeline.seconds, columns)}|"
        for name, rank in zip(names, ranks, strict=True)
    ]
    unit, scale = unit_of(timeline.seconds)
    kinds = _kinds(timeline, ranks)
    parts = ", I and W its halves" if "backward-weight" in kinds else ""
    parts += ", + batched wgrad" if "products" in kinds else ""
    reduction = "reduction" if "reduce-scatter" in kinds else "all-reduce"
    gather = ", ^ all-gather" if "all-gather" in kinds else ""
    key = f"F forward, B backward{parts}, ~ {reduction}, * step{gather}, . waiting"
    left_out = f"; {len(ranks)} of {len(timeline.events)} ranks" if len(ranks) < len(timeline.events) else ""
    return "\n".join([*rows, f"0 to {timeline.seconds / scale:.3g} {unit}; {key}{left_out}"])


def _row(events: tuple[TimedEvent, ...], seconds: float, columns: int) -> str:
    row = ["."] * columns
    for event in events:
        start, end = (round(t / (seconds or 1.0) * columns) for t in (event.start_seconds, event.end_seconds))
        row[start:end] = _paint(event.instruction, end - start)
    return "".join(row)


def _paint(instruction: Instruction | Load | Products, columns: int) -> str:
    """Return `F3--` where the number fits, otherwise `F---`."""
    fill = FILLS.get(kind(instruction), ".")
    name = str(instruction) if isinstance(instruction, ON_MICROBATCH) else ""
    return (name if len(name) <= columns else name[:1]).ljust(columns, fill)[:columns]


# The picture: a card of WIDTH × the height of the rows, with labels on the left and busy shares on the right.
# A document may show it 700 pixels wide, so letters are half as large again.
WIDTH, LEFT, RIGHT, TOP, ROW, BAR, AXIS = 1000, 170, 104, 104, 42, 34, 40
SPAN = WIDTH - LEFT - RIGHT
CHARACTER = 8.5  # width of a digit in a bar
COLOURS = {
    "forward": "#4c8bf5",
    "backward": "#f5a94c",
    "backward-input": "#f08c4c",
    "backward-weight": "#e6cf62",
    "products": "#e6cf62",
    "all-reduce": "#b99be3",
    "reduce-scatter": "#b99be3",
    "all-gather": "#d6a3d9",
    "step": "#3fb68b",
}
FADED = 0.55  # share of white in the colour of a rank's last stage
MEMORY_COLOUR = "#9fb4d1"
STYLE = """
    text { font: 16px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #5b6472 }
    .title { font-size: 20px; font-weight: 600; fill: #1f2733 }
    .rank { font-weight: 600; fill: #1f2733 }
    .place { font-size: 13px }
    .end { text-anchor: end }
    .tick { text-anchor: middle; font-size: 14px }
    .number { text-anchor: middle; font-size: 14px; font-weight: 600 }
    .forward { fill: #fff }
    .backward, .backward-input, .backward-weight { fill: #4a2c00 }
"""


def svg(
    timeline: Timeline,
    plan: Plan | None = None,
    title: str = "",
    memory: Mapping[int, Curve] | None = None,
    prediction: Prediction | None = None,
) -> str:
    """Return a self-contained SVG document.

    Args:
        plan: gives rows their stage, and its order.
        memory: of each rank over time (`memory.curves`), drawn below the timeline, all to one scale.
        prediction: the figures of a minibatch, where they differ from those of the whole timeline.
    """
    used = [rank for rank in plan.ranks if rank in timeline.events] if plan else list(timeline.events)
    ranks, seconds = shown_ranks(used), timeline.seconds
    bottom = TOP + ROW * len(ranks)
    finest = finest_grid([len(timeline.events[rank]) for rank in ranks])
    left_out = f" · {len(ranks)} of {len(used)} ranks" if len(ranks) < len(used) else ""
    left_out += " · finest bars left out" if finest else ""
    seen = _kinds(timeline, ranks)
    rare = (*BACKWARDS[1:], *COLLECTIVES[1:])
    kinds = [name for name in COLOURS if name not in rare or name in seen]
    lines = [*_header(timeline, title, left_out, prediction, kinds), *_axis(seconds, TOP, bottom)]
    for i, rank in enumerate(ranks):
        lines += _rank(timeline, plan, rank, TOP + ROW * i, finest)
    height = bottom + AXIS
    if memory is not None:
        top = height + 26
        height = top + ROW * len(ranks) + AXIS
        lines += [_text(24, top - 14, "memory", "rank"), _text(WIDTH - 20, top - 14, "peak", "end")]
        lines += _axis(seconds, top, height - AXIS)
        lines += _memory({rank: memory[rank] for rank in ranks}, seconds, top)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img">',
            f"<title>{escape(title or 'Timeline')}</title>",
            f"<style>{STYLE}</style>",
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10" fill="#fff" '
            'stroke="#d9dee6"/>',
            *lines,
            "</svg>\n",
        ]
    )


def shown_ranks(ranks: Sequence[int]) -> list[int]:
    """Return all ranks, or of too many the first, the last and some evenly between them."""
    if len(ranks) <= MAX_RANKS:
        return list(ranks)
    return [ranks[i * (len(ranks) - 1) // (MAX_RANKS - 1)] for i in range(MAX_RANKS)]


def _kinds(timeline: Timeline, ranks: Sequence[int]) -> set[str]:
    """Return the kinds of events of these ranks."""
    one_of_each = {type(event.instruction): event for rank in ranks for event in timeline.events[rank]}
    return {kind(event.instruction) for event in one_of_each.values()}


def finest_grid(marks: Sequence[int], span: float = SPAN, most: int | None = None) -> float:
    """Return the grid, in pixels, that thins a row's marks out to stay within the most; 0: all are drawn.

    The factor is irrational, as a regular pipeline in step with the grid would show only one of its bars.

    Args:
        span: the row's pixels.
        most: marks of all rows; by default MAX_MARKS.
    """
    limit = MAX_MARKS if most is None else most
    return 1.618034 * span * len(marks) / limit if sum(marks) > limit else 0.0


def _header(
    timeline: Timeline, title: str, left_out: str, prediction: Prediction | None, kinds: Sequence[str]
) -> Iterator[str]:
    figures = prediction or timeline
    seconds = prediction.minibatch_seconds if prediction else timeline.seconds
    unit, scale = unit_of(seconds)
    yield _text(24, 34, title, "title")
    bubble = f"bubble {figures.bubble_fraction:.0%}"
    yield _text(24, 59, f"{seconds / scale:.3g} {unit} a minibatch · {bubble}{left_out}")
    x = 24
    for name in kinds:
        yield f'<rect x="{x}" y="72" width="14" height="14" rx="2" fill="{COLOURS[name]}"/>'
        yield _text(x + 20, 85, name)
        x += 46 + round(CHARACTER * len(name))
    yield _text(WIDTH - 20, 85, "busy", "end")


def _axis(seconds: float, top: int, bottom: int) -> Iterator[str]:
    unit, scale = unit_of(seconds)
    step = tick(seconds / scale)
    for i in range(int(seconds / scale / step + 1e-9) + 1):
        x = LEFT + i * step * scale / (seconds or 1.0) * SPAN
        yield f'<path d="M{x:.1f} {top - 6}V{bottom + 2}" stroke="#e3e7ee"/>'
        yield _text(x, bottom + 22, f"{i * step:g}" + (f" {unit}" if i == 0 else ""), "tick")


class MicrobatchNumber(NamedTuple):
    """The number of a microbatch in a bar: the bar's begin and length, the text, the kind of event."""

    x: float
    length: float
    text: str
    kind: str


def bars(
    events: Iterable[TimedEvent], left: float, top: float, per_second: float, finest: float = 0.0
) -> tuple[dict[str, str], list[MicrobatchNumber]]:
    """Return a row's bars as the path of each colour, which keeps thousands of them small, and their numbers.

    Args:
        left, top: where the row begins, in pixels.
        per_second: pixels of a second.
        finest: bars that no line of a grid this fine meets are left out (`finest_grid`).
    """
    paths: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
    numbers = []
    for event in events:
        x, length = left + event.start_seconds * per_second, event.seconds * per_second
        if (name := kind(event.instruction)) not in COLOURS:
            continue
        if finest and x // finest == (x + length) // finest:  # no line of the grid in it
            continue
        gap = min(1.0, length / 10)  # keeps neighbours apart
        chunk = event.instruction.chunk if isinstance(event.instruction, ON_MICROBATCH) else 0
        paths[name, chunk].append(f"M{x + gap / 2:.2f} {top}h{length - gap:.2f}v{BAR}h-{length - gap:.2f}z")
        if isinstance(event.instruction, ON_MICROBATCH):
            numbers.append(MicrobatchNumber(x, length, str(event.instruction)[1:], name))
    last = max((chunk for _, chunk in paths), default=0)
    drawn = sorted(paths, key=lambda key: (list(COLOURS).index(key[0]), key[1]))
    shades = {key: _shade(COLOURS[key[0]], key[1] / last if last else 0.0) for key in drawn}
    return {shades[key]: "".join(paths[key]) for key in drawn}, numbers


def _rank(timeline: Timeline, plan: Plan | None, rank: int, y: int, finest: float) -> Iterator[str]:
    """Yield one row: label, light ground, bars, their numbers where they fit, busy share."""
    per_second = SPAN / (timeline.seconds or 1.0)
    yield _text(24, y + (15 if plan else 23), f"rank {rank}", "rank")
    if plan and (place := plan.place(rank)):
        yield _text(24, y + 31, place_name(plan, place), "place")
    yield f'<rect x="{LEFT}" y="{y}" width="{SPAN}" height="{BAR}" fill="#f4f6f9"/>'
    paths, numbers = bars(timeline.events[rank], LEFT, y, per_second, finest)
    yield from (f'<path fill="{colour}" d="{path}"/>' for colour, path in paths.items())
    for x, length, number, name in numbers:
        if length > CHARACTER * len(number) + 2:
            yield _text(x + length / 2, y + 22, number, f"number {name}")
    busy = timeline.busy_seconds(rank) / timeline.seconds if timeline.seconds else 0.0
    yield _text(WIDTH - 20, y + 23, f"{busy:.0%}", "end")


def place_name(plan: Plan, place: Place) -> str:
    """Return the stages and the replica of a rank, in words."""
    stages = plan.held_stages(place)
    held = ", ".join(map(str, stages)) if len(stages) <= 3 else f"{stages[0]}, {stages[1]} … {stages[-1]}"
    spec = plan.stages[place.stage]
    replica = f" · replica {place.replica}" * (spec.replicas > 1)
    shard = f" · shard {place.shard}" * (spec.tensor > 1)
    return f"stage{'s' if len(stages) > 1 else ''} {held}{replica}{shard}"


def _shade(colour: str, share: float) -> str:
    """Return the colour, paler by a share of FADED: each stage of a rank has its own shade."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * FADED * share):02x}" for part in parts)


def _memory(memory: Mapping[int, Curve], seconds: float, top: int) -> Iterator[str]:
    """Yield a row a rank: its bytes over time, as an area, and the peak."""
    per_second = SPAN / (seconds or 1.0)
    most = max((num_bytes for curve in memory.values() for _, num_bytes in curve), default=0) or 1
    finest = finest_grid([len(curve) for curve in memory.values()])
    for i, (rank, curve) in enumerate(memory.items()):
        y = top + ROW * i
        peak = max(num_bytes for _, num_bytes in curve)
        yield _text(24, y + 23, f"rank {rank}")
        yield f'<rect x="{LEFT}" y="{y}" width="{SPAN}" height="{BAR}" fill="#f4f6f9"/>'
        steps: list[tuple[float, int]] = []
        for x, num_bytes in ((LEFT + at * per_second, num_bytes) for at, num_bytes in curve):
            if steps and x < steps[-1][0] + finest:
                steps[-1] = steps[-1][0], max(steps[-1][1], num_bytes)
            else:
                steps.append((x, num_bytes))
        outline = "".join(f"H{x:.2f}V{y + BAR - BAR * num_bytes / most:.2f}" for x, num_bytes in steps)
        yield f'<path fill="{MEMORY_COLOUR}" d="M{LEFT} {y + BAR}{outline}H{LEFT + SPAN}V{y + BAR}z"/>'
        unit, scale = next((each for each in MEMORY_UNITS if peak >= each[1]), MEMORY_UNITS[-1])
        yield _text(WIDTH - 20, y + 23, f"{peak / scale:.3g} {unit}", "end")


def _text(x: float, y: int, content: str, style: str = "") -> str:
    css = f' class="{style}"' if style else ""
    return f'<text x="{x:.4g}" y="{y}"{css}>{escape(content)}</text>'


def unit_of(seconds: float) -> tuple[str, float]:
    """Return the unit in which the figures have one to three digits before the point."""
    return next((unit for unit in UNITS if seconds >= unit[1]), UNITS[-1] if seconds else UNITS[0])


def tick(span: float) -> float:
    """Return the least of 1, 2 or 5 times a power of ten with which at most ten ticks cover the span."""
    steps = (factor * 10.0**power for power in range(-3, 16) for factor in (1, 2, 5))
    return next(step for step in steps if span <= 10.001 * step)
