"""Compare page: the report of several plans and baselines on one configuration.

Takes a `Comparison`, returns a `Page`. Invariant: all speeds have one scale, and so have all losses.
"""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import accumulate

from hybridpipe.report.tables import compare_legend, compare_rows, reference_of
from hybridpipe.report.words import counted
from hybridpipe.run_folder.data import Comparison, RunData
from hybridpipe.run_folder.page.bar_charts import StackedBars, stack
from hybridpipe.run_folder.page.curves import Point, Series, chart
from hybridpipe.run_folder.page.html import Block, Charts, Figure, Page, Section, Table

STYLES = ("accent", "second", "third", "fourth", "fifth")


def compare_page(comparison: Comparison) -> Page:
    """Lay out the report of a comparison."""
    first = next((run.start for run in comparison.runs.values() if run.start), None)
    told = (first.config, first.begun) if first else ()
    jobs = f"{counted(comparison.ranks, 'rank')}, {counted(comparison.rounds, 'round')}"
    return Page(
        title=first.title if first and first.title else comparison.name,
        of="comparison",
        facts=(*told, jobs, f"in {comparison.name}"),
        figures=tuple(_figures(comparison)),
        warnings=None,
        sections=(
            Section("Speed", tuple(_speed(comparison))),
            Section("Learning", tuple(_learning(comparison))),
        ),
    )


def _figures(comparison: Comparison) -> Iterator[Figure]:
    speeds = {name: each.samples_per_second for name, each in comparison.figures.items()}
    known = {name: speed for name, speed in speeds.items() if speed}
    if not known:
        return
    fastest, reference = max(known, key=known.__getitem__), reference_of(comparison.figures)
    yield Figure("fastest", fastest, f"plan {comparison.figures[fastest].plan}")
    yield Figure("its samples/s", f"{known[fastest]:,.0f}")
    if reference in known and reference != fastest:
        yield Figure(f"beside {reference}", f"{known[fastest] / known[reference]:.2f}×", "as fast")


def _speed(comparison: Comparison) -> Iterator[Block]:
    figures = comparison.figures
    whole = 1.02 * max(
        [each.samples_per_second or 0.0 for each in figures.values()]
        + [each.predicted_samples_per_second or 0.0 for each in figures.values()]
    )
    rows = []
    for name, each in figures.items():
        speed, expected = each.samples_per_second or 0.0, each.predicted_samples_per_second
        bar = stack(name, [("accent", speed, f"{speed:,.0f} samples/s")], whole or 1.0, f"{speed:,.0f}")
        rows.append(bar._replace(mark=100 * expected / whole if expected else None))
    yield StackedBars("Samples/s", (("accent", "measured"), ("limit", "predicted")), tuple(rows))
    told = {name: asdict(each) for name, each in figures.items()}
    yield Table(compare_rows(told, reference_of(figures)), compare_legend(told), links=comparison.links)


def _learning(comparison: Comparison) -> Iterator[Block]:
    """Yield the loss of each run's first round over minibatches and over seconds."""
    runs = [(name, run) for name, run in comparison.runs.items() if run.records]
    styles = [(STYLES[i % len(STYLES)], name, run) for i, (name, run) in enumerate(runs)]
    charts = [
        chart(title, [Series(name, style, points(run), "line") for style, name, run in styles], below)
        for title, points, below in (
            ("Loss over minibatches", _by_minibatch, "minibatches"),
            ("Loss over time", _by_time, "seconds of training"),
        )
    ]
    if drawn := tuple(each for each in charts if each is not None):
        yield Charts(drawn)


def _by_minibatch(run: RunData) -> list[Point]:
    return [(record.step + 1.0, record.loss) for record in run.records]


def _by_time(run: RunData) -> list[Point]:
    seconds = accumulate(record.seconds for record in run.records)
    return [(at, record.loss) for at, record in zip(seconds, run.records)]
