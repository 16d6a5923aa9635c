"""A soak: random faults over random plans and points, and trainings that end as if nothing had happened.

A job trains under one plan through several faults, one in each attempt; `hybridpipe launch` starts it again
after each. The final weights must be those of the same training without faults, bit for bit. Faults are tied
to named points (HYBRIDPIPE_FAULT), not to time, so that a seed repeats a soak. Counted is what did happen.
"""

import functools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tabulate import tabulate

from hybridpipe.files import write_json
from hybridpipe.planning.plan import Plan, StageSpec

CONFIG = Path(__file__).with_name("soak.toml")
SAMPLES, MINIBATCH, EPOCHS = 44, 8, 4  # six minibatches an epoch, the last one short
STEPS = EPOCHS * -(-SAMPLES // MINIBATCH)
EVERY = 4  # minibatches between checkpoints
MOST_FAULTS = 6  # of a job
SECONDS = 60.0  # of an attempt, before the soak ends the job
GRACE_SECONDS = 60.0  # for a launcher to end a job that may hang
HUNG = -1
HANG_SECONDS = 4

# stages' layers, their replicas, schedules
SHAPES = (
    ((6,), (1,), ("1f1b",)),
    ((6,), (2,), ("1f1b", "gpipe", "pipedream", "pipedream-2bw")),
    ((3, 3), (1, 1), ("1f1b", "gpipe", "zero-bubble", "pipedream", "pipedream-2bw")),
    ((4, 2), (2, 1), ("1f1b", "zero-bubble", "pipedream", "pipedream-2bw")),
    ((2, 4), (1, 2), ("1f1b", "gpipe", "pipedream")),
    ((2, 2, 2), (1, 1, 1), ("1f1b", "zero-bubble", "pipedream", "pipedream-2bw")),
)
ENDING = ("raise", "exit", "thread", "kill", "segv", "stop")  # each of them ends the attempt
MESSAGES = ("badsize", "badtag")
SAVING = (
    "save-snapshot", "save-shard", "save-shard-written",
    "save-manifest", "save-rename", "save-latest", "save-prune",
)  # fmt: skip
BY_RANK_0 = SAVING[3:]


@dataclass(frozen=True)
class Fault:
    rank: int
    point: str
    kind: str
    step: int | None
    attempt: int

    def __str__(self) -> str:
        step = "" if self.step is None else f"step={self.step},"
        return f"rank={self.rank},{step}point={self.point},kind={self.kind},attempt={self.attempt}"


@dataclass(frozen=True)
class Job:
    """One training and what it goes through."""

    number: int
    plan: Plan
    faults: tuple[Fault, ...]

    @property
    def name(self) -> str:
        return f"{self.plan.name} {self.plan.schedule}"


@dataclass(frozen=True)
class Outcome:
    """What came of a job: the faults that happened, and what is wrong, if anything."""

    job: Job
    happened: tuple[Fault, ...]
    seconds: float
    wrong: str = ""


def random_plan(rng: random.Random) -> Plan:
    layers, replicas, schedules = rng.choice(SHAPES)
    schedule = rng.choice(schedules)
    stages, start = [], 0
    for count, copies in zip(layers, replicas, strict=True):
        stages.append(StageSpec(start, start + count, copies))
        start += count
    return Plan(tuple(stages), schedule=schedule, num_microbatches=1 if schedule == "pipedream" else 4)


def points_of(plan: Plan, rank: int) -> list[str]:
    """The points that a rank passes."""
    place = plan.place(rank)
    assert place is not None
    first, last = place.stage == 0, place.stage == plan.num_stages - 1
    return [
        "forward", "backward", "step", "evaluate", *SAVING[:1],
        *(("load",) if first or last else ()),
        *(() if last else ("send-activation", "receive-gradient")),
        *(() if first else ("receive-activation", "send-gradient")),
        *(("all-reduce",) if plan.replicas[place.stage] > 1 else ()),
        *(SAVING[1:3]),
        *(BY_RANK_0 if rank == 0 else ()),
    ]  # fmt: skip


def comes_by(plan: Plan, rank: int, point: str, step: int) -> bool:
    """Does the rank pass the point in this step? Under pipedream a minibatch goes to one replica."""
    place = plan.place(rank)
    assert place is not None
    replicas = plan.replicas[place.stage]
    if plan.schedule != "pipedream":
        return True
    return step % replicas == (0 if point in ("step", "all-reduce") else place.replica)


def random_job(seed: int, number: int) -> Job:
    """The same for the same two numbers."""
    rng = random.Random(f"{seed} {number}")
    plan = random_plan(rng)
    count = rng.randint(2, MOST_FAULTS)
    faults: list[Fault] = []
    for attempt in range(count):
        rank = rng.randrange(plan.num_ranks)
        point = rng.choice(points_of(plan, rank))
        kinds = (*ENDING, *(MESSAGES if point.startswith("send-") else ()))
        if plan.num_ranks == 1:  # nobody is there to miss it
            kinds = tuple(kind for kind in kinds if kind not in ("thread", "stop"))
        # Each attempt gets further than the one before, or its fault would not come. The same error at the
        # same step twice in a row is not tried again, as it should be; without a step that could happen.
        if faults and (faults[-1].rank, faults[-1].point, faults[-1].step) == (rank, point, None):
            kinds = tuple(kind for kind in kinds if kind != faults[-1].kind)
        kind = rng.choice(kinds)
        low, high = STEPS * attempt // count, STEPS * (attempt + 1) // count
        steps = [step for step in range(low, high) if comes_by(plan, rank, point, step)]
        step = None if point == "evaluate" or point in SAVING else rng.choice(steps)
        faults.append(Fault(rank, point, kind, step, attempt))
    return Job(number, plan, tuple(faults))


class Soak:
    """Runs jobs and what they are compared with.

    Args:
        out: a folder for each job; that of a job that went well is deleted.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self._reference = functools.cache(self._undisturbed)

    def run(self, job: Job) -> Outcome:
        folder = self.out / f"job-{job.number}"
        began = time.monotonic()
        wrong, log = self._train(job.plan, folder, job.faults)
        happened = tuple(each for each in job.faults if _came(each, log))
        if not wrong and _result(folder) != self._reference(job.plan):
            wrong = "other weights or losses than without faults"
        outcome = Outcome(job, happened, time.monotonic() - began, wrong)
        if not wrong:
            shutil.rmtree(folder)
        return outcome

    def _undisturbed(self, plan: Plan) -> tuple[bytes, object]:
        folder = self.out / f"reference {plan.name} {plan.schedule}"
        wrong, _ = self._train(plan, folder, ())
        if wrong:
            raise AssertionError(f"{folder}: without any fault: {wrong}")
        return _result(folder)

    def _train(self, plan: Plan, folder: Path, faults: Sequence[Fault]) -> tuple[str, str]:
        """What is wrong, and the log."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_json(folder / "given.json", plan)
        command = [
            sys.executable, "-m", "hybridpipe", "launch", "--launcher", "mpirun",
            "--ranks", str(plan.num_ranks), "--max-restarts", str(len(faults)), "--",
            "train", str(CONFIG), "--plan", str(folder / "given.json"),
            "--out", str(folder / "out"), "--hang-timeout", str(HANG_SECONDS),
            "--set", f"checkpoint.every={EVERY}",
        ]  # fmt: skip
        settings = {"HYBRIDPIPE_FAULT": ";".join(map(str, faults)), "OMP_NUM_THREADS": "1"}
        with (folder / "log.txt").open("w") as log:
            code = _ended(command, settings, SECONDS * (len(faults) + 1), log)
        text = (folder / "log.txt").read_text(errors="replace")
        return ("it hung" if code == HUNG else f"exit code {code}" if code else ""), text


def _ended(command: Sequence[str], settings: Mapping[str, str], limit: float, log: IO[str]) -> int:
    """The exit code. What ends the wait ends the job; the launcher is killed only where it does not end."""
    process = subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=subprocess.STDOUT)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return HUNG
    finally:
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _came(fault: Fault, log: str) -> bool:
    """Once, in its attempt: an attempt has one fault, and a point may come again after a restart."""
    attempts = re.split(r"hybridpipe: attempt \d+: ", log)
    said = f"rank {fault.rank}: injected {fault.kind} at {fault.point}, "
    return fault.attempt < len(attempts) and said in attempts[fault.attempt]


def _result(folder: Path) -> tuple[bytes, object]:
    """What a training has come to: its weights, and the losses of its epochs."""
    summary = json.loads((folder / "out" / "summary.json").read_text())
    losses = [(epoch["loss"], epoch["validation"]) for epoch in summary["epochs"]]
    return (folder / "out" / "model.safetensors").read_bytes(), losses


def table(outcomes: Sequence[Outcome]) -> str:
    """How often which fault happened at which point."""
    came = Counter((fault.point, fault.kind) for outcome in outcomes for fault in outcome.happened)
    kinds = [kind for kind in (*ENDING, *MESSAGES) if any(k == kind for _, k in came)]
    points = sorted({point for point, _ in came})
    rows = [
        [point, *(came[point, kind] or "" for kind in kinds), sum(came[point, k] for k in kinds)]
        for point in points
    ]
    rows.append(["all", *(sum(came[p, kind] for p in points) for kind in kinds), came.total()])
    return tabulate(rows, ["point", *kinds, "all"])


def report(outcomes: Sequence[Outcome]) -> str:
    """The soak in words."""
    plans = Counter(outcome.job.name for outcome in outcomes)
    happened = sum(len(outcome.happened) for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    as_without = sum(not outcome.wrong for outcome in outcomes)
    return "\n".join(
        [
            table(outcomes),
            "",
            tabulate(sorted(plans.items()), ["plan", "jobs"]),
            "",
            f"{happened} faults in {len(outcomes)} jobs, {seconds:,.0f} s; {as_without} jobs ended as "
            f"without faults, bit for bit; {len(outcomes) - as_without} did not",
        ]
    )
