"""Scaling: the share of the ideal that 1 to 8 ranks reach when replayed, and 1 to 1024 in the simulator.

    python benchmarks/run.py scaling                         replays and simulations; six minutes
    python benchmarks/run.py scaling --replayed              simulations only

The model is one of PipeDream's (see published.py), and every rank has a link of 10 Gbit/s of its own. The
samples grow with the ranks: the ideal is the samples a second of one rank, times the number of ranks. "dp" is
our data parallelism, whose all-reduce overlaps with the backward. "best" is the planner's fastest plan for a
pipeline without a flush. Replays are scaled and slowed down as those of replay.py.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import results
from cases import replay
from cases.published import SAMPLES, TEN_GBIT, profile_of
from jobs import Run
from results import Row, number

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.search.search import search, short_name
from hybridpipe.planning.simulator.predict import predict

SIMULATED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LATENCY_SECONDS = 5e-5
KINDS = ("dp", "best")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options, and those of a replay."""
    replay.add_options(parser)
    parser.add_argument("--model", default="vgg16", choices=SAMPLES)
    parser.add_argument(
        "--replayed",
        type=int,
        nargs="*",
        default=(1, 2, 4, 8),
        metavar="RANKS",
        help="numbers of ranks to replay; the others are simulated only",
    )


def measure(run: Run) -> Iterator[Row]:
    """Simulate and replay growing numbers of ranks; a replay has a host for each rank."""
    model = run.options.model
    profile = profile_of(model)
    alone = profile.samples / sum(x.forward_seconds + x.backward_seconds for x in profile.layers)
    for ranks in SIMULATED:
        group = f"{model}, {ranks} ranks"
        for kind in KINDS:
            if run.wants(group, kind):
                shown = best_of(kind, profile, ranks)
                figures = {"ranks": ranks, "plan": short_name(shown), "ideal": ranks * alone}
                yield Row(group, kind, run.round, figures | _speeds(run, kind, shown, profile, ranks))


def _speeds(run: Run, kind: str, plan: Plan, profile: ModelProfile, ranks: int) -> dict[str, float]:
    """Return the speeds of a plan in samples a second."""
    simulated = {"simulated": predict(plan, profile, cluster(ranks))[1].samples_per_second}
    if ranks not in run.options.replayed:
        return simulated
    one = replay.Replay(kind, plan, cluster(ranks), 10 if kind == "dp" else None)
    out = run.out / f"{kind}-{ranks}" / f"round{run.round}"
    with run.network(replay.rate_of(run), ranks) as where:
        found = replay.replayed(run, profile, one, out, where, ranks)
    return simulated | {name: found[name] for name in ("samples_per_second", "processor_load")}


def best_of(kind: str, profile: ModelProfile, ranks: int) -> Plan:
    """Return data parallelism, or the planner's choice."""
    if kind == "dp":
        return Plan.data_parallel(profile.num_layers, ranks, ranks)
    return search(profile, cluster(ranks), 1, PlanRequest("pipedream"))[0].plan


def cluster(ranks: int) -> Cluster:
    """Return a cluster in which each rank has a link of its own."""
    return Cluster.flat(ranks, TEN_GBIT, LATENCY_SECONDS)


def report(rows: Sequence[Row]) -> str:
    """Return the table, medians over the rounds."""
    return results.table(_lines(rows))


def _lines(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    for group in results.groups(rows):
        for kind in results.ways(rows, group):
            latest = results.last(rows, group, kind)
            measured = results.median(rows, group, kind, "samples_per_second")
            load = results.median(rows, group, kind, "processor_load")
            yield {
                "ranks": str(latest["ranks"]),
                "": kind,
                "plan": latest["plan"],
                "simulated": f"{number(latest['simulated'], 0)} samples/s",
                "of the ideal": f"{latest['simulated'] / latest['ideal']:.0%}",
                "replayed": f"{number(measured, 0)} samples/s" if measured else "-",
                "of the ideal ": f"{measured / latest['ideal']:.0%}" if measured else "-",
                "processors": f"{load:.0%}" if load else "-",
            }


def picture(rows: Sequence[Row]) -> Any:
    """A picture of the shares of the ideal."""
    shares = {}
    for group in results.groups(rows):
        for kind in results.ways(rows, group):
            latest = results.last(rows, group, kind)
            measured = results.median(rows, group, kind, "samples_per_second")
            ideal = latest["ideal"]
            shares[kind, latest["ranks"]] = (latest["simulated"] / ideal, measured and measured / ideal)
    return draw(shares)


def draw(shares: Mapping[tuple[str, int], tuple[float, float | None]]) -> Any:
    """Draw shares of the ideal over the number of ranks; lines are simulated, dots replayed."""
    figure, axes = results.subplots(height=3.2)
    names = {
        "dp": ("data parallelism", results.DATA_PARALLEL),
        "best": ("the best plan without a flush", results.ASYNCHRONOUS),
    }
    for kind, (label, color) in names.items():
        ranks = [count for name, count in shares if name == kind]
        axes.plot(ranks, [100 * shares[kind, n][0] for n in ranks], color=color, label=f"{label}, simulated")
        dots = {n: 100 * share for n in ranks if (share := shares[kind, n][1])}
        axes.plot(list(dots), list(dots.values()), "o", color=color, label="replayed")
    axes.set_xscale("log", base=2)
    axes.set_xticks(SIMULATED, map(str, SIMULATED))
    axes.minorticks_off()
    axes.set_xlabel("ranks")
    axes.set_ylabel("% of the ideal")
    axes.set_ylim(0, 105)
    axes.grid(axis="y", color=results.LIGHT)
    axes.legend(loc="lower left")
    return figure
