"""GPU: one GPU and many cores: tests on it, the cost of the runtime, staging, ranks of two threads.

    python benchmarks/run.py gpu --from BUNDLE     sets up without a network first, if need be (launch/bundle)
    python benchmarks/run.py gpu --rehearse        without a GPU: the same on CPUs, with a small model

A GPT of 100 million parameters trains in bf16: in a plain loop in one process that accumulates gradients,
and under the plans 1-1 and 2, whose two ranks share the GPU. On one GPU no plan can win: what a plan takes
beside the plain loop is the cost of the runtime. Each plan has its prediction. Then ranks of two threads each
train on the CPU cores. The tests are the checks of tests/mpi/programs/on_device.py on four ranks. Without a
GPU, and without --rehearse, it says so in one line and measures nothing.

All of it takes under eight minutes: a part that would end after --seconds is left out, and named.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs
import results
from jobs import ROOT, Run, Way
from results import Row, milliseconds, number, steady_seconds

ONE = "one process"
PLANS = ("1-1", "2")
TESTS, COST, STAGING, CORES = "tests", "gpt in bf16", "staging", "cores"
CORES_RANKS, CORES_THREADS = 8, 2
CORES_WAYS = (
    Way("one process", "one_process", ranks=1),
    Way("plain Horovod", "plain_horovod", ranks=CORES_RANKS),
    Way("torch DDP", "ddp", ranks=CORES_RANKS),
    Way("ours, dp", "ours", "dp", CORES_RANKS),
    Way("ours, auto", "ours", "auto", CORES_RANKS),
)
CHECKS = ("exact", "low", "dropout", "resume")
PROGRAM = ROOT / "tests" / "mpi" / "programs" / "on_device.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # sums in one order
PARTS_SECONDS = {TESTS: 90, COST: 60, STAGING: 20, CORES: 45}  # what one job of a part may take


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    parser.add_argument("--from", metavar="BUNDLE", help="set up from this folder, if need be")
    parser.add_argument("--rehearse", action="store_true", help="on CPUs, with a small model: tries the code")
    parser.add_argument("--seconds", type=float, default=460.0, help="after which no part begins")


@dataclass
class Clock:
    """The time that is left."""

    end: float

    def has(self, part: str) -> bool:
        """Return True if one job of a part ends in time."""
        return time.monotonic() + PARTS_SECONDS[part] <= self.end


def measure(run: Run) -> Iterator[Row]:
    """Run the tests, then measure the runtime's cost, staging, and the cores."""
    import torch

    rehearses = run.options.rehearse
    if not rehearses and not torch.cuda.is_available():
        raise SystemExit("gpu: no GPU here (torch.cuda.is_available() is False), so nothing is measured")
    device, clock = "cpu" if rehearses else "cuda", Clock(time.monotonic() + run.options.seconds)
    for part, rows in (
        (STAGING, _staging(run, rehearses)),
        (COST, _cost(run, device)),
        (TESTS, _tests(run, device)),
        (CORES, _cores(run, rehearses)),
    ):
        yield from _in_time(run, part, clock, rows)


def _in_time(run: Run, part: str, clock: Clock, rows: Iterator[Row]) -> Iterator[Row]:
    """Yield a part's rows while there is time, and one that tells if there is none."""
    if not run.wants(part, part):
        return
    while clock.has(part):
        row = next(rows, None)
        if row is None:
            return
        yield row
    yield Row(part, "the rest", run.round, error="left out: no time")


def _tests(run: Run, device: str) -> Iterator[Row]:
    """Run each check of the program behind tests/mpi/test_devices.py, whose ranks share the GPU."""
    for check in CHECKS:
        out = run.out / TESTS / check / f"round{run.round}"
        out.mkdir(parents=True, exist_ok=True)
        launcher = [sys.executable, "-m", "hybridpipe.launch.mpirun", "4", "--"]
        words = [*launcher, sys.executable, str(PROGRAM), device, check]
        words += [str(out / "checkpoints")] if check == "resume" else []
        began = time.perf_counter()
        with (out / "log.txt").open("w") as log:
            streams = {"stdout": log, "stderr": subprocess.STDOUT}
            try:
                code = jobs.finished(words, ENVIRONMENT, PARTS_SECONDS[TESTS], **streams).returncode
            except subprocess.TimeoutExpired:
                code = -1
        text = (out / "log.txt").read_text()
        figures = {"seconds": time.perf_counter() - began, "plans": text.count(": losses within")}
        yield Row(TESTS, check, run.round, figures, error=f"failed: {jobs.reason(text)}" if code else "")


def _cost(run: Run, device: str) -> Iterator[Row]:
    """Train one model in a plain loop and under plans whose ranks share the GPU."""
    task, count = ("gpt-100m", 12) if device == "cuda" else ("gpt-small", 6)
    own = ["--device", device, "--precision", "bf16", "--minibatches", str(count), "--microbatches", "8"]
    for way in (Way(ONE, "device", "one", 1), *(Way(f"plan {name}", "device", name) for name in PLANS)):
        yield _job(run, COST, way, task, own)


def _staging(run: Run, rehearses: bool) -> Iterator[Row]:
    """Measure copies between pinned memory and the GPU."""
    if rehearses:
        yield Row(STAGING, "none", run.round, error="a CPU copies nothing")
        return
    out = run.out / "staging" / f"round{run.round}"
    jobs.program("staging", ["--device", "cuda"], 1, out)
    for num_bytes, figures in json.loads((out / "rank0.json").read_text()).items():
        yield Row(STAGING, f"{int(num_bytes) / 2**20:g} MiB", run.round, figures)


def _cores(run: Run, rehearses: bool) -> Iterator[Row]:
    """Train on the CPU cores, each rank with cores of its own where there are enough."""
    task, cores = "tiny" if rehearses else "gpt", os.cpu_count() or 1
    ranks, threads = (CORES_RANKS, CORES_THREADS) if cores >= CORES_RANKS * CORES_THREADS else (2, 1)
    for way in CORES_WAYS:
        sized = Way(way.name, way.program, way.variant, min(way.ranks, ranks))
        yield _job(run, CORES, sized, task, ["--minibatch", str(8 * ranks)], str(threads))


def _job(run: Run, part: str, way: Way, task: str, words: Sequence[str], threads: str = "1") -> Row:
    folder = run.out / part.replace(" ", "-") / way.name.replace(" ", "-") / f"round{run.round}"
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if part == CORES else {}
    environment, words = {"OMP_NUM_THREADS": threads, **hidden}, [*words, "--threads", threads]
    row = jobs.start(way, task, part, run.round, folder, arguments=words, environment=environment)
    return row if row.error else Row(part, way.name, run.round, {**row.figures, **_more(folder, way.ranks)})


def _more(folder: Path, ranks: int) -> Mapping[str, Any]:
    """Return the peak memory of all ranks, and the prediction of a plan that was chosen."""
    reports = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    figures: dict[str, Any] = {"minibatch": steady_seconds(reports[0]["seconds"])}
    if "memory" in reports[0]:
        figures["memory"] = sum(report["memory"] for report in reports)
    if (folder / "plan.json").is_file():
        chosen = json.loads((folder / "plan.json").read_text())
        figures["predicted"] = (chosen.get("predicted") or {}).get("minibatch_seconds")
    return figures


def report(rows: Sequence[Row]) -> str:
    """Return a table for each part."""
    tables = [
        results.table(lines)
        for lines in (
            [*_timed(rows, COST)],
            [*_copies(rows)],
            [*_timed(rows, CORES)],
            [*_checked(rows)],
        )
        if lines
    ]
    errors = [f"{row.group}, {row.way}: {row.error}" for row in rows if row.error]
    return "\n\n".join([*tables, *errors])


def _of(rows: Sequence[Row], part: str) -> list[Row]:
    return [row for row in rows if row.group == part and row.figures]


def _timed(rows: Sequence[Row], part: str) -> Iterator[dict[str, str]]:
    for row in _of(rows, part):
        faster, predicted = results.times_as_fast(rows, part, row.way, ONE), row["predicted"]
        yield {
            part: row.way + (f" ({row['plan']})" if row["plan"] and row.way != ONE else ""),
            "ms a minibatch": milliseconds(row["seconds"], 1),
            "× one process": number(faster),
            "predicted ms": milliseconds(predicted, 1),
            "off": "–" if not predicted else f"{predicted / row['seconds'] - 1:+.0%}",
            "memory MiB": number(row["memory"], 0, 2**-20),
            "loss": number(row["loss"], 4),
        }


def _checked(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    for row in _of(rows, TESTS):
        outcome = "failed" if row.error else "as one process"
        plans, seconds = str(row["plans"]), number(row["seconds"], 0)
        yield {"test": row.way, "plans": plans, "outcome": outcome, "s": seconds}


def _copies(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    for row in _of(rows, STAGING):
        yield {
            "copy of": row.way,
            "out GB/s": number(row["out"], 1, 1e-9),
            "in GB/s": number(row["in"], 1, 1e-9),
            "both GB/s": number(row["both"], 1, 1e-9),
            "hidden by computing": f"{row['hidden']:.0%}",
        }
