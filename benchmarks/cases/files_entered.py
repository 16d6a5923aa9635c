"""Files entered: the files of the package that one train step enters, and the calls from one to another.

    python benchmarks/run.py files_entered
    python benchmarks/run.py files_entered --checkout OTHER      beside those of another checkout

Two ranks on CPUs run plan 1-1 with four microbatches under 1f1b. The second `Trainer.train_step` is counted,
in the training thread. A call is a crossing if the nearest caller inside the package is in another file;
frames of other packages between them, such as torch, do not count.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import jobs
import results
from jobs import ROOT, Run
from results import Row

RANKS = 2
HERE = "this checkout"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    parser.add_argument("--checkout", type=Path, metavar="DIR", help="another checkout of the repository")


def measure(run: Run) -> Iterator[Row]:
    """Yield a row for each rank of each checkout, the other one first."""
    other = run.options.checkout
    checkouts = {**({str(other): other.resolve()} if other else {}), HERE: ROOT}
    for i, (name, checkout) in enumerate(checkouts.items()):
        out = run.out / f"round{run.round}" / f"checkout{i}"
        environment = {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        jobs.program("files_entered", [], RANKS, out, environment)
        for rank in range(RANKS):
            figures = json.loads((out / f"rank{rank}.json").read_text())
            yield Row(name, f"rank {rank}", run.round, {"files": len(figures["calls"]), **figures})


def report(rows: Sequence[Row]) -> str:
    """Return the totals side by side, and the files of each checkout, of the last round."""
    found = {
        name: [results.last(rows, name, way) for way in results.ways(rows, name)]
        for name in results.groups(rows)
    }
    tables = [results.table(_totals(name, ranks) for name, ranks in found.items())]
    tables += [f"{name}\n\n{results.table(_files(ranks))}" for name, ranks in found.items()]
    return "\n\n".join(tables)


def _totals(name: str, ranks: Sequence[Row]) -> dict[str, object]:
    together = set().union(*(row["calls"] for row in ranks))
    return (
        {"checkout": name, "files": len(together)}
        | {f"files, {row.way}": row["files"] for row in ranks}
        | {"crossings": sum(row["crossings"] for row in ranks)}
        | {f"crossings, {row.way}": row["crossings"] for row in ranks}
    )


def _files(ranks: Sequence[Row]) -> Iterator[dict[str, object]]:
    for file in sorted(set().union(*(row["calls"] for row in ranks))):
        yield {"file": file} | {f"calls, {row.way}": row["calls"].get(file, 0) for row in ranks}
