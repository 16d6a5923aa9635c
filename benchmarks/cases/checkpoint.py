"""Checkpoint: the slowdown of a training by checkpoints that are written in the background.

    python benchmarks/run.py checkpoint --rounds 3

A pipeline of two ranks trains a stack of linear layers with Adam: without checkpoints, and with one every N
minibatches. The ways take turns in one job a round, an epoch each. A minibatch's time is that of the training
thread, with the snapshot's copy and the processor time lost to background writing. The cost is the mean
minibatch relative to that without checkpoints in the same round; the tables show medians over the rounds.
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
    """Add the benchmark's own options."""
    parser.add_argument("--minibatches", type=int, default=100, help="minibatches of an epoch")
    every = "minibatches between two checkpoints"
    parser.add_argument("--every", type=int, nargs="*", default=EVERY, metavar="N", help=every)


def measure(run: Run) -> Iterator[Row]:
    """Run one job and yield a row for each way."""
    out = run.out / f"round{run.round}"
    arguments = ["--first", str(run.round), "--minibatches", str(run.options.minibatches)]
    jobs.program("checkpoints", [*arguments, "--every", *map(str, run.options.every)], RANKS, out)
    found = json.loads((out / "checkpoints.json").read_text())
    for way, figures in found.items():
        yield Row(GROUP, way, run.round, figures)


def report(rows: Sequence[Row]) -> str:
    """Return the cost of each way, and the seconds of a checkpoint that training waits for."""
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
