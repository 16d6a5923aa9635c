"""Learning: charts of loss, validation and time over the minibatches of a training.

Takes data, returns charts. Invariant: an epoch's figures stand where its last minibatch is.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from hybridpipe.planning.quantities import duration
from hybridpipe.run_folder.data import Epoch, RunData
from hybridpipe.run_folder.page.curves import Chart, Point, Series, chart

OUTLIER = 3.0  # times the median: a longer minibatch would press the others of a chart to its ground
NAMED = 3  # outliers


def charts(run: RunData) -> list[Chart]:
    """Draw loss, other metrics of the validation, figures of updates, and seconds of a minibatch."""
    made = [("Learning rate", "learning_rate"), ("Norm of the gradient, before clipping", "gradient_norm")]
    found = [
        _loss(run),
        *(_metric(run, name) for name in _metrics(run)),
        *(_made(run, *each) for each in made),
        _seconds(run),
    ]
    return [each for each in found if each is not None]


class BestEpoch(NamedTuple):
    """An epoch, by its row of `epoch_rows`, and a text about it."""

    row: int
    text: str


def best_epoch(epochs: Sequence[Epoch]) -> BestEpoch | None:
    """Return the epoch with the best validation, by its loss or else its accuracy; None without one."""
    for name, sign in (("loss", 1), ("accuracy", -1)):
        found = {i: (each.validation or {}).get(name) for i, each in enumerate(epochs)}
        known = {i: sign * value for i, value in found.items() if value is not None}
        if known:
            best = min(known, key=known.__getitem__)
            value = f"validation {name} {_number(sign * known[best])}"
            return BestEpoch(best, f"best epoch: {epochs[best].epoch + 1} of {len(epochs)}, {value}")
    return None


def epoch_rows(run: RunData) -> list[dict[str, str]]:
    """Rows of each epoch: losses, seconds, metrics."""
    epochs = run.summary.epochs if run.summary else ()
    return [
        {"epoch": str(each.epoch + 1), "loss": _number(each.loss), "seconds": f"{each.seconds:,.2f}"}
        | {
            f"validation {name}": _number((each.validation or {}).get(name))
            for name in ("loss", *_metrics(run))
        }
        for each in epochs
    ]


def _metrics(run: RunData) -> list[str]:
    """Return the names of the validation's metrics but the loss."""
    epochs = run.summary.epochs if run.summary else ()
    return [*dict.fromkeys(name for each in epochs for name in each.validation or () if name != "loss")]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _ends(run: RunData) -> Iterator[tuple[float, Epoch]]:
    """Yield each epoch, and the minibatches until its end; without records, epochs are counted."""
    last = {record.epoch: record.step + 1.0 for record in run.records}
    for each in run.summary.epochs if run.summary else ():
        yield last.get(each.epoch, each.epoch + 1.0) if not last or each.epoch in last else 0.0, each


def _held_out(run: RunData, name: str) -> list[Point]:
    found = ((x, (each.validation or {}).get(name)) for x, each in _ends(run) if x)
    return [(x, value) for x, value in found if value is not None]


def _below(run: RunData) -> str:
    return "minibatches" if run.records else "epochs"


def _epochs(run: RunData) -> dict[int, float]:
    """Return where each complete epoch ends, by its number from 1 on."""
    last = {record.epoch: record.step + 1.0 for record in run.records}
    but_the_last = last.keys() - {max(last, default=0)}
    complete = {each.epoch for each in run.summary.epochs} if run.summary else but_the_last
    return {epoch + 1: end for epoch, end in last.items() if epoch in complete}


def _loss(run: RunData) -> Chart | None:
    """Draw the loss of each minibatch or, without records, of each epoch."""
    of_epochs = [(x, each.loss) for x, each in _ends(run) if each.loss is not None]
    trained = [(record.step + 1.0, record.loss) for record in run.records]
    series = [
        Series("training", "accent", trained or of_epochs, "mean"),
        Series("validation", "second", _held_out(run, "loss"), "dots"),
    ]
    return chart("Loss", series, _below(run), epochs=_epochs(run))


def _metric(run: RunData, name: str) -> Chart | None:
    title = f"{name[:1].upper()}{name[1:]} of the validation"
    series = [Series("validation", "second", _held_out(run, name), "dots")]
    return chart(title, series, _below(run), epochs=_epochs(run))


def _made(run: RunData, title: str, name: str) -> Chart | None:
    """Draw a figure of the updates."""
    known = ((record.step + 1.0, getattr(record, name)) for record in run.records)
    points = [(x, value) for x, value in known if value is not None]
    series = [Series(name.replace("_", " "), "accent", points, "mean")]
    return chart(title, series, "minibatches", epochs=_epochs(run))


def _seconds(run: RunData) -> Chart | None:
    """Draw what minibatches took, beside the prediction. Far longer ones are cut off, and named."""
    points = [(record.step + 1.0, 1e3 * record.seconds) for record in run.records]
    predicted = run.summary.predicted_minibatch_seconds if run.summary else None
    if predicted is None and run.plan and run.plan.predicted:
        predicted = run.plan.predicted.minibatch_seconds
    series = [Series("median", "accent", points, "median")]
    if predicted is not None and points:
        ends = [(0.0, 1e3 * predicted), (points[-1][0], 1e3 * predicted)]
        series.append(Series("predicted", "second", ends, "rule"))
    most = OUTLIER * max(median([y for _, y in points] or [0.0]), 1e3 * (predicted or 0.0))
    long = sorted((-y, x) for x, y in points if y > most)
    named = ", ".join(f"{x:,.0f} took {duration(-y / 1e3)}" for y, x in long[:NAMED])
    below = f"minibatches; {len(long)} cut off above, the longest: {named}" if long else "minibatches"
    return chart("Time of a minibatch, ms", series, below, True, _epochs(run), most)
