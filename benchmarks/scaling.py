"""Scaling: how much of the ideal many ranks reach, replayed on 1 to 8 hosts and simulated up to 1024.

    python benchmarks/scaling.py --out runs/scaling                  replays and simulations
    python benchmarks/scaling.py --out runs/scaling --replayed ''    simulations only

One of PipeDream's models (see published.py), every rank behind a link of 10 Gbit/s of its own, and more
samples with more ranks: the ideal is as many times the samples a second of one rank. "dp" is our data
parallelism, whose all-reduce overlaps with the backward; "best" is the fastest plan that the planner finds
for a pipeline without a flush. Replays are scaled and slowed down as those of replay.py.

Writes DIR/PLAN-RANKS/summary.json of each replay, DIR/scaling.json, scaling.md and scaling.svg.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import plots
from networks import network
from published import PROFILES, SAMPLES, TEN_GBIT
from replay import Run, rate_of, replay
from tabulate import tabulate

from hybridpipe.files import read_costs, write_json
from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.search.search import search, short_name
from hybridpipe.planning.simulator.predict import predict

SIMULATED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LATENCY_SECONDS = 5e-5


@dataclass(frozen=True)
class Point:
    """One plan on so many ranks; `measured` in samples a second, where it was replayed."""

    kind: str
    ranks: int
    plan: str
    ideal: float
    simulated: float
    measured: float | None
    processor_load: float | None


def plans(profile: ModelProfile, ranks: int) -> Iterator[tuple[str, Plan]]:
    """Data parallelism, and the best plan if it is another one."""
    yield "dp", Plan.data_parallel(profile.num_layers, ranks, ranks)
    yield "best", search(profile, cluster(ranks), 1, PlanRequest("pipedream"))[0].plan


def cluster(ranks: int) -> Cluster:
    """Each rank behind a link of its own."""
    return Cluster.flat(ranks, TEN_GBIT, LATENCY_SECONDS)


def points(model: str, replayed: list[int], scale: float, slow: float, out: Path) -> Iterator[Point]:
    """Smallest first; what is replayed is replayed on as many hosts."""
    profile = read_costs(PROFILES / model / "graph.txt", SAMPLES[model])
    alone = profile.samples / sum(x.forward_seconds + x.backward_seconds for x in profile.layers)
    for ranks in SIMULATED:
        for kind, plan in plans(profile, ranks):
            simulated = predict(plan, profile, cluster(ranks))[1].samples_per_second
            measured = load = None
            if ranks in replayed:
                run = Run(kind, plan, cluster(ranks), 10 if kind == "dp" else None)
                with network(rate_of(scale * slow), ranks) as where:
                    summary = replay(profile, run, scale, out / f"{kind}-{ranks}", where, ranks, slow)
                measured, load = slow * summary["samples_per_second"], summary["processor_load"]
            yield Point(kind, ranks, short_name(plan), ranks * alone, simulated, measured, load)


def report(found: list[Point]) -> str:
    """The table."""
    rows = [
        {
            "ranks": point.ranks,
            "": point.kind,
            "plan": point.plan,
            "simulated": f"{point.simulated:,.0f} samples/s",
            "of the ideal": f"{point.simulated / point.ideal:.0%}",
            "replayed": f"{point.measured:,.0f} samples/s" if point.measured else "-",
            "of the ideal ": f"{point.measured / point.ideal:.0%}" if point.measured else "-",
            "processors": f"{point.processor_load:.0%}" if point.processor_load else "-",
        }
        for point in found
    ]
    return tabulate(rows, headers="keys", tablefmt="github")


def plot(found: list[Point], path: Path) -> None:
    """Share of the ideal over the number of ranks: lines simulated, dots replayed."""
    figure, axes = plots.svg_axes(figsize=(6, 3.5))
    for kind in ("dp", "best"):
        of_kind = [point for point in found if point.kind == kind]
        (line,) = axes.semilogx(
            [p.ranks for p in of_kind], [p.simulated / p.ideal for p in of_kind], base=2, label=kind
        )
        replayed = [p for p in of_kind if p.measured]
        shares = [(p.measured or 0) / p.ideal for p in replayed]
        axes.plot([p.ranks for p in replayed], shares, "o", color=line.get_color(), label=f"{kind}, replayed")
    axes.set_xlabel("ranks")
    axes.set_ylabel("of the ideal")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/scaling"))
    parser.add_argument("--model", default="vgg16", choices=SAMPLES)
    parser.add_argument("--scale", type=float, default=8.0, help="what bytes and bandwidths are divided by")
    parser.add_argument("--slow", type=float, default=4.0, help="how many times as long everything takes")
    parser.add_argument("--replayed", default="1,2,4,8", help="rank counts")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    replayed = [int(count) for count in options.replayed.split(",") if count]
    found = []
    for point in points(options.model, replayed, options.scale, options.slow, out):
        found.append(point)
        print(point, flush=True)
    text = report(found)
    (out / "scaling.md").write_text(text + "\n")
    write_json(out / "scaling.json", {"model": options.model, "points": [asdict(point) for point in found]})
    plot(found, out / "scaling.svg")
    print(f"\n{text}\n\nwritten to {out}")


if __name__ == "__main__":
    main()
