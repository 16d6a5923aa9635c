"""Results: rows that benchmarks measure, and the medians, ratios, tables and pictures made of them.

In a round every way runs once, each as a fresh job, one after the other. A machine whose speed drifts treats
the ways of one round about alike, so a ratio is taken within a round, and then the median over the rounds.
"""

import importlib.util
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

WARM_UP = 3  # minibatches that are not looked at
SAME_LOSS = 1e-3  # relative; float32, summed in another order
# A colour has one meaning in all pictures: data parallelism, other synchronous plans of ours, asynchronous
# ones, and what others' pipelines do. None of them is one of a timeline's (planning/draw.py).
DATA_PARALLEL, SYNCHRONOUS, ASYNCHRONOUS, OTHERS = "#33507e", "#d1495b", "#00798c", "#a3acb8"
DARK, LIGHT = "#1f2733", "#e3e7ee"  # lines that stand for no way to train
INCH_WIDTH = 7.0  # a document shows it 700 pixels wide: ten points are 14 pixels


@dataclass(frozen=True)
class Row:
    """One measurement of a way. Ways are compared within their group.

    Args:
        figures: `seconds` are those of a minibatch, `loss` is that of the last one.
        error: why there are no figures.
        load: the mean number of processes that wanted to run when the measurement was over.
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
    """A typical minibatch's, after warm-up."""
    return statistics.median(seconds[WARM_UP:] or seconds)


def groups(rows: Iterable[Row]) -> list[str]:
    """In the order in which they were measured."""
    return list(dict.fromkeys(row.group for row in rows))


def ways(rows: Iterable[Row], group: str) -> list[str]:
    """Those of a group, in the order in which they were measured."""
    return list(dict.fromkeys(row.way for row in rows if row.group == group))


def of(rows: Iterable[Row], group: str, way: str) -> list[Row]:
    """The rows of one way, a round each."""
    return [row for row in rows if (row.group, row.way) == (group, way)]


def last(rows: Iterable[Row], group: str, way: str) -> Row:
    """The latest row of one way."""
    return of(rows, group, way)[-1]


def median(rows: Iterable[Row], group: str, way: str, figure: str = "seconds") -> float | None:
    """Over the rounds that have the figure."""
    found = [row[figure] for row in of(rows, group, way) if row[figure] is not None]
    return statistics.median(found) if found else None


def times_as_fast(
    rows: Sequence[Row], group: str, way: str, reference: str, figure: str = "seconds"
) -> float | None:
    """How many times as fast as `reference` a way is: the median of the ratios within a round."""
    base = {row.round: row[figure] for row in of(rows, group, reference)}
    ratios = [
        theirs / row[figure]
        for row in of(rows, group, way)
        if row[figure] and (theirs := base.get(row.round))
    ]
    return statistics.median(ratios) if ratios else None


def other_losses(rows: Sequence[Row], reference: str, but: Sequence[str] = ()) -> list[tuple[Row, float]]:
    """Rows whose loss is not that of `reference` in their group, with the one it should be."""
    expected = {row.group: row["loss"] for row in rows if row.way == reference and row["loss"] is not None}
    return [
        (row, wanted)
        for row in rows
        if row.way not in but and row["loss"] is not None and (wanted := expected.get(row.group)) is not None
        if not abs(row["loss"] - wanted) <= SAME_LOSS * abs(wanted)
    ]


def read(path: Path) -> tuple[list[dict[str, str]], list[Row]]:
    """The runs and rows of earlier calls: a benchmark can be run in pieces, whose rounds are counted on."""
    if not path.is_file():
        return [], []
    found = json.loads(path.read_text())
    return found["runs"], [Row(**each) for each in found["rows"]]


def write(path: Path, runs: Sequence[Mapping[str, str]], rows: Iterable[Row]) -> None:
    """JSON for `read`."""
    path.write_text(json.dumps({"runs": runs, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def number(value: float | None, digits: int = 2, scale: float = 1.0) -> str:
    """For a table; a dash where there is none."""
    return "–" if value is None else f"{value * scale:,.{digits}f}"


def milliseconds(seconds: float | None, digits: int = 0) -> str:
    """For a table."""
    return number(seconds, digits, 1e3)


def table(rows: Iterable[Mapping[str, object]]) -> str:
    """A Markdown table of rows that have the same columns."""
    return tabulate([*map(dict, rows)], headers="keys", tablefmt="github", disable_numparse=True)


def require_matplotlib() -> None:
    """Ends the benchmark before any job where its picture could not be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("benchmarks: matplotlib is not installed; pip install -e '.[benchmarks]'")


def subplots(height: float, columns: int = 1) -> tuple[Any, Any]:
    """A figure of `height` inches, as wide as documents show it, and its axes."""
    import matplotlib

    matplotlib.use("svg")
    settings = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    matplotlib.rcParams.update({**settings, "legend.frameon": False, "svg.hashsalt": "hybridpipe"})
    from matplotlib import pyplot

    return pyplot.subplots(1, columns, figsize=(INCH_WIDTH, height), layout="constrained")


def legend_above(figure: Any, columns: int) -> None:
    """Off the data, over the whole width."""
    figure.legend(loc="outside upper center", ncols=columns)
