"""Checkpoint: the time that saving takes from a training that goes on.

    python benchmarks/run.py checkpoint --rounds 3

A pipeline of two ranks trains a stack of linear layers with Adam: without checkpoints, and with one every N
minibatches. The ways take turns in one job a round, an epoch each. A minibatch's time is the training
thread's: computing, the snapshot's copy, and whatever the writing in the background takes from it. The cost
is that of the mean minibatch over that without checkpoints, in the same round; the figure is the median over
the rounds.
"""

import argparse
import json
from collections.abc import Iterator, Sequence

import jobs
import results
from jobs import Run
from results import Row, milliseconds, number

RANKS = 2
EVERY = (100, 50, 20, 10)
TARGET = 0.05
GROUP, NONE, WAITING = "two ranks", "none", "training waits"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its own."""
    parser.add_argument("--minibatches", type=int, default=100, help="of an epoch")
    parser.add_argument("--every", type=int, nargs="*", default=EVERY, metavar="N", help="minibatches")


def measure(run: Run) -> Iterator[Row]:
    """One job."""
    out = run.out / f"round{run.round}"
    arguments = ["--first", str(run.round), "--minibatches", str(run.options.minibatches)]
    jobs.program("checkpoints", [*arguments, "--every", *map(str, run.options.every)], RANKS, out)
    found = json.loads((out / "checkpoints.json").read_text())
    for way, figures in found.items():
        yield Row(GROUP, way, run.round, figures)


def report(rows: Sequence[Row]) -> str:
    """The cost of each way, and what a checkpoint takes where training waits for it."""
    size, seconds = (results.median(rows, GROUP, WAITING, name) for name in ("bytes", "seconds"))
    told = (
        f"{number(size, 0, 1e-6)} MB a checkpoint on {RANKS} ranks; {number(seconds)} s if training waits "
        f"for it; target {TARGET:.0%}"
    )
    return f"{results.table(_lines(rows))}\n\n{told}"


def _lines(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    for way in results.ways(rows, GROUP):
        if way == WAITING:
            continue
        line = {"checkpoint": way}
        for figure in ("mean", "median"):
            faster = results.times_as_fast(rows, GROUP, way, NONE, figure) or 1.0
            line[f"{figure} ms"] = milliseconds(results.median(rows, GROUP, way, figure), 1)
            line[f"{figure} cost"] = "" if way == NONE else f"{1 / faster - 1:+.1%}"
        yield line
