"""Groups: what two groups learn and send beside data parallelism, and a minibatch's time between sites.

    python benchmarks/run.py groups                        both parts, as root with netcluster
    python benchmarks/run.py groups --only fashion         learning of one example

Learning: two groups of one rank, and data parallelism on two ranks, from the same weights, with the same
samples and hyperparameters. Sites: two hosts of two ranks at 100 Mbit/s; the time is that of whole epochs, so
it includes exchanges. Predictions are `plan --groups`' from what the first job has measured.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jobs
import results
from jobs import Run
from results import Row, milliseconds, number

from hybridpipe.files import read_cluster, read_profile
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.search.groups import forecast_groups

INTERVALS = (8, 32)
RULES = ("average", "elastic", "diloco")
LEARNING = {  # of an example: what of its data is used, and the metric
    "fashion": (("data.args.limit=5120", "data.validation_args.limit=2000", "train.epochs=6"), "accuracy"),
    "gpt": (("data.args.limit=1024", "data.validation_args.limit=128", "train.epochs=6"), "loss"),
}
SITES, RATE, MINIBATCH = "sites", "100mbit", 64
EPOCHS = 4  # of 23 minibatches; the first one warms up
DATA_PARALLEL = "data parallelism"


def measure(run: Run) -> Iterator[Row]:
    """Train every example every way, then between the sites."""
    for example in LEARNING:
        for way, overrides in _ways([(rule, every) for every in INTERVALS for rule in RULES]):
            if run.wants(example, way):
                yield _learnt(run, example, way, overrides)
    if run.wants(SITES, DATA_PARALLEL):
        with run.network(RATE, num_hosts=2, ranks_per_host=2) as network:
            yield from _between_sites(run, network)


def _ways(groups: Sequence[tuple[str, int]]) -> Iterator[tuple[str, list[str]]]:
    yield DATA_PARALLEL, []
    for rule, every in [("average", 1), *groups]:
        yield f"{rule}, {every}", ["groups.count=2", f"groups.rule={rule}", f"groups.every={every}"]


def _learnt(run: Run, example: str, way: str, overrides: list[str]) -> Row:
    limits, metric = LEARNING[example]
    out = run.out / example / way.replace(", ", "-").replace(" ", "-") / f"round{run.round}"
    seed = [f"train.seed={run.round}"]
    summary = jobs.train(f"{example}.toml", "dp", 2, [*limits, *overrides, *seed], out)
    values = [epoch["validation"][metric] for epoch in summary["epochs"]]
    sent = summary["bytes_between_groups"] + summary["bytes_allreduced"]
    return Row(example, way, run.round, {"values": values, "bytes": sent / summary["minibatches"]})


def _between_sites(run: Run, network: jobs.Network) -> Iterator[Row]:
    files: Path | None = None
    for way, overrides in _ways([("average", 8), ("average", 32)]):
        for plan in ("dp", "straight"):
            name = f"{way}, {plan}"
            out = run.out / SITES / name.replace(", ", "-").replace(" ", "-") / f"round{run.round}"
            summary = jobs.train("digits.toml", plan, 4, [*overrides, f"train.epochs={EPOCHS}"], out, network)
            files = files or out  # the first one has measured all ranks
            steady = summary["epochs"][1:]
            per_epoch = summary["minibatches"] / EPOCHS
            predicted = summary["predicted_minibatch_seconds"]
            if overrides:
                every = int(overrides[-1].partition("=")[2])
                profile, cluster = read_profile(files / "profile.json"), read_cluster(files / "cluster.json")
                found = forecast_groups(profile, cluster, MINIBATCH, PlanRequest(), 2, every)
                predicted += found.exchange_seconds / every
            figures = {"bytes": _crossing(summary), "predicted": predicted}
            figures["seconds"] = sum(epoch["seconds"] for epoch in steady) / len(steady) / per_epoch
            yield Row(SITES, name, run.round, figures)


def _crossing(summary: dict[str, Any]) -> float | None:
    """Return the bytes a minibatch between the sites, both ways; None for a pipeline across them.

    The ring of an all-reduce over four ranks crosses the link once each way, with 2 x 3/4 of the gradients;
    what is reported as all-reduced counts them for each rank.
    """
    if summary["groups"] == 1 and summary["bytes_sent_p2p"]:
        return None
    sent = summary["bytes_between_groups"] if summary["groups"] > 1 else 3 / 4 * summary["bytes_allreduced"]
    return sent / summary["minibatches"]


def report(rows: Sequence[Row]) -> str:
    """Return a table of what is learnt, and one of the time between sites."""
    learnt = [row for row in rows if row.group != SITES]
    return "\n\n".join(filter(None, [results.table(_learning(learnt)), results.table(_sites(rows))]))


def _megabytes(num_bytes: float | None) -> str:
    return "" if num_bytes is None else number(num_bytes / 1e6)


def _learning(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    for row in rows:
        epochs = {f"epoch {i}": number(value, 3) for i, value in enumerate(row["values"], 1)}
        yield {"example": row.group, "way": row.way, **epochs, "MB a minibatch": number(row["bytes"] / 1e6)}


def _sites(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    for way in results.ways(rows, SITES):
        predicted, seconds = (results.median(rows, SITES, way, each) for each in ("predicted", "seconds"))
        yield {
            "way, plan": way,
            "MB between sites": _megabytes(results.last(rows, SITES, way)["bytes"]),
            "predicted, ms": milliseconds(predicted),
            "measured, ms": milliseconds(seconds),
            "measured / predicted": number(seconds / predicted),
        }
