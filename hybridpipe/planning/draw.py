"""Draw: a timeline as text for terminals and logs, and as an SVG picture.

Pure: strings out, no files. One row a rank, time to the right; receives are left blank, because a rank
that waits for a message idles. Predicted and measured timelines look alike, so that they can be compared.
"""

from collections.abc import Iterator
from xml.sax.saxutils import escape

from hybridpipe.planning.instructions import Backward, Forward, Instruction
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.timeline import Event, Timeline, kind

UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def text(timeline: Timeline, width: int = 100) -> str:
    """One line a rank, at most `width` characters wide, in ASCII so that any log can hold it.

        rank 0 |F0---F2--..B0========....B2=======*****.......|
        rank 1 |F1---F3--.........B1========....B3=======*****|
        rank 2 |.....F0B0==F1-B1==F2-B2==F3-B3==..............|
        0 to 20 ms; F forward, B backward, ~ all-reduce, * step, . waiting

    A column shows what the rank does in its middle, so events much shorter than one may not show.
    """
    names = [f"rank {rank}" for rank in timeline.events]
    margin = max(map(len, names), default=0)
    columns = max(width - margin - 3, 1)
    rows = [
        f"{name:<{margin}} |{_row(events, timeline.seconds, columns)}|"
        for name, events in zip(names, timeline.events.values(), strict=True)
    ]
    unit, scale = _unit(timeline.seconds)
    key = "F forward, B backward, ~ all-reduce, * step, . waiting"
    return "\n".join([*rows, f"0 to {timeline.seconds / scale:.3g} {unit}; {key}"])


def _row(events: tuple[Event, ...], seconds: float, columns: int) -> str:
    row = ["."] * columns
    for event in events:
        start, end = (round(t / (seconds or 1.0) * columns) for t in (event.start_seconds, event.end_seconds))
        row[start:end] = _paint(event.instruction, end - start)
    return "".join(row)


def _paint(instruction: Instruction, columns: int) -> str:
    """`F3--` where the number fits, otherwise `F---`."""
    fill = {"forward": "-", "backward": "=", "all-reduce": "~", "step": "*"}.get(kind(instruction), ".")
    name = str(instruction) if isinstance(instruction, Forward | Backward) else ""
    return (name if len(name) <= columns else name[:1]).ljust(columns, fill)[:columns]


# The picture: a card of WIDTH × (what the rows need), with labels on the left and busy shares on the right.
WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 1000, 150, 66, 74, 34, 26
SPAN = WIDTH - LEFT - RIGHT
CHARACTER = 6.6  # width of a digit in a bar
COLOURS = {"forward": "#4c8bf5", "backward": "#f5a94c", "all-reduce": "#b99be3", "step": "#3fb68b"}
STYLE = """
    text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #5b6472 }
    .title { font-size: 17px; font-weight: 600; fill: #1f2733 }
    .rank { font-weight: 600; fill: #1f2733 }
    .place { font-size: 10px }
    .end { text-anchor: end }
    .tick { text-anchor: middle; font-size: 11px }
    .number { text-anchor: middle; font-size: 11px; font-weight: 600 }
    .forward { fill: #fff }
    .backward { fill: #4a2c00 }
"""


def svg(timeline: Timeline, plan: Plan | None = None, title: str = "") -> str:
    """A self-contained SVG document. With a plan, rows carry their stage, and stand in its order."""
    ranks = [rank for rank in plan.ranks if rank in timeline.events] if plan else list(timeline.events)
    height = TOP + ROW * len(ranks) + 34
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" role="img">',
            f"<title>{escape(title or 'Timeline')}</title>",
            f"<style>{STYLE}</style>",
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10" fill="#fff" '
            'stroke="#d9dee6"/>',
            *_header(timeline, title),
            *_axis(timeline.seconds, TOP + ROW * len(ranks)),
            *(line for i, rank in enumerate(ranks) for line in _rank(timeline, plan, rank, TOP + ROW * i)),
            "</svg>\n",
        ]
    )


def _header(timeline: Timeline, title: str) -> Iterator[str]:
    unit, scale = _unit(timeline.seconds)
    yield _text(24, 32, title, "title")
    figures = f"{timeline.seconds / scale:.3g} {unit} a minibatch · bubble {timeline.bubble_fraction:.0%}"
    yield _text(24, 53, figures)
    x = WIDTH - RIGHT + 2
    for name, colour in reversed(COLOURS.items()):
        x -= 34 + round(CHARACTER * len(name))
        yield f'<rect x="{x}" y="43" width="11" height="11" rx="2" fill="{colour}"/>'
        yield _text(x + 16, 53, name)
    yield _text(WIDTH - 20, 53, "busy", "end")


def _axis(seconds: float, bottom: int) -> Iterator[str]:
    unit, scale = _unit(seconds)
    step = _tick(seconds / scale)
    for i in range(int(seconds / scale / step + 1e-9) + 1):
        x = LEFT + i * step * scale / (seconds or 1.0) * SPAN
        yield f'<path d="M{x:.1f} {TOP - 6}V{bottom + 2}" stroke="#e3e7ee"/>'
        yield _text(x, bottom + 18, f"{i * step:g}" + (f" {unit}" if i == 0 else ""), "tick")


def _rank(timeline: Timeline, plan: Plan | None, rank: int, y: int) -> Iterator[str]:
    """One row: label, light ground, one path a kind (thousands of events stay small), numbers, busy share."""
    per_second = SPAN / (timeline.seconds or 1.0)
    yield _text(24, y + (12 if plan else 17), f"rank {rank}", "rank")
    if plan and (place := plan.place(rank)):
        stage = plan.stages[place.stage]
        replica = f" · replica {place.replica}" if stage.replicas > 1 else ""
        yield _text(24, y + 24, f"stage {place.stage}{replica}", "place")
    yield f'<rect x="{LEFT}" y="{y}" width="{SPAN}" height="{BAR}" fill="#f4f6f9"/>'
    paths: dict[str, list[str]] = {name: [] for name in COLOURS}
    numbers = []
    for event in timeline.events[rank]:
        if (name := kind(event.instruction)) not in COLOURS:
            continue
        x, length = LEFT + event.start_seconds * per_second, event.seconds * per_second
        gap = min(1.0, length / 10)  # keeps neighbours apart
        paths[name].append(f"M{x + gap / 2:.2f} {y}h{length - gap:.2f}v{BAR}h-{length - gap:.2f}z")
        number = str(event.instruction)[1:]
        if name in ("forward", "backward") and length > CHARACTER * len(number) + 2:
            numbers.append(_text(x + length / 2, y + 17, number, f"number {name}"))
    for name, path in paths.items():
        if path:
            yield f'<path fill="{COLOURS[name]}" d="{"".join(path)}"/>'
    yield from numbers
    busy = timeline.busy_seconds(rank) / timeline.seconds if timeline.seconds else 0.0
    yield _text(WIDTH - 20, y + 17, f"{busy:.0%}", "end")


def _text(x: float, y: int, content: str, style: str = "") -> str:
    css = f' class="{style}"' if style else ""
    return f'<text x="{x:.4g}" y="{y}"{css}>{escape(content)}</text>'


def _unit(seconds: float) -> tuple[str, float]:
    """The unit in which the figures have one to three digits before the point."""
    return next((unit for unit in UNITS if seconds >= unit[1]), UNITS[-1] if seconds else UNITS[0])


def _tick(span: float) -> float:
    """The least of 1, 2 or 5 times a power of ten with which at most ten ticks cover the span."""
    steps = (factor * 10.0**power for power in range(-3, 16) for factor in (1, 2, 5))
    return next(step for step in steps if span <= 10.001 * step)
