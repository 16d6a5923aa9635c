"""Slow links: the plan that `plan` gives beside what `--search 1000` makes of it, on links of three speeds.

    python benchmarks/run.py slow_links                    40 minutes
    python benchmarks/run.py slow_links --simulated 0      the plans alone, half a minute

PipeDream's published profiles (see published.py) on 4, 8 and 16 ranks of one switch of 10, 1 and 0.1 Gbit/s,
50 us a message, four microbatches a rank. "left" is the part of a minibatch's time that the longer search
still takes away: what a user could gain by typing an option.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence

import results
from cases.published import SAMPLES, profile_of
from jobs import Run
from results import Row, milliseconds, number

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.search.anneal import anneal_candidates
from hybridpipe.planning.search.search import search, short_name

RANKS = (4, 8, 16)
GBITS = (10.0, 1.0, 0.1)
SCHEDULES = ("1f1b", "pipedream", "auto")
MICROBATCHES_PER_RANK = 4
LATENCY_SECONDS = 50e-6
BYTES_OF_GBIT = 1.25e8
WORTH_TELLING = 0.03


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the number of plans that the longer search simulates."""
    parser.add_argument("--simulated", type=int, metavar="N", default=1000, help="plans; default: 1000")


def measure(run: Run) -> Iterator[Row]:
    """Plan every profile on every cluster under every schedule."""
    for model in SAMPLES:
        for num_ranks in RANKS:
            for gbits in GBITS:
                group = f"{model}, {num_ranks} ranks, {gbits:g} Gbit/s"
                for schedule in SCHEDULES:
                    if run.wants(group, schedule):
                        figures = compared(model, num_ranks, gbits, schedule, run.options.simulated)
                        yield Row(group, schedule, run.round, figures)


def compared(
    model: str, num_ranks: int, gbits: float, schedule: str, num_simulated: int
) -> dict[str, object]:
    """Return the plan and what the longer search finds, with their predicted seconds a minibatch."""
    profile = profile_of(model)
    cluster = Cluster.flat(num_ranks, gbits * BYTES_OF_GBIT, LATENCY_SECONDS)
    count = 1 if schedule == "pipedream" else MICROBATCHES_PER_RANK * num_ranks
    request = PlanRequest(schedule)
    began = time.process_time()
    found = search(profile, cluster, count, request)
    planning_seconds = time.process_time() - began
    longer = anneal_candidates(found, profile, cluster, num_simulated, request)
    return {
        "plan": _told(found[0].plan),
        "seconds": found[0].seconds,
        "planning_seconds": planning_seconds,
        "longer": _told(longer[0].plan),
        "longer_seconds": longer[0].seconds,
    }


def _told(plan: Plan) -> str:
    return f"{short_name(plan)} {plan.schedule}"


def report(rows: Sequence[Row]) -> str:
    """Return a summary by bandwidth and schedule, and the problems that the longer search improves most."""
    summary = results.table(_summary(rows))
    far = [row for row in rows if _left(row) > WORTH_TELLING]
    return f"{summary}\n\n{results.table(map(_line, sorted(far, key=_left, reverse=True)))}"


def _summary(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    for gbits in GBITS:
        for schedule in SCHEDULES:
            some = [row for row in rows if row.group.endswith(f" {gbits:g} Gbit/s") and row.way == schedule]
            if some:
                seconds = statistics.median(row["planning_seconds"] for row in some)
                yield {
                    "Gbit/s": f"{gbits:g}",
                    "schedule": schedule,
                    "problems": str(len(some)),
                    "more than 3 % left": str(sum(_left(row) > WORTH_TELLING for row in some)),
                    "left at worst": f"{number(max(map(_left, some)), 1, 100)} %",
                    "planned in, median": f"{number(seconds)} s",
                }


def _left(row: Row) -> float:
    return float(1 - row["longer_seconds"] / row["seconds"])


def _line(row: Row) -> dict[str, str]:
    return {
        "problem": row.group,
        "schedule": row.way,
        "plan": row["plan"],
        "a minibatch": f"{milliseconds(row['seconds'], 1)} ms",
        "longer search": row["longer"],
        "a minibatch ": f"{milliseconds(row['longer_seconds'], 1)} ms",
        "left": f"{number(_left(row), 1, 100)} %",
        "planned in": f"{number(row['planning_seconds'])} s",
    }
