"""Results: rows that benchmarks measure, and the medians, ratios, tables and pictures made of them.

In a round every way runs once, each as a fresh job. The speed of a machine drifts, but less within a round.
So ratios are taken within a round, and then their median over the rounds.
"""

import importlib.util
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

WARM_UP = 3  # first minibatches, which do not count
SAME_LOSS = 1e-3  # relative; float32, summed in another order
# A colour has one meaning in all pictures: data parallelism, our other synchronous plans, our asynchronous
# ones, and other libraries' pipelines. A timeline has other colours (planning/draw.py).
DATA_PARALLEL, SYNCHRONOUS, ASYNCHRONOUS, OTHERS = "#33507e", "#d1495b", "#00798c", "#a3acb8"
DARK, LIGHT = "#1f2733", "#e3e7ee"  # lines that stand for no way to train
INCH_WIDTH = 7.0  # shown 700 pixels wide, where ten points are 14 pixels


@dataclass(frozen=True)
class Row:
    """One measurement of a way. Ways are compared within their group.

    Args:
        figures: for example `seconds` of a minibatch and the last `loss`.
        error: the reason for missing figures.
        load: the machine's load average at the end of the measurement.
    """

    group: str
    way: str
    round: int
    figures: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    load: float = 0.0

    def __getitem__(self, figure: str) -> Any:
        return self.figures.get(figure)

    def __str__(self) -> str:
        shown = {name: each for name, each in self.figures.items() if isinstance(each, str | int | float)}
        figures = ", ".join(
            f"{name} {each:.6g}" if isinstance(each, float) else f"{name} {each}"
            for name, each in shown.items()
        )
        return f"{self.group}: {self.way}, round {self.round}: {self.error or figures}"


def steady_seconds(seconds: Sequence[float]) -> float:
    """Return the median seconds of a minibatch after warm-up."""
    return statistics.median(seconds[WARM_UP:] or seconds)


def groups(rows: Iterable[Row]) -> list[str]:
    """Return the groups in the order in which they were measured."""
    return list(dict.fromkeys(row.group for row in rows))


def ways(rows: Iterable[Row], group: str) -> list[str]:
    """Return the ways of a group in the order in which they were measured."""
    return list(dict.fromkeys(row.way for row in rows if row.group == group))


def of(rows: Iterable[Row], group: str, way: str) -> list[Row]:
    """Return the rows of one way, one for each round."""
    return [row for row in rows if (row.group, row.way) == (group, way)]


def last(rows: Iterable[Row], group: str, way: str) -> Row:
    """Return the latest row of one way."""
    return of(rows, group, way)[-1]


def median(rows: Iterable[Row], group: str, way: str, figure: str = "seconds") -> float | None:
    """Return the median over the rounds that have the figure; None: there is none."""
    found = [row[figure] for row in of(rows, group, way) if row[figure] is not None]
    return statistics.median(found) if found else None


def medians(rows: Sequence[Row], *figures: str) -> Iterator[tuple[str, str, list[float]]]:
    """Yield each group and way with the medians of its figures; a figure without values is 0."""
    for group in groups(rows):
        for way in ways(rows, group):
            yield group, way, [median(rows, group, way, figure) or 0.0 for figure in figures]


def times_as_fast(
    rows: Sequence[Row], group: str, way: str, reference: str, figure: str = "seconds"
) -> float | None:
    """Return the speed of a way relative to `reference`: the median of the ratios within a round."""
    base = {row.round: row[figure] for row in of(rows, group, reference)}
    ratios = [
        theirs / row[figure]
        for row in of(rows, group, way)
        if row[figure] and (theirs := base.get(row.round))
    ]
    return statistics.median(ratios) if ratios else None


def speed_ups(rows: Sequence[Row], reference: str) -> dict[tuple[str, str], float]:
    """Return the speed of each (group, way) relative to `reference`, where it is known."""
    return {
        (group, way): faster
        for group in groups(rows)
        for way in ways(rows, group)
        if (faster := times_as_fast(rows, group, way, reference)) is not None
    }


def other_losses(rows: Sequence[Row], reference: str, but: Sequence[str] = ()) -> list[tuple[Row, float]]:
    """Return the rows whose loss differs from that of `reference` in their group, with the expected loss."""
    expected = {row.group: row["loss"] for row in rows if row.way == reference and row["loss"] is not None}
    return [
        (row, wanted)
        for row in rows
        if row.way not in but and row["loss"] is not None and (wanted := expected.get(row.group)) is not None
        if not abs(row["loss"] - wanted) <= SAME_LOSS * abs(wanted)
    ]


def read(path: Path) -> tuple[list[dict[str, str]], list[Row]]:
    """Read the runs and rows of earlier calls; a benchmark can be run in several calls."""
    if not path.is_file():
        return [], []
    found = json.loads(path.read_text())
    return found["runs"], [Row(**each) for each in found["rows"]]


def write(path: Path, runs: Sequence[Mapping[str, str]], rows: Iterable[Row]) -> None:
    """Write runs and rows as JSON for `read`."""
    path.write_text(json.dumps({"runs": runs, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def number(value: float | None, digits: int = 2, scale: float = 1.0) -> str:
    """Format a number for a table; None is a dash."""
    return "–" if value is None else f"{value * scale:,.{digits}f}"


def milliseconds(seconds: float | None, digits: int = 0) -> str:
    """Format seconds as milliseconds for a table."""
    return number(seconds, digits, 1e3)


def table(rows: Iterable[Mapping[str, object]]) -> str:
    """Return a Markdown table of rows that have the same columns."""
    return tabulate([*map(dict, rows)], headers="keys", tablefmt="github", disable_numparse=True)


def require_matplotlib() -> None:
    """End the benchmark before its first job if its picture cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("benchmarks: matplotlib is not installed; pip install -e '.[benchmarks]'")


def subplots(height: float, columns: int = 1) -> tuple[Any, Any]:
    """Return a figure of `height` inches, as wide as documents show it, and its axes."""
    import matplotlib

    matplotlib.use("svg")
    settings = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    matplotlib.rcParams.update({**settings, "legend.frameon": False, "svg.hashsalt": "hybridpipe"})
    from matplotlib import pyplot

    return pyplot.subplots(1, columns, figsize=(INCH_WIDTH, height), layout="constrained")


def legend_above(figure: Any, columns: int) -> None:
    """Put the legend above the data, over the whole width."""
    figure.legend(loc="outside upper center", ncols=columns)
