"""Prediction: the predicted minibatch of many plans beside the measured one, here and between hosts.

    python benchmarks/run.py prediction                           all networks that this machine can make
    python benchmarks/run.py prediction --only loopback           one machine only

Every job measures model and machines, predicts its plan from that, and then trains it. Jobs share only the
cuts of the plans, which the first job of a setup chooses. Without hosts the networks are left out, and the
output says so.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import jobs
import networks
import results
from jobs import Run
from networks import LOOPBACK, Network
from plans import best_cut
from results import Row

from hybridpipe.files import read_cluster, read_profile, write_json

NOTEWORTHY = 1.15  # two plans whose times differ by more than this must be predicted in the right order
NETWORKS = (LOOPBACK, "1gbit", "100mbit")
MODELS = {
    "vgg": ("digits.toml", ("train.minibatch=256", "train.microbatch=32", "train.epochs=4")),
    "gpt": (
        "gpt.toml",
        ("train.minibatch=64", "train.microbatch=8", "train.epochs=1", "data.args.limit=1536"),
    ),
    "mlp": (
        "digits_mlp.toml",
        ("train.minibatch=512", "train.microbatch=64", "train.epochs=12", "model.args.width=1024"),
    ),
}
FOUR = {"4": (4,), "1-1-1-1": (1, 1, 1, 1), "2-2": (2, 2), "3-1": (3, 1)}
EIGHT = {"8": (8,), "4-4": (4, 4)}


@dataclass(frozen=True)
class Setup:
    """One model on one network, under plans given by their replica counts."""

    model: str
    network: str  # "loopback", or the rate of the links between hosts
    plans: Mapping[str, tuple[int, ...]]

    @property
    def ranks(self) -> int:
        """Number of ranks that every plan uses."""
        return sum(next(iter(self.plans.values())))

    @property
    def name(self) -> str:
        """Name for tables and folders."""
        return f"{self.model}-{self.network}" + ("" if self.ranks == 4 else f"-{self.ranks}")


SETUPS = (
    *(Setup(model, network, FOUR) for network in NETWORKS for model in MODELS),
    Setup("gpt", LOOPBACK, EIGHT),
)


def measure(run: Run) -> Iterator[Row]:
    """Train every plan of every setup, network by network."""
    wanted = {setup.name: [plan for plan in setup.plans if run.wants(setup.name, plan)] for setup in SETUPS}
    for network in NETWORKS:
        here = [setup for setup in SETUPS if setup.network == network and wanted[setup.name]]
        if here and network != LOOPBACK and not networks.are_available(run.options.netcluster):
            print(f"{network} left out: no netcluster, or not root", flush=True)
        elif here:
            with run.network(network) as where:
                for setup in here:
                    for plan in wanted[setup.name]:
                        yield _trained(run, setup, plan, where)


def _trained(run: Run, setup: Setup, plan: str, where: Network) -> Row:
    config, overrides = MODELS[setup.model]
    folder = run.out / setup.name
    if not (folder / "auto" / "plan.json").is_file():
        jobs.train(config, "auto", setup.ranks, overrides, folder / "auto", where)
    file = plan_file(setup.plans[plan], folder / "auto")
    out = folder / plan / f"round{run.round}"
    summary = jobs.train(config, file, setup.ranks, (*overrides, "plan.predict=true"), out, where)
    figures = {
        "seconds": summary["minibatch_seconds_median"],
        "predicted": summary["predicted_minibatch_seconds"],
        "parts": summary.get("parts") or {},
    }
    return Row(setup.name, plan, run.round, figures)


def plan_file(replicas: Sequence[int], measured: Path) -> Path:
    """Write the plan with these replica counts whose cuts are the best by the closed formula."""
    profile, cluster = read_profile(measured / "profile.json"), read_cluster(measured / "cluster.json")
    num_microbatches = json.loads((measured / "plan.json").read_text())["num_microbatches"]
    plan = best_cut(replicas, profile, cluster, num_microbatches)
    file = measured / f"plan-{plan.name}.json"
    write_json(file, plan)
    return file


@dataclass(frozen=True)
class Outcome:
    """A plan's seconds a minibatch, medians over the rounds."""

    setup: str
    plan: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


def outcomes(rows: Sequence[Row]) -> list[Outcome]:
    """Return an outcome for each plan of each setup."""
    return [
        Outcome(setup, plan, *seconds)
        for setup, plan, seconds in results.medians(rows, "predicted", "seconds")
    ]


def misordered(found: Sequence[Outcome]) -> tuple[list[tuple[Outcome, Outcome]], int]:
    """Return the pairs that are predicted in the wrong order, and the number of all pairs that count.

    A pair counts if both plans are of one setup and their measured times differ by more than NOTEWORTHY.
    """
    wrong, num_pairs = [], 0
    for a, b in combinations(found, 2):
        fast, slow = sorted((a, b), key=lambda outcome: outcome.measured)
        if a.setup == b.setup and slow.measured > NOTEWORTHY * fast.measured:
            num_pairs += 1
            if slow.predicted <= fast.predicted:
                wrong.append((fast, slow))
    return wrong, num_pairs


def report(rows: Sequence[Row]) -> str:
    """Return the table, the errors of the predictions, and the pairs in the wrong order."""
    found = outcomes(rows)
    errors = [abs(outcome.ratio - 1) for outcome in found]
    wrong, pairs = misordered(found)
    lines = [
        results.table(_lines(rows, found)),
        f"{len(found)} plans: off by {statistics.median(errors):.0%} in the median, {max(errors):.0%} at "
        f"worst; {len(wrong)} of {pairs} pairs that differ by more than {NOTEWORTHY - 1:.0%} predicted in "
        "the wrong order",
    ]
    lines += [f"wrong order: {fast.setup}, {fast.plan} is faster than {slow.plan}" for fast, slow in wrong]
    return "\n\n".join(lines)


def _lines(rows: Sequence[Row], found: Sequence[Outcome]) -> Iterator[dict[str, str]]:
    for outcome in found:
        parts = [row["parts"] for row in results.of(rows, outcome.setup, outcome.plan)]
        yield {
            "setup": outcome.setup,
            "plan": outcome.plan,
            "predicted": f"{outcome.predicted * 1e3:.1f} ms",
            "measured": f"{outcome.measured * 1e3:.1f} ms",
            "off by": f"{outcome.ratio - 1:+.0%}",
        } | {
            f"{part} (predicted/measured)": " / ".join(
                f"{statistics.median(each[part][which] for each in parts) * 1e3:.1f}"
                for which in ("predicted", "measured")
            )
            for part in parts[0]
        }


def picture(rows: Sequence[Row]) -> Any:
    """Draw predicted over measured times."""
    return draw(outcomes(rows))


def draw(found: Sequence[Outcome]) -> Any:
    """Draw a mark for each plan on logarithmic axes; the grey band is 25 % to each side."""
    markers = {LOOPBACK: "o", "1gbit": "s", "100mbit": "^"}
    colors = {"data parallelism": results.DATA_PARALLEL, "pipelines": results.SYNCHRONOUS}
    figure, axes = results.subplots(height=4.6)
    seconds = [each for outcome in found for each in (outcome.measured, outcome.predicted)]
    edges = [0.8e3 * min(seconds), 1.2e3 * max(seconds)]
    axes.fill_between(edges, [0.75 * e for e in edges], [1.25 * e for e in edges], color=results.LIGHT)
    axes.plot(edges, edges, color=results.DARK, linewidth=0.8)
    for network, marker in markers.items():
        for kind, color in colors.items():
            marked = [
                outcome
                for outcome in found
                if outcome.setup.split("-")[1] == network and ("-" in outcome.plan) == (kind == "pipelines")
            ]
            points = [1e3 * each.measured for each in marked], [1e3 * each.predicted for each in marked]
            if marked:
                axes.scatter(*points, 36, color, marker, label=f"{kind}, {network}", zorder=2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [each for each in (50, 100, 200, 500, 1000, 2000, 5000) if edges[0] <= each <= edges[1]]
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_yticks(ticks, map(str, ticks))
    axes.minorticks_off()
    axes.set_xlabel("measured, ms a minibatch")
    axes.set_ylabel("predicted, ms")
    axes.legend(loc="upper left")
    return figure
