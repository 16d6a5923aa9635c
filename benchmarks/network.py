"""Network: is `auto` the best plan between hosts with slow links, and how far is data parallelism behind?

    python benchmarks/network.py --out runs/network                  all of it, half an hour a round
    python benchmarks/network.py --rates 1gbit --models vgg-digits   one of them
    python benchmarks/network.py --sweep                             minibatches of 16 to 256 at 1 Gbit/s

Four hosts with one rank each train for real, over MPI and Horovod; networks.py makes the hosts. The first job
of a round is `auto`, which measures model and machines; the other plans have the cuts that are best by the
closed formula on what the first round's `auto` has measured. Under `dp` a rank's share is one microbatch, as
in plain Horovod. `auto` takes the best synchronous plan; `auto, pipedream` the best for an asynchronous
pipeline, whose weights are stale, as in the paper.

Rounds are interleaved, each way a fresh job; figures are medians, ratios are taken within a round. Rounds of
earlier calls with the same DIR count on. Writes DIR/network.json, tables in DIR/network.md and a plot in
DIR/network.svg.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import networks
import plots
import programs
from networks import Network
from programs import Way
from rounds import Outcome, line, median_seconds, next_round, number, of, read, times_as_fast, write
from tabulate import tabulate

from hybridpipe.files import read_cluster, read_profile, write_json
from hybridpipe.planning.cost.formula import estimate
from hybridpipe.planning.plan import Plan, StageSpec

NUM_HOSTS = 4
RATES = ("100mbit", "1gbit", "10gbit")
MODELS = {"vgg-digits": 64, "gpt": 16}  # and samples of a minibatch
SWEEP = ("vgg-digits", "1gbit", (16, 32, 64, 128, 256))
MINIBATCHES = 23  # of a job, the warm-up's three among them
MICROBATCHES = 8
HOROVOD = "plain Horovod"
AUTO = Way("auto", "ours", "auto", NUM_HOSTS)
ASYNCHRONOUS = Way("auto, pipedream", "ours", "auto-pipedream", NUM_HOSTS)
PLAIN = Way(HOROVOD, "plain_horovod", ranks=NUM_HOSTS)
# Replica counts; the first two are called dp and straight.
SHAPES = ((4,), (1, 1, 1, 1), (2, 2), (3, 1), (1, 3), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1), (1, 1))
NAMES = {(4,): "dp", (1, 1, 1, 1): "straight"}


@dataclass(frozen=True)
class Setup:
    """One model and minibatch on one network."""

    model: str
    rate: str
    minibatch: int

    @property
    def name(self) -> str:
        """For tables and folders."""
        return f"{self.model}, {self.minibatch} samples, {self.rate}"


def plan_ways(folder: Path) -> list[Way]:
    """For each of SHAPES the plan with the best cuts, by what the `auto` in `folder` has measured."""
    profile, cluster = read_profile(folder / "profile.json"), read_cluster(folder / "cluster.json")
    samples = profile.samples * json.loads((folder / "plan.json").read_text())["num_microbatches"]
    ways = []
    for replicas in SHAPES:
        # A replica of dp takes its share at once, microbatches otherwise are what was measured.
        count = replicas[0] if len(replicas) == 1 else samples // profile.samples
        cuts = combinations(range(1, profile.num_layers), len(replicas) - 1)
        plans = [
            Plan(tuple(map(StageSpec, (0, *c), (*c, profile.num_layers), replicas)), num_microbatches=count)
            for c in cuts
        ]
        best = min(plans, key=lambda plan: estimate(plan, profile, cluster))
        file = folder / f"plan-{best.name}.json"
        write_json(file, best)
        ways.append(Way(NAMES.get(replicas, best.name), "ours", str(file), NUM_HOSTS))
    return ways


def run(setup: Setup, plans: bool, round_: int, hosts: Network, out: Path) -> Iterator[Outcome]:
    """One round of a setup, with all plans or without."""

    def start(way: Way) -> Outcome:
        return programs.start(
            way, setup.model, setup.name, round_, _folder(setup, way, round_, out),
            arguments=arguments, network=hosts,
        )  # fmt: skip

    arguments = ["--minibatch", str(setup.minibatch), "--minibatches", str(MINIBATCHES)]
    arguments += ["--microbatches", str(MICROBATCHES)]
    yield start(AUTO)
    yield start(PLAIN)
    yield start(ASYNCHRONOUS)
    if plans:
        yield from map(start, plan_ways(_folder(setup, AUTO, 0, out)))


def _folder(setup: Setup, way: Way, round_: int, out: Path) -> Path:
    return (
        out / setup.name.replace(", ", "-").replace(" ", "-") / way.name.replace(", ", "-") / f"round{round_}"
    )


def ways_of(outcomes: Sequence[Outcome], group: str) -> list[str]:
    """Fastest first; those that failed last."""
    names = dict.fromkeys(o.way for o in outcomes if o.group == group)
    return sorted(names, key=lambda way: median_seconds(outcomes, group, way) or float("inf"))


def table(outcomes: Sequence[Outcome], group: str) -> str:
    """One setup's."""
    rows = []
    for way in ways_of(outcomes, group):
        found = of(outcomes, group, way)
        seconds = median_seconds(outcomes, group, way)
        rows.append(
            {
                "way": way,
                "plan": found[-1].plan,
                "ms a minibatch": number(seconds * 1e3, digits=0) if seconds else found[-1].error,
                "× plain Horovod": number(times_as_fast(outcomes, group, way, HOROVOD)),
                "× auto": number(times_as_fast(outcomes, group, way, AUTO.name)),
                "loss": number(found[-1].loss, digits=5),
                "rounds": str(len(found)),
            }
        )
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def plot(outcomes: Sequence[Outcome], groups: Sequence[str], path: Path) -> None:
    """Times plain Horovod, on a logarithmic axis: a row a setup, a mark a plan, `auto` filled."""
    figure, axes = plots.svg_axes(figsize=(8, 1 + 0.4 * len(groups)))
    names = list(dict.fromkeys(o.way for o in outcomes))
    for i, way in enumerate(names):
        points = [
            (faster, row)
            for row, group in enumerate(groups)
            if (faster := times_as_fast(outcomes, group, way, HOROVOD)) is not None
        ]
        mark = {"marker": "D", "s": 50} if way == AUTO.name else {"marker": "o", "s": 25}
        axes.scatter([x for x, _ in points], [y for _, y in points], color=f"C{i % 10}", label=way, **mark)
    axes.set_xscale("log")
    axes.set_yticks(range(len(groups)), groups)
    axes.set_xlabel("times plain Horovod")
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/network"))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rates", default=",".join(RATES))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--sweep", action="store_true", help="minibatch sizes instead of plans")
    options = parser.parse_args()
    if not networks.are_available():
        raise SystemExit("network: needs root and netcluster, named by $NETCLUSTER")
    setups = [
        Setup(model, rate, MODELS[model])
        for rate in options.rates.split(",")
        for model in options.models.split(",")
    ]
    if options.sweep:
        model, rate, sizes = SWEEP
        setups = [Setup(model, rate, size) for size in sizes]
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    outcomes = read(out / "network.json")
    for rate in dict.fromkeys(setup.rate for setup in setups):
        with networks.network(rate, NUM_HOSTS) as hosts:
            for _ in range(options.rounds):
                for setup in (each for each in setups if each.rate == rate):
                    round_ = next_round(outcomes, setup.name)
                    for outcome in run(setup, not options.sweep, round_, hosts, out):
                        print(line(outcome), flush=True)
                        outcomes.append(outcome)
                        write(out / "network.json", outcomes)
    groups = list(dict.fromkeys(o.group for o in outcomes))
    text = "\n\n".join(f"**{group}**\n\n{table(outcomes, group)}" for group in groups)
    (out / "network.md").write_text(text + "\n")
    plot(outcomes, groups, out / "network.svg")
    print(f"\n{text}\n\nwritten to {out}")


if __name__ == "__main__":
    main()
