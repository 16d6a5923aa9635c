"""Network: every sensible plan between four hosts with slow links, beside `auto` and plain Horovod.

    python benchmarks/run.py network                                 all of it, half an hour a round
    python benchmarks/run.py network --only 'vgg-digits.*, 1gbit'    one model at one rate
    python benchmarks/run.py network --sweep                         minibatches of 16 to 256 at 1 Gbit/s

One rank on each host trains for real, over MPI and Horovod. The first job of a round is `auto`, which
measures model and machines. The other plans have the best cuts by the closed formula, with the measurements
of the first `auto` in DIR. Under `dp` a rank's share is one microbatch, as in plain Horovod. `auto` takes the
best synchronous plan, `auto, pipedream` the best for an asynchronous pipeline, whose weights are stale, as in
the paper. `auto` and plain Horovod run whatever --only says, because all ways are compared with them.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs
import networks
import results
from jobs import Run, Way
from networks import Network
from plans import best_cut
from results import Row, milliseconds, number, of, times_as_fast

from hybridpipe.files import read_cluster, read_profile, write_json

NUM_HOSTS = 4
RATES = ("100mbit", "1gbit", "10gbit")
MODELS = {"vgg-digits": 64, "gpt": 16}  # with the samples of a minibatch
SWEEP = ("vgg-digits", "1gbit", (16, 32, 64, 128, 256))
MINIBATCHES = 23  # of a job, the warm-up's three among them
MICROBATCHES = 8
HOROVOD, AUTO, STALE = "plain Horovod", "auto", "auto, pipedream"
ALWAYS = (
    Way(AUTO, "ours", "auto", NUM_HOSTS),
    Way(HOROVOD, "plain_horovod", ranks=NUM_HOSTS),
    Way(STALE, "ours", "auto-pipedream", NUM_HOSTS),
)
SHAPES = {  # name and replica counts
    "dp": (4,),
    "straight": (1, 1, 1, 1),
    **{
        "-".join(map(str, replicas)): replicas
        for replicas in ((2, 2), (3, 1), (1, 3), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1), (1, 1))
    },
}


@dataclass(frozen=True)
class Setup:
    """One model and minibatch on one network, under some plans besides that of `auto`."""

    model: str
    rate: str
    minibatch: int
    plans: tuple[str, ...] = tuple(SHAPES)

    @property
    def name(self) -> str:
        """Name for tables and folders."""
        return f"{self.model}, {self.minibatch} samples, {self.rate}"

    @property
    def ways(self) -> tuple[str, ...]:
        """Names of all ways to train it."""
        return (*(way.name for way in ALWAYS), *self.plans)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    parser.add_argument("--sweep", action="store_true", help="minibatch sizes instead of plans")


def setups(sweep: bool) -> list[Setup]:
    """Return the setups rate by rate, because hosts are made for each rate."""
    if sweep:
        model, rate, sizes = SWEEP
        return [Setup(model, rate, size, plans=()) for size in sizes]
    return [Setup(model, rate, samples) for rate in RATES for model, samples in MODELS.items()]


def measure(run: Run) -> Iterator[Row]:
    """Train every setup on its network, every way."""
    if not networks.are_available(run.options.netcluster):
        raise SystemExit("network: needs root and netcluster, named by --netcluster or $NETCLUSTER")
    chosen = [
        setup for setup in setups(run.options.sweep) if any(run.wants(setup.name, way) for way in setup.ways)
    ]
    for rate in dict.fromkeys(setup.rate for setup in chosen):
        with run.network(rate, NUM_HOSTS) as hosts:
            for setup in (each for each in chosen if each.rate == rate):
                yield from _trained(run, setup, hosts)


def _trained(run: Run, setup: Setup, hosts: Network) -> Iterator[Row]:
    folder = run.out / setup.name.replace(", ", "-").replace(" ", "-")
    arguments = ["--minibatch", str(setup.minibatch), "--minibatches", str(MINIBATCHES)]
    arguments += ["--microbatches", str(MICROBATCHES)]

    def start(way: Way) -> Row:
        out = folder / way.name.replace(", ", "-") / f"round{run.round}"
        return jobs.start(way, setup.model, setup.name, run.round, out, arguments=arguments, network=hosts)

    for way in ALWAYS:
        if way.name != STALE or run.wants(setup.name, way.name):
            yield start(way)
    wanted = [name for name in setup.plans if run.wants(setup.name, name)]
    if wanted:
        yield from map(start, plan_ways(_first_measured(folder / AUTO), wanted))


def _first_measured(folder: Path) -> Path:
    """Return the folder of the earliest round with a measured cluster."""
    rounds = sorted(folder.glob("round*/cluster.json"), key=lambda file: file.stat().st_mtime)
    if not rounds:
        raise SystemExit(f"network: no job of auto has measured; see log.txt in the folders of {folder}")
    return rounds[0].parent


def plan_ways(measured: Path, names: Sequence[str]) -> Iterator[Way]:
    """Yield a way for each of these SHAPES, with the best cuts by the measurements of `auto`."""
    profile, cluster = read_profile(measured / "profile.json"), read_cluster(measured / "cluster.json")
    samples = profile.samples * json.loads((measured / "plan.json").read_text())["num_microbatches"]
    for name in names:
        replicas = SHAPES[name]
        # A replica of dp takes its share as one microbatch; other plans have the measured microbatches.
        count = replicas[0] if len(replicas) == 1 else samples // profile.samples
        file = measured / f"plan-{name}.json"
        write_json(file, best_cut(replicas, profile, cluster, count))
        yield Way(name, "ours", str(file), NUM_HOSTS)


def report(rows: Sequence[Row]) -> str:
    """Return a table for each setup, the fastest way first."""
    return "\n\n".join(
        f"**{group}**\n\n{results.table(_by_speed(rows, group))}" for group in results.groups(rows)
    )


def _by_speed(rows: Sequence[Row], group: str) -> Iterator[dict[str, str]]:
    """Yield the ways of a group, the fastest first and those that failed last."""
    for way in sorted(
        results.ways(rows, group), key=lambda way: results.median(rows, group, way) or float("inf")
    ):
        latest, seconds = results.last(rows, group, way), results.median(rows, group, way)
        yield {
            "way": way,
            "plan": latest["plan"] or "",
            "ms a minibatch": milliseconds(seconds) if seconds else latest.error,
            "× plain Horovod": number(times_as_fast(rows, group, way, HOROVOD)),
            "× auto": number(times_as_fast(rows, group, way, AUTO)),
            "loss": number(latest["loss"], 5),
            "rounds": str(len(of(rows, group, way))),
        }


def picture(rows: Sequence[Row]) -> Any:
    """Draw the speed of each way relative to plain Horovod."""
    return draw(results.speed_ups(rows, HOROVOD))


def draw(faster: Mapping[tuple[str, str], float]) -> Any:
    """Draw a line for each setup and a mark for each plan, on a logarithmic axis."""
    named = {
        HOROVOD: (HOROVOD, results.DATA_PARALLEL, "|", 200),
        "dp": ("our data parallelism", results.DATA_PARALLEL, "o", 40),
        AUTO: (AUTO, results.SYNCHRONOUS, "D", 60),
        STALE: ("auto under pipedream", results.ASYNCHRONOUS, "s", 50),
    }
    other = ("another plan of ours", results.SYNCHRONOUS, ".", 60)
    groups = list(dict.fromkeys(group for group, _ in faster))
    figure, axes = results.subplots(height=1.4 + 0.35 * len(groups))
    shown: set[str] = set()
    for (group, way), times in sorted(faster.items(), key=lambda item: item[0][1] in named):
        label, color, marker, size = named.get(way, other)
        axes.scatter(
            times, groups.index(group), size, color, marker, label=None if label in shown else label, zorder=2
        )
        shown.add(label)
    axes.set_xscale("log")
    ticks = [each for each in (1, 2, 5, 10, 20, 50, 100) if each <= 1.3 * max(faster.values())]
    axes.set_xticks(ticks, [f"{each:g}" for each in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", color=results.LIGHT, zorder=0)
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as plain Horovod")
    results.legend_above(figure, columns=3)
    return figure
