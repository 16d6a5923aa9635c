"""Learning: charts of loss, validation and time over the minibatches of a training.

Takes data, returns charts. Invariant: an epoch's figures stand where its last minibatch is.
"""

from collections.abc import Iterator

from hybridpipe.report.curves import Chart, Point, Series, chart
from hybridpipe.report.run import Epoch, Run


def charts(run: Run) -> list[Chart]:
    """Draw loss, other metrics of the validation, and seconds of a minibatch, as far as they are known."""
    found = [_loss(run), *(_metric(run, name) for name in _metrics(run)), _seconds(run)]
    return [each for each in found if each is not None]


def epoch_rows(run: Run) -> list[dict[str, str]]:
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


def _metrics(run: Run) -> list[str]:
    """Return the names of the validation's metrics but the loss."""
    epochs = run.summary.epochs if run.summary else ()
    return [*dict.fromkeys(name for each in epochs for name in each.validation or () if name != "loss")]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def _ends(run: Run) -> Iterator[tuple[float, Epoch]]:
    """Yield each epoch, and the minibatches until its end; without records, epochs are counted."""
    last = {record.epoch: record.step + 1.0 for record in run.records}
    for each in run.summary.epochs if run.summary else ():
        yield last.get(each.epoch, each.epoch + 1.0) if not last or each.epoch in last else 0.0, each


def _held_out(run: Run, name: str) -> list[Point]:
    found = ((x, (each.validation or {}).get(name)) for x, each in _ends(run) if x)
    return [(x, value) for x, value in found if value is not None]


def _below(run: Run) -> str:
    return "minibatches" if run.records else "epochs"


def _loss(run: Run) -> Chart | None:
    """Draw the loss of each minibatch or, without records, of each epoch."""
    of_epochs = [(x, each.loss) for x, each in _ends(run) if each.loss is not None]
    trained = [(record.step + 1.0, record.loss) for record in run.records]
    series = [
        Series("training", "accent", trained or of_epochs, "mean"),
        Series("validation", "second", _held_out(run, "loss"), "dots"),
    ]
    return chart("Loss", series, _below(run))


def _metric(run: Run, name: str) -> Chart | None:
    title = f"{name[:1].upper()}{name[1:]} of the validation"
    return chart(title, [Series("validation", "second", _held_out(run, name), "dots")], _below(run))


def _seconds(run: Run) -> Chart | None:
    """Draw what minibatches took, beside the prediction."""
    points = [(record.step + 1.0, 1e3 * record.seconds) for record in run.records]
    predicted = run.summary.predicted_minibatch_seconds if run.summary else None
    if predicted is None and run.plan and run.plan.predicted:
        predicted = run.plan.predicted.minibatch_seconds
    series = [Series("median", "accent", points, "median")]
    if predicted is not None and points:
        ends = [(0.0, 1e3 * predicted), (points[-1][0], 1e3 * predicted)]
        series.append(Series("predicted", "second", ends, "rule"))
    return chart("Time of a minibatch, ms", series, "minibatches", from_zero=True)
