"""Replay: PipeDream's published table on 16 ranks of 4 hosts, by the runtime, computing by sleeping.

    python benchmarks/run.py replay                                   15 minutes
    python benchmarks/run.py replay --only gnmt --slow 8              one model

Reads PipeDream's layer profiles (see published.py). Bytes and links are divided by --scale: with 32, a link
of 10 Gbit/s is one of 312.5 Mbit/s. Where the messages of 16 ranks are too much for these processors,
--slow gives them so many times as long: times are multiplied by it, and links divided. Where
$HYBRIDPIPE_MPIRUN_FLAGS names hosts, they are to have links as slow as scale and slow ask for.

Data parallelism is replayed three times. "dp-paper": the all-reduce begins when the whole backward is done,
and the four ranks of a host all send to another host, so that each has a quarter of the link; "dp-after": the
same, with a ring that enters and leaves each host once; "dp-ours": that ring, overlapped with the backward.
The plans run as PipeDream does, without a flush. Seconds are those of a minibatch of one rank, the samples
that the profile is of, at full speed.
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
# Speed-up of an epoch over data parallelism on 4×4 (PipeDream, SOSP 2019, table 1), as far as we have it.
PAPER = {"vgg16": "5.28×", "resnet50": "1.00×", "alexnet": "-", "gnmt": "-"}
BASELINES, PLANS = ("dp-paper", "dp-after", "dp-ours"), ("published", "ours")
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
class Replay:
    """A plan to replay, and the cluster that the planner believes it to run on."""

    name: str
    plan: Plan
    cluster: Cluster
    minibatches: int | None = None
    flags: str = ""
    options: tuple[str, ...] = ()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its own, and those of `scaling`."""
    parser.add_argument("--scale", type=float, default=8.0, help="what bytes and bandwidths are divided by")
    parser.add_argument("--slow", type=float, default=4.0, help="how many times as long everything takes")


def measure(run: jobs.Run) -> Iterator[Row]:
    """Every replay of every model."""
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
    """The baselines, the published plan, and ours if it is another one."""
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
    """The figures of one replay, at full speed."""
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
    """All layers take so many times as long."""
    fields = ("forward_seconds", "backward_seconds", "update_seconds")
    return replace(
        profile,
        layers=tuple(
            replace(layer, **{name: getattr(layer, name) * slow for name in fields})
            for layer in profile.layers
        ),
    )


def rate_of(run: jobs.Run) -> str:
    """Of a link of 10 Gbit/s, as `netcluster` takes it."""
    return f"{10e3 / (run.options.scale * run.options.slow):.1f}mbit"


def report(rows: Sequence[Row]) -> str:
    """Two tables: the speed-ups beside the published ones, and every replay beside its simulation."""
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
    for model, name, measured, simulated in times(rows):
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


def times(rows: Sequence[Row]) -> Iterator[tuple[str, str, float, float]]:
    """Model, replay, measured and simulated seconds: medians over the rounds."""
    for model in results.groups(rows):
        for name in results.ways(rows, model):
            measured, simulated = (
                results.median(rows, model, name, figure) or 0.0 for figure in ("seconds", "simulated")
            )
            yield model, name, measured, simulated


def picture(rows: Sequence[Row]) -> Any:
    """A picture of measured and simulated minibatches."""
    plans = {(model, name): results.last(rows, model, name)["plan"] for model, name, *_ in times(rows)}
    return draw({(model, name): (a, b) for model, name, a, b in times(rows)}, plans)


def draw(seconds: Mapping[tuple[str, str], tuple[float, float]], plans: Mapping[tuple[str, str], str]) -> Any:
    """A pair of bars for each replay: measured ones are full, simulated ones are pale."""
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
