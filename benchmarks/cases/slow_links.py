"""Slow links: the plans that `search` finds for PipeDream's profiles between ranks of one switch.

    python benchmarks/run.py slow_links                                   162 problems, three minutes
    python benchmarks/run.py slow_links --before runs/other               beside an earlier run

Each published profile (see published.py) is planned for 4, 8 and 16 ranks with 10, 1 and 0.1 Gbit/s and 50
us, under 1f1b, pipedream and auto; synchronous minibatches have 32 microbatches. A plan's milliseconds are
the simulator's, the seconds of a search those of the processor. An earlier run may be one of another
checkout: PYTHONPATH=CHECKOUT python benchmarks/run.py slow_links --out runs/other.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import results
from cases.published import SAMPLES, planned, profile_of
from jobs import Run
from results import Row, milliseconds, number

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.search.search import short_name

RANKS = (4, 8, 16)
GBITS = (10.0, 1.0, 0.1)
LATENCY_SECONDS = 5e-5
SCHEDULES = {"1f1b": 32, "pipedream": 1, "auto": 32}  # microbatches of a minibatch
ALIKE = 1e-4  # relative: plans whose times differ by less are equal


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    parser.add_argument("--before", type=Path, metavar="DIR", help="an earlier run's --out")


def measure(run: Run) -> Iterator[Row]:
    """Plan every problem."""
    other = run.options.before
    before = {} if other is None else _of(results.read(other / "slow_links.json")[1])
    for gbit, num_ranks, model in product(GBITS, RANKS, SAMPLES):
        group = f"{model}, {num_ranks} ranks, {gbit:g} Gbit/s"
        wanted = [schedule for schedule in SCHEDULES if run.wants(group, schedule)]
        cluster = Cluster.flat(num_ranks, gbit * 1e9 / 8, LATENCY_SECONDS)
        for schedule in wanted:
            plan, seconds = planned(profile_of(model), cluster, SCHEDULES[schedule], schedule)
            assert plan.predicted is not None
            figures = {"seconds": plan.predicted.minibatch_seconds, "searched": seconds}
            figures |= {"plan": f"{short_name(plan)}, {plan.schedule}", "gbit": gbit}
            earlier = before.get((group, schedule))
            known = {} if earlier is None else {f"{name} before": earlier[name] for name in figures}
            yield Row(group, schedule, run.round, {**figures, **known})


def _of(rows: Sequence[Row]) -> Mapping[tuple[str, str], Row]:
    return {(row.group, row.way): row for row in rows}


def report(rows: Sequence[Row]) -> str:
    """Return the sums of each bandwidth and schedule, and the problems with another plan than before."""
    latest = list(_of(rows).values())
    sums = [results.table(_sums(latest))]
    changed = [row for row in latest if row["seconds before"] and abs(_gain(row)) > ALIKE]
    changed.sort(key=_gain, reverse=True)
    return "\n\n".join([*sums, *([results.table(map(_line, changed))] if changed else [])])


def _gain(row: Row) -> float:
    """Return the part of a minibatch's time that is won."""
    return 1 - row["seconds"] / row["seconds before"]


def _sums(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    for gbit, schedule in product(GBITS, SCHEDULES):
        of = [row for row in rows if (row["gbit"], row.way) == (gbit, schedule)]
        both = [row for row in of if row["seconds before"]]
        gains = [_gain(row) for row in both]
        if of:
            yield {
                "Gbit/s": f"{gbit:g}",
                "schedule": schedule,
                "problems": str(len(of)),
                "faster": str(sum(gain > ALIKE for gain in gains)),
                "at most by": f"{max(gains, default=0.0):.1%}",
                "slower": str(sum(gain < -ALIKE for gain in gains)),
                "s before": number(sum(row["searched before"] for row in both) if both else None, 1),
                "s now": number(sum(row["searched"] for row in of), 1),
            }


def _line(row: Row) -> dict[str, str]:
    return {
        "problem": f"{row.group}, {row.way}",
        "before": row["plan before"],
        "before, ms": milliseconds(row["seconds before"], 1),
        "now": row["plan"],
        "now, ms": milliseconds(row["seconds"], 1),
    }
