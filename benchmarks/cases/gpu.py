"""GPU: one GPU and many cores: tests on it, the cost of the runtime, staging, ranks of two threads.

    python benchmarks/run.py gpu --from BUNDLE     sets up without a network first, if need be (launch/bundle)
    python benchmarks/run.py gpu --only '^cores, vgg' --seconds 200     one part, in 200 seconds
    python benchmarks/run.py gpu --rehearse        without a GPU: the same on CPUs, with small models

A GPT of 100 million parameters trains in bf16: in a plain loop in one process that accumulates gradients,
and under the plans 1, 1-1 and 2, whose ranks share the GPU; `auto` chooses for 2 and 4 ranks. A GPT-2 of
transformers does so with its head tied to the embedding and not, in fp32 and bf16. On one GPU no plan can
win: what a plan takes beside the plain loop is the cost of the runtime. Each plan has its prediction, the
parts of its ranks' minibatches, and the memory of its ranks (programs/device.py). All losses are those of the
plain loop, or named. Then ranks of two threads each train on the CPU cores. The tests are the checks of
tests/mpi/programs/on_device.py on four ranks. Without a GPU, and without --rehearse, it says so in one line
and measures nothing.

Parts can be called one by one (--only) where minutes are few, and add up in one DIR. The plain loop of a part
runs whatever --only says of its ways. A job has a time limit; one that might end after --seconds is left out,
and named.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import jobs
import results
from cases.peers import minibatch_parts
from jobs import ROOT, Run, Way
from results import Row, milliseconds, number

ONE, PIPEDREAM = "one process", "ours, auto under pipedream"
STAGING, COST, TESTS = "staging", "gpt in bf16", "tests"
PLANS = (
    Way(ONE, "device", "one", 1),
    Way("plan 1", "device", "dp", 1),
    Way("plan 1-1", "device", "straight"),
    Way("plan 2", "device", "dp"),
)
AUTO = tuple(Way(f"auto, {ranks} ranks", "device", "auto", ranks) for ranks in (2, 4))
CORES_RANKS, CORES_THREADS = 8, 2
CORES_WAYS = (
    Way(ONE, "one_process", ranks=1),
    Way("plain Horovod", "plain_horovod", ranks=CORES_RANKS),
    Way("torch DDP", "ddp", ranks=CORES_RANKS),
    Way("ours, dp", "ours", "dp", CORES_RANKS),
    Way("ours, auto", "ours", "auto", CORES_RANKS),
    Way(PIPEDREAM, "ours", "auto-pipedream", CORES_RANKS),
)
CHECKS = {  # of on_device.py, and the environment of its ranks
    "exact": {},
    "exact, by CUDA IPC": {"HYBRIDPIPE_CUDA_IPC": "1"},
    "low": {},
    "dropout": {},
    "resume": {},
    "waits": {},
}
PROGRAM = ROOT / "tests" / "mpi" / "programs" / "on_device.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # sums in one order
Job = Callable[[], Iterable[Row]]


@dataclass(frozen=True)
class Part:
    """A part; most train one model in several ways, the first of which is the plain loop.

    Args:
        seconds: the most that one of its jobs takes.
        task, small: the model, and that of the rehearsal.
        words: further arguments of its jobs.
        needs: the package that makes the model.
        samples: of a rank's share of a minibatch, where ranks are on the CPU cores.
    """

    name: str
    seconds: float
    task: str = ""
    small: str = ""
    ways: tuple[Way, ...] = ()
    words: tuple[str, ...] = ()
    needs: str = "torch"
    samples: int = 0


PARTS = (
    Part(STAGING, 20),
    Part(COST, 60, "gpt-100m", "gpt-small", PLANS + AUTO, ("--precision", "bf16", "--microbatches", "8")),
    *(
        Part(
            f"gpt-2 {kind}, {precision}",
            75,
            f"gpt2-{kind}",
            f"gpt2-{kind}-small",
            PLANS,
            ("--precision", precision, "--microbatches", count),
            needs="transformers",
        )
        for kind, (precision, count) in product(("tied", "untied"), (("fp32", "8"), ("bf16", "4")))
    ),
    Part(TESTS, 90),
    Part("cores, gpt", 75, "gpt", "gpt-small", CORES_WAYS, samples=8),
    Part("cores, vgg", 75, "vgg", "vgg-digits", CORES_WAYS, samples=8),
    Part("cores, mlp", 75, "mlp", "tiny", CORES_WAYS, samples=64),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's own options."""
    parser.add_argument("--from", metavar="BUNDLE", help="set up from this folder, if need be")
    parser.add_argument("--rehearse", action="store_true", help="on CPUs, with small models: tries the code")
    parser.add_argument(
        "--seconds", type=float, default=1800.0, help="no job begins that might end after these"
    )


def measure(run: Run) -> Iterator[Row]:
    """Measure all parts, as long as there is time."""
    import torch

    if not run.options.rehearse and not torch.cuda.is_available():
        raise SystemExit("gpu: no GPU here (torch.cuda.is_available() is False), so nothing is measured")
    end = time.monotonic() + run.options.seconds
    for part in PARTS:
        yield from _in_time(part, run.round, end, list(_jobs(run, part)))


def _in_time(part: Part, round_number: int, end: float, work: Sequence[Job]) -> Iterator[Row]:
    """Yield the rows of a part's jobs, with the seconds of each, while there is time for the next.

    The last row says so if there is none.
    """
    for job in work:
        began = time.monotonic()
        if began + part.seconds > end:
            yield Row(part.name, "the rest", round_number, error="left out: no time")
            return
        for row in job():
            began, took = (now := time.monotonic()), now - began
            yield replace(row, figures={**row.figures, "took": took})


def _jobs(run: Run, part: Part) -> Iterator[Job]:
    """Yield a part's wanted jobs; where one trains, the plain loop with which it is compared as well."""
    if part.name == STAGING and run.wants(part.name, "copies"):
        yield partial(_staging, run, part)
    if part.name == TESTS:
        yield from (partial(_tested, run, part, check) for check in CHECKS if run.wants(part.name, check))
    wanted = [way for way in part.ways if run.wants(part.name, way.name)]
    if wanted and importlib.util.find_spec(part.needs) is None:
        yield lambda: [Row(part.name, "all", run.round, error=f"{part.needs} is not installed")]
        return
    for way in part.ways if wanted else ():
        if way in wanted or way.name == ONE:
            yield partial(_trained, run, part, way)


def _tested(run: Run, part: Part, check: str) -> Iterator[Row]:
    """Run a check of the program behind tests/mpi/test_devices.py, whose ranks share the GPU."""
    out = run.out / part.name / check / f"round{run.round}"
    out.mkdir(parents=True, exist_ok=True)
    launcher = [sys.executable, "-m", "hybridpipe.launch.mpirun", "4", "--"]
    words = [*launcher, sys.executable, str(PROGRAM), "cpu" if run.options.rehearse else "cuda"]
    words += [check.split(",")[0]]
    words += [str(out / "checkpoints")] if check == "resume" else []
    with (out / "log.txt").open("w") as log:
        streams = {"stdout": log, "stderr": subprocess.STDOUT}
        try:
            code = jobs.finished(words, ENVIRONMENT | CHECKS[check], part.seconds, **streams).returncode
        except subprocess.TimeoutExpired:
            code = -1
    text = (out / "log.txt").read_text()
    figures = {"plans": text.count(": losses within")}
    yield Row(part.name, check, run.round, figures, error=f"failed: {jobs.reason(text)}" if code else "")


def _staging(run: Run, part: Part) -> Iterator[Row]:
    """Measure copies between pinned memory and the GPU."""
    if run.options.rehearse:
        yield Row(part.name, "copies", run.round, error="a CPU copies nothing")
        return
    out = run.out / part.name / f"round{run.round}"
    try:
        jobs.program("staging", ["--device", "cuda"], 1, out, limit_seconds=part.seconds)
    except (SystemExit, subprocess.TimeoutExpired) as error:  # other parts go on
        yield Row(part.name, "copies", run.round, error=str(error))
        return
    for num_bytes, figures in json.loads((out / "rank0.json").read_text()).items():
        yield Row(part.name, f"{int(num_bytes) / 2**20:g} MiB", run.round, figures)


def _trained(run: Run, part: Part, way: Way) -> Iterator[Row]:
    """Train one way on the GPU, or on CPU cores, each rank with cores of its own where there are enough."""
    rehearses, threads, environment = run.options.rehearse, 1, dict(ENVIRONMENT)
    if part.samples:
        enough = (os.cpu_count() or 1) >= CORES_RANKS * CORES_THREADS
        ranks, threads = (CORES_RANKS, CORES_THREADS) if enough else (2, 1)
        way = replace(way, ranks=min(way.ranks, ranks))
        words = ["--minibatch", str(part.samples * ranks)]
        environment = {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    else:
        device, count = ("cpu", 6) if rehearses else ("cuda", 12)
        words = ["--device", device, "--minibatches", str(count)]
    yield jobs.start(
        way,
        part.small if rehearses else part.task,
        part.name,
        run.round,
        run.out / _folder(part.name) / _folder(way.name) / f"round{run.round}",
        arguments=[*words, *part.words, "--threads", str(threads)],
        environment=environment,
        limit_seconds=part.seconds,
    )


def _folder(name: str) -> Path:
    return Path(name.replace(",", "").replace(" ", "-"))


def report(rows: Sequence[Row]) -> str:
    """Return the tables, what did not run, and the losses that differ from that of the plain loop."""
    made = (_timed, minibatch_parts, _remembered, _copies, _checked, _took)
    tables = [results.table(lines) for table in made if (lines := list(table(rows)))]
    others = [
        f"another loss: {row.group}, {row.way}: {row['loss']:.6f} instead of {wanted:.6f}"
        for row, wanted in results.other_losses(rows, ONE, [PIPEDREAM])
    ]
    errors = [f"{row.group}, {row.way}: {row.error}" for row in rows if row.error]
    return "\n\n".join([*tables, *others, *errors])


def _latest(rows: Sequence[Row], figure: str) -> Iterator[Row]:
    """Yield the latest row of each way that has a figure."""
    found = [row for row in rows if row[figure] is not None]
    for part in results.groups(found):
        for way in results.ways(found, part):
            yield results.last(found, part, way)


def _timed(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    for row in _latest(rows, "seconds"):
        part, way, predicted = row.group, row.way, row["predicted"]
        yield {
            "part": part,
            "way": way + (f" ({row['plan']})" if row["plan"] and way != ONE else ""),
            "ms a minibatch": milliseconds(row["seconds"], 1),
            "× one process": number(results.times_as_fast(rows, part, way, ONE)),
            "predicted ms": milliseconds(predicted, 1),
            "off": "–" if not predicted else f"{predicted / row['seconds'] - 1:+.0%}",
            "loss": number(row["loss"], 4),
        }


def _remembered(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield the peak of each rank's memory beside its prediction."""
    for row in _latest(rows, "memory"):
        measured = row["memory"]["measured"]
        predicted = row["memory"].get("predicted") or [None] * len(measured)
        for rank, (seen, expected) in enumerate(zip(measured, predicted, strict=True)):
            yield {
                "part": row.group,
                "way": row.way,
                "rank": str(rank),
                "predicted MiB": number(expected, 0, 2**-20),
                "measured MiB": number(seen, 0, 2**-20),
                "measured / predicted": number(seen / expected if seen and expected else None),
            }


def _checked(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    for row in _latest(rows, "plans"):
        outcome = "failed" if row.error else "as one process"
        yield {"test": row.way, "plans": str(row["plans"]), "outcome": outcome}


def _copies(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    for row in _latest(rows, "hidden"):
        yield {
            "copy of": row.way,
            "out GB/s": number(row["out"], 1, 1e-9),
            "in GB/s": number(row["in"], 1, 1e-9),
            "both GB/s": number(row["both"], 1, 1e-9),
            "hidden by computing": f"{row['hidden']:.0%}",
        }


def _took(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield the seconds that the jobs of each part took."""
    for part in results.groups(rows):
        took = [row["took"] for row in rows if row.group == part and row["took"]]
        if took:
            told = {"jobs": str(len(took)), "s": number(sum(took), 0), "longest": number(max(took), 0)}
            yield {"part": part, **told}
