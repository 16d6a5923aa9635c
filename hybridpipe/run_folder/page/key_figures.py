"""Key figures: the numbers at the top of a training's report, and what its reader must be warned of.

Takes data, returns texts. Invariant: every warning says what it is about, and how much.
"""

import math
from collections.abc import Iterator

from hybridpipe.planning.quantities import duration, size
from hybridpipe.report import cluster as machines
from hybridpipe.report.words import counted, ranges
from hybridpipe.run_folder.data import RunData, Summary
from hybridpipe.run_folder.page.html import Figure
from hybridpipe.run_folder.page.learning import best_epoch

FAR = 0.25  # error of a prediction that is a warning
NEARLY_FULL = 0.9  # share of a rank's memory


def figures(summary: Summary) -> Iterator[Figure]:
    """Yield speed, loss, validation and idle time, as far as they are known."""
    speed, expected = summary.samples_per_second, summary.predicted_samples_per_second
    if speed:
        yield Figure("samples/s", f"{speed:,.0f}", _beside(expected and f"{expected:,.0f}", speed, expected))
    seconds, expected = summary.minibatch_seconds_median, summary.predicted_minibatch_seconds
    if seconds:
        yield Figure(
            "minibatch, median",
            duration(seconds),
            _beside(expected and duration(expected), seconds, expected),
        )
    if summary.loss_last is not None:
        trained = counted(summary.minibatches or 0, "minibatch", "minibatches")
        epochs = counted(len(summary.epochs), "epoch")
        yield Figure("last loss", f"{summary.loss_last:.4g}", f"{trained}, {epochs}")
    yield from _validation(summary)
    yield from _idle(summary)
    if summary.peak_memory_bytes:
        yield Figure("memory", size(max(summary.peak_memory_bytes)), "peak of the fullest rank")


def _idle(summary: Summary) -> Iterator[Figure]:
    """Yield the share of a minibatch that ranks idle, by the medians that the page shows of each rank."""
    ranks = summary.rank_seconds.values()
    if seconds := sum(rank.get("seconds", 0.0) for rank in ranks):
        idle = sum(rank.get("idle_seconds", 0.0) for rank in ranks)
        yield Figure("idle", f"{idle / seconds:.0%}", "of the used ranks’ time in a minibatch")


def _beside(text: str | float | None, measured: float, predicted: float | None) -> str:
    return f"predicted {text} ({measured / predicted - 1:+.0%})" if predicted else ""


def _validation(summary: Summary) -> Iterator[Figure]:
    """Yield the last validation: its accuracy if there is one, else its loss."""
    metrics = {name: value for name, value in summary.metrics.items() if value is not None}
    if not metrics:
        return
    name = next((each for each in ("accuracy", "loss") if each in metrics), next(iter(metrics)))
    value = f"{metrics[name]:.1%}" if name == "accuracy" else f"{metrics[name]:.4g}"
    notes = [f"{each} {number:.4g}" for each, number in metrics.items() if each != name]
    if summary.epochs_to_target is not None:
        notes.append(f"target reached after {counted(summary.epochs_to_target, 'epoch')}")
    if best := best_epoch(summary.epochs):
        notes.append(best.text)
    yield Figure(f"validation {name}", value, "; ".join(notes))


def warnings(run: RunData) -> Iterator[str]:
    """Yield the notices of the training, then what its figures say."""
    summary = run.summary or Summary()
    yield from summary.warnings
    if summary.updates_left_out:
        yield f"{counted(summary.updates_left_out, 'update')} left out, for numbers that were not finite"
    if count := sum(not math.isfinite(record.loss) for record in run.records):
        yield f"the loss of {counted(count, 'minibatch', 'minibatches')} was not finite"
    seconds, expected = summary.minibatch_seconds_median, summary.predicted_minibatch_seconds
    if seconds and expected and not 1 / (1 + FAR) <= seconds / expected <= 1 + FAR:
        yield f"a minibatch took {seconds / expected:.2f} times as long as predicted"
    yield from _full(run, summary)
    yield from machines.rough(run.cluster) if run.cluster else ()


def _full(run: RunData, summary: Summary) -> Iterator[str]:
    """Yield one line about all ranks that were nearly full, with the figures of the fullest."""
    peaks = dict(enumerate(summary.peak_memory_bytes))
    limits = {rank: limit for rank in peaks if (limit := memory_limit(run, rank))}
    full = {rank: peaks[rank] / limit for rank, limit in limits.items() if peaks[rank] > NEARLY_FULL * limit}
    if full:
        fullest = max(full, key=full.__getitem__)
        which = f"rank {fullest} had {size(peaks[fullest])} of the {size(limits[fullest])} that it may have"
        others = [rank for rank in full if rank != fullest]
        yield which + (f", and ranks {ranges(others)} were nearly as full" if others else "")


def memory_limit(run: RunData, rank: int) -> int | None:
    """Return the bytes that a rank may have; None if they are not known or not limited."""
    limits = run.summary.memory_limit_bytes if run.summary else ()
    if rank < len(limits):
        return limits[rank]
    if run.cluster is None or rank >= run.cluster.num_ranks or math.isinf(run.cluster.memory(rank)):
        return None
    return int(run.cluster.memory(rank))
