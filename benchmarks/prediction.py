"""Prediction: does the planner's minibatch come true? Trains many plans; sets prediction beside measurement.

    python benchmarks/prediction.py --out runs/prediction            all networks that this machine can make
    python benchmarks/prediction.py --networks loopback --rounds 1   one machine only

Every job measures model and machines first, predicts its plan from that, and then trains it; nothing is
carried over from one job to the next. Jobs are interleaved over the rounds, and the figures are medians.
Writes DIR/prediction.json, a table in DIR/prediction.md and a scatter plot in DIR/prediction.svg.

The network setups need `netcluster` (hosts with limited links on one machine, as root) from
../shared/cluster or $NETCLUSTER; without it they are left out, and the output says so.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import jobs
import networks
import plots
from tabulate import tabulate

from hybridpipe.files import read_cluster, read_profile, write_json
from hybridpipe.planning.cost.formula import estimate
from hybridpipe.planning.plan import Plan, StageSpec

NOTEWORTHY = 1.15  # two plans whose times differ by more than this must be predicted in the right order


@dataclass(frozen=True)
class Setup:
    """One model on one network, under plans given by their replica counts."""

    name: str
    network: str  # "loopback", or the rate of the links between hosts
    config: str
    overrides: tuple[str, ...]
    ranks: int
    plans: tuple[tuple[int, ...], ...]


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
FOUR = ((4,), (1, 1, 1, 1), (2, 2), (3, 1))
EIGHT = ((8,), (4, 4))


def setups() -> Iterator[Setup]:
    """Every model on every network."""
    for network in ("loopback", "1gbit", "100mbit"):
        for model, (config, overrides) in MODELS.items():
            yield Setup(f"{model}-{network}", network, config, overrides, 4, FOUR)
    config, overrides = MODELS["gpt"]
    yield Setup("gpt-loopback-8", "loopback", config, overrides, 8, EIGHT)


@dataclass(frozen=True)
class Outcome:
    """A plan's minibatch, in seconds: medians over the rounds."""

    setup: str
    plan: str
    predicted: float
    measured: float
    parts: dict[str, dict[str, float]]

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


def plan_files(setup: Setup, folder: Path) -> dict[str, str]:
    """For each of the setup's replica counts the cuts that are best by the closed formula, as plan files."""
    profile, cluster = read_profile(folder / "profile.json"), read_cluster(folder / "cluster.json")
    num_microbatches = json.loads((folder / "plan.json").read_text())["num_microbatches"]
    files = {}
    for replicas in setup.plans:
        cuts = combinations(range(1, profile.num_layers), len(replicas) - 1)
        plans = [
            Plan(
                tuple(map(StageSpec, (0, *inner), (*inner, profile.num_layers), replicas)),
                num_microbatches=num_microbatches,
            )
            for inner in cuts
        ]
        best = min(plans, key=lambda plan: estimate(plan, profile, cluster))
        files[best.name] = str(folder / f"plan-{best.name}.json")
        write_json(files[best.name], best)
    return files


def run(chosen: Sequence[Setup], rounds: int, out: Path) -> list[Outcome]:
    """Train everything, network by network, interleaved over the rounds."""
    outcomes = []
    for network in dict.fromkeys(setup.network for setup in chosen):
        here = [setup for setup in chosen if setup.network == network]
        with networks.network(network) as where:

            def train(setup: Setup, plan: str, out: Path, where: networks.Network = where) -> dict:
                return jobs.train(setup.config, plan, setup.ranks, setup.overrides, out, where)

            plans = {}
            for setup in here:
                train(setup, "auto", out / setup.name / "auto")
                plans[setup] = plan_files(setup, out / setup.name / "auto")
            runs: dict[tuple[Setup, str], list[dict]] = {}
            for r in range(rounds):
                for setup in here:
                    for name, file in plans[setup].items():
                        summary = train(setup, file, out / setup.name / name / f"round{r}")
                        runs.setdefault((setup, name), []).append(summary)
                        print(_line(_outcome(setup, name, [summary])), flush=True)
            outcomes += [_outcome(setup, name, found) for (setup, name), found in runs.items()]
    return outcomes


def _outcome(setup: Setup, plan: str, summaries: Sequence[dict]) -> Outcome:
    def median(key: str) -> float:
        return statistics.median(summary[key] for summary in summaries)

    parts = {
        part: {
            kind: statistics.median(summary["parts"][part][kind] for summary in summaries)
            for kind in ("predicted", "measured")
        }
        for part in summaries[0].get("parts") or {}
    }
    predicted, measured = median("predicted_minibatch_seconds"), median("minibatch_seconds_median")
    return Outcome(setup.name, plan, predicted, measured, parts)


def _line(outcome: Outcome) -> str:
    return (
        f"{outcome.setup:16} {outcome.plan:8} predicted {outcome.predicted * 1e3:8.1f} ms, "
        f"measured {outcome.measured * 1e3:8.1f} ms, {outcome.ratio - 1:+.0%}"
    )


def misordered(outcomes: Sequence[Outcome]) -> tuple[list[tuple[Outcome, Outcome]], int]:
    """Pairs of one setup whose measured times differ by more than NOTEWORTHY but are predicted the other
    way round, and the number of such pairs looked at."""
    wrong, looked_at = [], 0
    for a, b in combinations(outcomes, 2):
        fast, slow = sorted((a, b), key=lambda outcome: outcome.measured)
        if a.setup == b.setup and slow.measured > NOTEWORTHY * fast.measured:
            looked_at += 1
            if slow.predicted <= fast.predicted:
                wrong.append((fast, slow))
    return wrong, looked_at


def report(outcomes: Sequence[Outcome]) -> str:
    """The table and what it comes to."""
    kinds = list(outcomes[0].parts)
    rows = [
        {
            "setup": outcome.setup,
            "plan": outcome.plan,
            "predicted": f"{outcome.predicted * 1e3:.1f} ms",
            "measured": f"{outcome.measured * 1e3:.1f} ms",
            "off by": f"{outcome.ratio - 1:+.0%}",
        }
        | {
            f"{kind} (predicted/measured)": " / ".join(
                f"{outcome.parts[kind][which] * 1e3:.1f}" for which in ("predicted", "measured")
            )
            for kind in kinds
        }
        for outcome in outcomes
    ]
    errors = [abs(outcome.ratio - 1) for outcome in outcomes]
    wrong, pairs = misordered(outcomes)
    lines = [
        tabulate(rows, headers="keys", tablefmt="github"),
        "",
        f"{len(outcomes)} plans: off by {statistics.median(errors):.0%} in the median, {max(errors):.0%} at "
        f"worst; {len(wrong)} of {pairs} pairs that differ by more than {NOTEWORTHY - 1:.0%} predicted in "
        "the wrong order",
    ]
    lines += [f"wrong order: {fast.setup}, {fast.plan} is faster than {slow.plan}" for fast, slow in wrong]
    return "\n".join(lines)


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Predicted over measured, one mark a plan, on logarithmic axes."""
    figure, axes = plots.svg_axes(figsize=(5, 5))
    for setup in dict.fromkeys(outcome.setup for outcome in outcomes):
        of_setup = [outcome for outcome in outcomes if outcome.setup == setup]
        axes.loglog(
            [o.measured for o in of_setup], [o.predicted for o in of_setup], "o", markersize=4, label=setup
        )
    figures = [figure for o in outcomes for figure in (o.measured, o.predicted)]
    edges = [min(figures), max(figures)]
    axes.plot(edges, edges, color="grey", linewidth=0.8)
    axes.fill_between(edges, [0.75 * e for e in edges], [1.25 * e for e in edges], color="grey", alpha=0.15)
    axes.set_xlabel("measured seconds a minibatch")
    axes.set_ylabel("predicted")
    axes.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/prediction"))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--networks", default="loopback,1gbit,100mbit")
    parser.add_argument("--models", default=",".join(MODELS))
    options = parser.parse_args()
    wanted = options.networks.split(",")
    if not networks.are_available():
        print("no netcluster here, or not root: loopback only", flush=True)
        wanted = [networks.LOOPBACK]
    models = options.models.split(",")
    chosen = [s for s in setups() if s.network in wanted and s.name.split("-")[0] in models]
    out = options.out.resolve()
    outcomes = run(chosen, options.rounds, out)
    text = report(outcomes)
    (out / "prediction.md").write_text(text + "\n")
    write_json(out / "prediction.json", {"outcomes": [asdict(outcome) for outcome in outcomes]})
    plot(outcomes, out / "prediction.svg")
    print(f"\n{text}\n\nwritten to {out}")


if __name__ == "__main__":
    main()
