"""Precision: the time of a minibatch and the accuracy after some epochs, in each precision.

    python benchmarks/run.py precision --rounds 3             times of three models; half an hour a round
    python benchmarks/run.py precision --only fashion         accuracy on Fashion-MNIST; a quarter of one

Ranks have one thread each. In a round every precision runs once under a plan, one after the other, each as a
fresh job, and ratios are taken within the round. Processor seconds are summed over the ranks; those of a rank
that polls for messages count, too.

Accuracies are those of the held-out images after the last epoch. Rounds differ in their seed; within a round
all ways start from the same weights and see the samples in the same order. Without --only fashion nothing is
trained to an accuracy.
"""

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import jobs
import results
from cases import learning
from jobs import Run, Way
from plans import measured_cuts
from results import Row, milliseconds, number, times_as_fast

from hybridpipe.planning.checks import PRECISIONS

MODELS = ("gpt", "vgg", "mlp")
FASHION = "fashion"
SMALLER = "{ channels = 8, width = 128, dropout = 0.2 }"  # than the config's, since CPUs emulate fp16
MICROBATCHES = 8
# Each plan's variant of the program and its ranks.
PLANS = {"1": ("dp", 1), "1-1": ("1f1b", 2), "2": ("dp", 2)}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    add = parser.add_argument
    add("--minibatches", type=int, default=8, help="of a timed job; three are warm-up, fp16 has half")
    add("--epochs", type=int, default=5, help="epochs on Fashion-MNIST")
    add("--limit", type=int, default=10000, help="training images of Fashion-MNIST")
    add("--root", type=Path, metavar="DIR", help="of Fashion-MNIST, if not the config's")


def measure(run: Run) -> Iterator[Row]:
    """Time every model; train on Fashion-MNIST if --only names it."""
    for model, plan in product(MODELS, PLANS):
        for precision in PRECISIONS:
            if run.wants(model, name_of(plan, precision)):
                yield _timed(run, model, plan, precision)
    asked = any(FASHION in pattern for pattern in run.options.only)
    for plan, precision in product(("1", "1-1") if asked else (), PRECISIONS):
        if run.wants(FASHION, name_of(plan, precision)):
            yield _trained(run, plan, precision)


def name_of(plan: str, precision: str) -> str:
    """Return the name of a way."""
    return f"{plan}, {precision}"


def _timed(run: Run, model: str, plan: str, precision: str) -> Row:
    variant, ranks = PLANS[plan]
    way = Way(name_of(plan, precision), "ours", variant, ranks)
    cuts = measured_cuts(model, 2, MICROBATCHES, ENVIRONMENT, run.out / model / "profile")
    count = run.options.minibatches // (2 if precision == "fp16" else 1)  # CPUs emulate it
    arguments = ["--minibatches", str(count), "--microbatches", str(MICROBATCHES)]
    arguments += ["--cuts", ",".join(map(str, cuts)), "--precision", precision]
    folder = run.out / model / f"{plan}-{precision}" / f"round{run.round}"
    return jobs.start(way, model, model, run.round, folder, arguments=arguments, environment=ENVIRONMENT)


def _trained(run: Run, plan: str, precision: str) -> Row:
    options = run.options
    root = [] if options.root is None else [f"data.args.root={options.root}"]
    root += [each.replace("args", "validation_args") for each in root]
    overrides = [*root, f"data.args.limit={options.limit}", f"train.epochs={options.epochs}"]
    overrides += [
        f"model.args={SMALLER}",
        "train.target_accuracy=1.0",
        f"train.seed={run.round}",
        f"train.precision={precision}",
    ]
    folder = run.out / FASHION
    given: str | Path = "dp"
    if plan != "1":
        learning.straight(FASHION, folder / "cut", root)
        given = folder / "cut" / "plan.json"
    out = folder / f"{plan}-{precision}" / f"round{run.round}"
    summary = jobs.train(f"{FASHION}.toml", given, PLANS[plan][1], overrides, out)
    accuracies = [epoch["validation"]["accuracy"] for epoch in summary["epochs"]]
    figures = {"accuracy": accuracies[-1], "accuracies": accuracies, "loss": summary["loss_last"]}
    return Row(FASHION, name_of(plan, precision), run.round, figures)


def report(rows: Sequence[Row]) -> str:
    """Return a table of the times and one of the accuracies, as far as they were measured."""
    timed = [row for row in rows if row.group != FASHION]
    trained = [row for row in rows if row.group == FASHION]
    tables = [results.table(_times(timed))] if timed else []
    return "\n\n".join([*tables, *([results.table(_accuracies(trained))] if trained else [])])


def _times(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    for model in results.groups(rows):
        for way in results.ways(rows, model):
            fp32 = name_of(way.partition(",")[0], "fp32")
            seconds = results.median(rows, model, way)
            faster = times_as_fast(rows, model, way, fp32)
            of_processors = times_as_fast(rows, model, way, fp32, "processor")
            error = results.last(rows, model, way).error
            yield {
                "model": model,
                "plan, precision": way,
                "ms a minibatch": milliseconds(seconds) if seconds else f"did not run: {error}",
                "× the speed of fp32": number(faster),
                "× the processor time of fp32": number(None if of_processors is None else 1 / of_processors),
                "rounds": str(len(results.of(rows, model, way))),
            }


def _accuracies(rows: Sequence[Row]) -> Iterator[Mapping[str, str]]:
    for way in results.ways(rows, FASHION):
        found = results.of(rows, FASHION, way)
        fp32 = {r.round: r["accuracy"] for r in results.of(rows, FASHION, f"{way.partition(',')[0]}, fp32")}
        gaps = [row["accuracy"] - fp32[row.round] for row in found if row.round in fp32]
        yield {
            "plan, precision": way,
            "accuracy, %": ", ".join(number(row["accuracy"], 2, 100) for row in found),
            "mean": number(statistics.mean(row["accuracy"] for row in found), 2, 100),
            "points beside fp32": number(statistics.mean(gaps), 2, 100) if gaps else "–",
        }
