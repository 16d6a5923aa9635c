"""Replay: PipeDream's published table on 16 ranks of 4 hosts, by the real runtime, computing by sleeping.

    python benchmarks/replay.py --out runs/replay --models vgg16          one model; some minutes
    python benchmarks/replay.py --out runs/replay --models ''             the table of what is there

Reads PipeDream's layer profiles (see published.py). Bytes and links are divided by --scale: with 32, a link
of 10 Gbit/s is one of 312.5 Mbit/s. Where the messages of 16 ranks are too much for these processors,
--slow gives them so many times as long: times are multiplied by it, and links divided. The hosts are made by
`netcluster` (see networks.py); where $HYBRIDPIPE_MPIRUN_FLAGS names hosts, with links as slow as scale and
slow ask for, those are taken.

Data parallelism is replayed three times. "paper": the all-reduce begins when the whole backward is done, and
the four ranks of a host all send to another host, so that each has a quarter of the link; "after": the same,
with a ring that enters and leaves each host once; "ours": that ring, overlapped with the backward. The plans
run as PipeDream does, without a flush.

Writes DIR/MODEL/RUN/summary.json, and DIR/replay.json, replay.md and replay.svg from all that are there.
"""

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jobs
import plots
from networks import Network, network
from published import CLUSTERS, PROFILES, SAMPLES, TEN_GBIT, published
from tabulate import tabulate

from hybridpipe.files import read_costs, write_json
from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.scale import scaled_cluster
from hybridpipe.planning.search.search import search

RANKS, HOSTS = 16, 4
BY_HOST = CLUSTERS["4×4, 10 Gbit/s a server, shared"]
ACROSS = Cluster.flat(RANKS, TEN_GBIT / HOSTS, 5e-5)  # four ranks send over each host's link at once
# Speed-up of an epoch over data parallelism on 4×4 (PipeDream, SOSP 2019, table 1), as far as we have it.
PAPER = {"vgg16": "5.28×", "resnet50": "1.00×", "alexnet": "-", "gnmt": "-"}
BASELINES = ("dp-paper", "dp-after", "dp-ours")
# Every rank's ring neighbour is the next rank, as with Horovod's other backends; Open MPI's default would
# choose by size, and send more than a ring does. What is fused is scaled like everything else.
SETTINGS = {
    "OMPI_MCA_coll": "^han",
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
    # Whoever waits in MPI looks every 0.1 ms: 16 ranks that look all the time leave no processor free.
    "OMPI_MCA_threads_pthreads_nanosleep_time": "100000",
    # Each look of Horovod's thread is a message round of all replicas, which 16 ranks on few processors feel.
    "HOROVOD_CYCLE_TIME": "20",
}
FUSED_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Run:
    """One replay: what runs, and where the planner believes it to run."""

    name: str
    plan: Plan
    cluster: Cluster
    minibatches: int | None = None
    flags: str = ""
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """Seconds are those of a minibatch of one rank, the samples that the profile is of, at full speed."""

    model: str
    run: str
    plan: str
    measured: float
    predicted: float
    processor_load: float
    scale: float
    slow: float

    @property
    def off_by(self) -> float:
        """The simulator's error, relative to the measurement."""
        return self.predicted / self.measured - 1


def runs(model: str, profile: ModelProfile) -> Iterator[Run]:
    """The baselines, the published plan, and ours if it is another one."""
    dp = Plan.data_parallel(profile.num_layers, RANKS, RANKS)
    yield Run("dp-paper", dp, ACROSS, 6, "--rank-by node", ("--no-overlap",))
    yield Run("dp-after", dp, BY_HOST, 6, "", ("--no-overlap",))
    yield Run("dp-ours", dp, BY_HOST, 6)
    theirs = published(model, profile, BY_HOST)
    ours = search(profile, BY_HOST, 1, PlanRequest("pipedream"))[0].plan
    plans = {"published": theirs, "ours": ours}
    for name, plan in plans.items():
        if plan is not None and plan.num_stages > 1 and not (name == "ours" and plan == theirs):
            yield Run(name, plan, BY_HOST)


def replay(
    profile: ModelProfile,
    run: Run,
    scale: float,
    out: Path,
    where: Network,
    ranks: int = RANKS,
    slow: float = 1.0,
) -> dict:
    """The summary of one replay, whose times are `slow` times as long."""
    out.mkdir(parents=True, exist_ok=True)
    files = {
        "profile": slowed(profile, slow),
        "plan": replace(run.plan, predicted=None),
        "cluster": scaled_cluster(run.cluster, slow),
    }
    write_json(out / "setting.json", {"slow": slow})
    words = ["replay", "--scale", str(scale), *run.options]
    for name, value in files.items():
        write_json(out / f"{name}.json", value)
        words += [f"--{name}", str(out / f"{name}.json")]
    if run.minibatches:
        words += ["--minibatches", str(run.minibatches)]
    settings = SETTINGS | {"HOROVOD_FUSION_THRESHOLD": str(round(FUSED_BYTES / scale))}
    return jobs.run(words, ranks, out, where.with_settings(settings).with_flags(run.flags))


def slowed(profile: ModelProfile, slow: float) -> ModelProfile:
    """All layers take so many times as long."""
    fields = ("forward_seconds", "backward_seconds", "update_seconds")
    return replace(
        profile,
        layers=tuple(
            replace(layer, **{name: getattr(layer, name) * slow for name in fields})
            for layer in profile.layers
        ),
    )


def rate_of(scale: float) -> str:
    """Of a link of 10 Gbit/s, as `netcluster` takes it."""
    return f"{10e3 / scale:.1f}mbit"


def outcomes(folder: Path) -> list[Outcome]:
    """All that were measured into the folder."""
    found = []
    for model in PAPER:
        for path in sorted(folder.glob(f"{model}/*/summary.json")):
            summary, plan, setting = (
                json.loads(path.with_name(f"{name}.json").read_text())
                for name in ("summary", "plan", "setting")
            )
            measured, predicted = (
                summary[name] / plan["num_microbatches"] / setting["slow"]
                for name in ("minibatch_seconds_median", "predicted_minibatch_seconds")
            )
            found.append(
                Outcome(
                    model,
                    path.parent.name,
                    summary["plan"],
                    measured,
                    predicted,
                    summary["processor_load"],
                    summary["scale"],
                    setting["slow"],
                )
            )
    return found


def report(found: list[Outcome]) -> str:
    """Two tables: the speed-ups beside the published ones, and every replay beside its simulation."""
    rows = []
    for model in dict.fromkeys(outcome.model for outcome in found):
        by_run = {outcome.run: outcome for outcome in found if outcome.model == model}
        plans = [by_run[name] for name in ("published", "ours") if name in by_run]
        for outcome in plans or [o for name, o in by_run.items() if name == "dp-ours"]:
            ratios = {
                f"over {name}": f"{by_run[name].measured / outcome.measured:.2f}×" if name in by_run else "-"
                for name in BASELINES
            }
            paper = "-" if outcome.run == "ours" else PAPER[model]
            rows.append({"model": model, "plan": outcome.plan, **ratios, "the paper": paper})
    replays = [
        {
            "model": o.model,
            "run": o.run,
            "plan": o.plan,
            "scale": f"{o.scale:g}",
            "slow": f"{o.slow:g}",
            "simulated": f"{o.predicted * 1e3:.1f} ms",
            "measured": f"{o.measured * 1e3:.1f} ms",
            "off by": f"{o.off_by:+.0%}",
            "processors": f"{o.processor_load:.0%}",
        }
        for o in found
    ]
    tables = [tabulate(each, headers="keys", tablefmt="github") for each in (rows, replays)]
    return "\n\n".join(tables)


def plot(found: list[Outcome], path: Path) -> None:
    """Milliseconds a minibatch, a pair of bars for each replay."""
    figure, axes = plots.svg_axes(figsize=(7, 0.3 * len(found) + 1))
    places = range(len(found))
    axes.barh([p - 0.2 for p in places], [o.measured * 1e3 for o in found], 0.4, label="measured")
    axes.barh([p + 0.2 for p in places], [o.predicted * 1e3 for o in found], 0.4, label="simulated")
    axes.set_yticks(list(places), [f"{o.model} {o.run} ({o.plan})" for o in found], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ms a minibatch of one rank")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/replay"))
    parser.add_argument("--models", default=",".join(PAPER))
    parser.add_argument("--scale", type=float, default=32.0)
    parser.add_argument("--slow", type=float, default=1.0, help="how many times as long everything takes")
    parser.add_argument("--runs", default="dp-paper,dp-after,dp-ours,published,ours")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    models = [name for name in options.models.split(",") if name]
    given = "HYBRIDPIPE_MPIRUN_FLAGS" in os.environ or not models
    with (
        nullcontext(jobs.HERE)
        if given
        else network(rate_of(options.scale * options.slow), HOSTS, RANKS // HOSTS) as where
    ):
        for model in models:
            profile = read_costs(PROFILES / model / "graph.txt", SAMPLES[model])
            for run in runs(model, profile):
                if run.name in options.runs.split(","):
                    folder = out / model / run.name
                    replay(profile, run, options.scale, folder, where, slow=options.slow)
                    print((folder / "log.txt").read_text(), end="", flush=True)
    found = outcomes(out)
    text = report(found)
    (out / "replay.md").write_text(text + "\n")
    write_json(out / "replay.json", {"outcomes": [asdict(each) | {"off_by": each.off_by} for each in found]})
    plot(found, out / "replay.svg")
    print(f"\n{text}\n\nwritten to {out}")


if __name__ == "__main__":
    main()
