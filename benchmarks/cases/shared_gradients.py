"""Shared gradients: an update of a GPT-2 whose ends have one embedding, 51 MB of gradients each way.

    python benchmarks/run.py shared_gradients --rounds 2 --checkout OTHER     4 minutes

Two ranks of a host have one thread each and plan 1-1 under 1f1b. Messages go by single copy, and without.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import jobs
import results
from cases.transport import NO_SINGLE_COPY
from jobs import ROOT, Run
from results import Row, milliseconds, number

PATHS = {"single copy": {}, "no single copy": NO_SINGLE_COPY}
HERE = "this checkout"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    parser.add_argument("--checkout", type=Path, metavar="DIR", help="another checkout of the repository")


def measure(run: Run) -> Iterator[Row]:
    """Train on each path by each checkout, the other one first."""
    other = run.options.checkout
    checkouts = {**({"other": other.resolve()} if other else {}), HERE: ROOT}
    for path, settings in PATHS.items():
        for name, checkout in checkouts.items():
            if run.wants(path, name):
                out = run.out / path.replace(" ", "-") / name.replace(" ", "-") / f"round{run.round}"
                environment = {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", **settings}
                jobs.program("tied", [], 2, out, environment)
                yield Row(path, name, run.round, json.loads((out / "rank0.json").read_text()))


def report(rows: Sequence[Row]) -> str:
    """Return a table of times."""
    return results.table(
        {
            "path": path,
            "checkout": name,
            "ms an update": milliseconds(seconds),
            f"times as fast as {HERE}": number(results.times_as_fast(rows, path, name, HERE)),
        }
        for path, name, (seconds,) in results.medians(rows, "seconds")
    )
