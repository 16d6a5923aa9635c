"""Replay: PipeDream's published table on 16 ranks of 4 hosts, messages real, computing by sleeping.

    python benchmarks/run.py replay                                   15 minutes
    python benchmarks/run.py replay --only gnmt --slow 8              one model

The layer profiles are PipeDream's (see published.py). Bytes and bandwidths are divided by --scale: with 32, a
link of 10 Gbit/s becomes one of 312.5 Mbit/s. If the messages of 16 ranks are too much for this machine's
processors, --slow stretches time: seconds are multiplied by it, and bandwidths divided. Hosts that
$HYBRIDPIPE_MPIRUN_FLAGS names must have links of that reduced bandwidth.

Data parallelism is replayed three times. In "dp-paper" the all-reduce begins after the whole backward, and
the four ranks of a host all send to another host, so that each has a quarter of the link. In "dp-after" it
begins at the same time, but its ring enters and leaves each host once. In "dp-ours" that ring overlaps with
the backward. The plans run without a flush, as in PipeDream. Seconds are those of one rank's minibatch, the
samples of the profile, at full speed.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jobs
import results
from cases.published import CLUSTERS, TEN_GBIT, profile_of, published
from networks import Network
from results import Row, milliseconds

from hybridpipe.files import read_plan, write_json
from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.scale import scaled_cluster
from hybridpipe.planning.search.search import search

RANKS, HOSTS = 16, 4
BY_HOST = CLUSTERS["4×4, 10 Gbit/s a server, shared"]
ACROSS = Cluster.flat(RANKS, TEN_GBIT / HOSTS, 5e-5)  # four ranks send over each host's link at once
# Speed-up of an epoch over data parallelism on 4×4 (PipeDream, SOSP 2019, table 1), as far as it is known.
PAPER = {"vgg16": "5.28×", "resnet50": "1.00×", "alexnet": "-", "gnmt": "-"}
BASELINES, PLANS = ("dp-paper", "dp-after", "dp-ours"), ("published", "ours")
# Every rank's neighbour in a ring is the next rank, as with Horovod's other backends; Open MPI's default
# would choose by size, and send more than a ring does. The fusion buffer is scaled as all bytes are.
SETTINGS = {
    "OMPI_MCA_coll": "^han",
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
    # A rank that waits in MPI polls every 0.1 ms: 16 ranks that poll all the time leave no processor free.
    "OMPI_MCA_threads_pthreads_nanosleep_time": "100000",
    # In each cycle of Horovod's thread all replicas exchange messages, which slows 16 ranks on few
    # processors.
    "HOROVOD_CYCLE_TIME": "20",
}
FUSED_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Replay:
    """A plan to replay, and the cluster that it is predicted for."""

    name: str
    plan: Plan
    cluster: Cluster
    minibatches: int | None = None
    flags: str = ""
    options: tuple[str, ...] = ()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options, which `scaling` has, too."""
    parser.add_argument("--scale", type=float, default=8.0, help="divisor of bytes and bandwidths")
    parser.add_argument("--slow", type=float, default=4.0, help="factor of all times")


def measure(run: jobs.Run) -> Iterator[Row]:
    """Run every replay of every model."""
    wanted = {model: {name for name in (*BASELINES, *PLANS) if run.wants(model, name)} for model in PAPER}
    if not any(wanted.values()):
        return
    with run.network(rate_of(run), HOSTS, RANKS // HOSTS) as where:
        for model in PAPER:
            profile = profile_of(model)
            for each in replays(model, profile) if wanted[model] else ():
                if each.name in wanted[model]:
                    out = run.out / model / each.name / f"round{run.round}"
                    yield Row(model, each.name, run.round, replayed(run, profile, each, out, where))


def replays(model: str, profile: ModelProfile) -> Iterator[Replay]:
    """Yield the baselines, the published plan, and ours if it differs."""
    dp = Plan.data_parallel(profile.num_layers, RANKS, RANKS)
    yield Replay("dp-paper", dp, ACROSS, 6, "--rank-by node", ("--no-overlap",))
    yield Replay("dp-after", dp, BY_HOST, 6, "", ("--no-overlap",))
    yield Replay("dp-ours", dp, BY_HOST, 6)
    theirs = published(model, profile, BY_HOST)
    ours = search(profile, BY_HOST, 1, PlanRequest("pipedream"))[0].plan
    for name, plan in zip(PLANS, (theirs, ours), strict=True):
        if plan is not None and plan.num_stages > 1 and not (name == "ours" and plan == theirs):
            yield Replay(name, plan, BY_HOST)


def replayed(
    run: jobs.Run, profile: ModelProfile, replay: Replay, out: Path, where: Network, ranks: int = RANKS
) -> dict[str, Any]:
    """Run a replay and return its figures at full speed."""
    scale, slow = run.options.scale, run.options.slow
    out.mkdir(parents=True, exist_ok=True)
    files = {
        "profile": slowed(profile, slow),
        "plan": replace(replay.plan, predicted=None),
        "cluster": scaled_cluster(replay.cluster, slow),
    }
    words = ["replay", "--scale", str(scale), *replay.options]
    for name, value in files.items():
        write_json(out / f"{name}.json", value)
        words += [f"--{name}", str(out / f"{name}.json")]
    if replay.minibatches:
        words += ["--minibatches", str(replay.minibatches)]
    settings = SETTINGS | {"HOROVOD_FUSION_THRESHOLD": str(round(FUSED_BYTES / scale))}
    summary = jobs.command(words, ranks, out, where.with_settings(settings).with_flags(replay.flags))
    microbatches = read_plan(out / "plan.json").num_microbatches
    return {
        "plan": summary["plan"],
        "seconds": summary["minibatch_seconds_median"] / microbatches / slow,
        "simulated": summary["predicted_minibatch_seconds"] / microbatches / slow,
        "samples_per_second": summary["samples_per_second"] * slow,
        "processor_load": summary["processor_load"],
        "scale": scale,
        "slow": slow,
    }


def slowed(profile: ModelProfile, slow: float) -> ModelProfile:
    """Return the profile with all times multiplied."""
    fields = ("forward_seconds", "backward_seconds", "update_seconds")
    return replace(
        profile,
        layers=tuple(
            replace(layer, **{name: getattr(layer, name) * slow for name in fields})
            for layer in profile.layers
        ),
    )


def rate_of(run: jobs.Run) -> str:
    """Return the reduced rate of a link of 10 Gbit/s, as an argument of `netcluster`."""
    return f"{10e3 / (run.options.scale * run.options.slow):.1f}mbit"


def report(rows: Sequence[Row]) -> str:
    """Return two tables: the speed-ups beside the published ones, and every replay beside its simulation."""
    return f"{results.table(_speed_ups(rows))}\n\n{results.table(_replays(rows))}"


def _speed_ups(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    for model in results.groups(rows):
        names = results.ways(rows, model)
        for name in [name for name in PLANS if name in names] or [
            each for each in names if each == "dp-ours"
        ]:
            ratios = {
                f"over {baseline}": f"{faster:.2f}×"
                if (faster := results.times_as_fast(rows, model, name, baseline))
                else "-"
                for baseline in BASELINES
            }
            plan, paper = results.last(rows, model, name)["plan"], "-" if name == "ours" else PAPER[model]
            yield {"model": model, "plan": plan, **ratios, "the paper": paper}


def _replays(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    for model, name, (measured, simulated) in results.medians(rows, "seconds", "simulated"):
        latest = results.last(rows, model, name)
        yield {
            "model": model,
            "run": name,
            "plan": latest["plan"],
            "scale": f"{latest['scale']:g}",
            "slow": f"{latest['slow']:g}",
            "simulated": f"{milliseconds(simulated, 1)} ms",
            "measured": f"{milliseconds(measured, 1)} ms",
            "off by": f"{simulated / measured - 1:+.0%}",
            "processors": f"{latest['processor_load']:.0%}",
        }


def picture(rows: Sequence[Row]) -> Any:
    """Draw measured and simulated minibatches."""
    seconds = {(model, name): found for model, name, found in results.medians(rows, "seconds", "simulated")}
    return draw(seconds, {replay: results.last(rows, *replay)["plan"] for replay in seconds})


def draw(seconds: Mapping[tuple[str, str], Sequence[float]], plans: Mapping[tuple[str, str], str]) -> Any:
    """Draw a pair of bars for each replay: the measured one is dark, the simulated one pale."""
    figure, axes = results.subplots(height=1.0 + 0.33 * len(seconds))
    colors = [results.DATA_PARALLEL if name in BASELINES else results.ASYNCHRONOUS for _, name in seconds]
    for kind, offset, alpha in (("measured", -0.2, 1.0), ("simulated", 0.2, 0.45)):
        lengths = [1e3 * each[kind == "simulated"] for each in seconds.values()]
        places = [i + offset for i in range(len(seconds))]
        axes.barh(places, lengths, 0.38, color=colors, alpha=alpha)
    for label, color, alpha in (
        ("data parallelism: measured", results.DATA_PARALLEL, 1.0),
        ("simulated", results.DATA_PARALLEL, 0.45),
        ("pipelines without a flush: measured", results.ASYNCHRONOUS, 1.0),
        ("simulated", results.ASYNCHRONOUS, 0.45),
    ):
        axes.barh(0, 0, color=color, alpha=alpha, label=label)
    axes.set_yticks(
        range(len(seconds)), [f"{model} {name} ({plans[model, name]})" for model, name in seconds]
    )
    axes.invert_yaxis()
    axes.set_xlabel("ms a minibatch of one rank")
    axes.legend(loc="lower right")
    return figure
