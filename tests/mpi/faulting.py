"""Jobs that something goes wrong in: what happened, how long the end took, what was left."""

import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hybridpipe.launch import mpirun
from tests.start import forked

PROGRAM = Path(__file__).parent / "programs" / "faulty.py"
GRACE_SECONDS = 1.0  # for what was just told to end
LIMIT_SECONDS = 150.0  # of a whole job, on a machine with other work


MOST_SECONDS = {"kill": 10.0, "segv": 10.0}  # from fault to end; others:
OTHERS_SECONDS = 5.0
_SIGNALS = {"kill": 9, "segv": 11}


@dataclass(frozen=True)
class Case:
    """One thing that goes wrong on one rank."""

    plan: str
    schedule: str
    rank: int
    point: str
    kind: str

    def __str__(self) -> str:
        return f"{self.plan} {self.schedule} rank {self.rank} {self.point} {self.kind}"

    @property
    def fault(self) -> str:
        """As HYBRIDPIPE_FAULT has it; not in the first step, where connections are made."""
        step = 8 if self.point == "evaluate" else 4  # eight minibatches an epoch, two replicas at most
        if self.schedule.startswith("pipedream") and self.point in ("step", "all-reduce"):
            return f"rank={self.rank},point={self.point},kind={self.kind}"  # updates cover some minibatches
        return f"rank={self.rank},step={step},point={self.point},kind={self.kind}"

    def mistakes(self, ended: "Ended") -> list[str]:
        """What does not hold that must, when the job ends because of this."""
        limit = MOST_SECONDS.get(self.kind, OTHERS_SECONDS)
        wrong = []
        if f"injected {self.kind} at {self.point}" not in ended.output:
            wrong.append("the fault did not happen")
        if ended.code in (0, mpirun.TIMED_OUT):
            wrong.append(f"exit code {ended.code}")
        if ended.seconds > limit:
            wrong.append(f"took {ended.seconds:.1f} s, at most {limit:g}")
        if ended.left:
            wrong.append(f"left {len(ended.left)} processes")
        return wrong + [f"blames something else: {line}" for line in self._blamed_wrongly(ended)]

    def _blamed_wrongly(self, ended: "Ended") -> list[str]:
        if self.kind in _SIGNALS:  # mpirun tells
            rank_died = rf"process rank {self.rank} with PID \d+ on node \S+ exited\s+on\s+signal"
            told = re.search(rf"{rank_died} {_SIGNALS[self.kind]}\b", ended.output)
            return ended.reports if told else ["mpirun does not tell", *ended.reports]
        name = "SystemExit: 3" if self.kind == "exit" else f"injected {self.kind} at {self.point}"
        right = [line for line in ended.reports if f"rank {self.rank} on host" in line and name in line]
        return [] if right and right == ended.reports else ["no report", *ended.reports]

    def run(self) -> tuple["Ended", list[str]]:
        """The end of the job, and what is wrong with it."""
        ended = run(self.plan, self.schedule, self.fault)
        return ended, self.mistakes(ended)


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Args:
        seconds: from the fault (without one: the start) until mpirun was gone.
        left: processes of the job a second after that; they are gone now.
    """

    code: int
    seconds: float
    output: str
    left: list[int]

    @property
    def reports(self) -> list[str]:
        """The lines that tell a cause; mpirun may write its own right behind one."""
        return re.findall(r"hybridpipe: ranks? .*?; ending the job", self.output)


def run(
    plan: str,
    schedule: str,
    fault: str,
    *options: str,
    program: Path = PROGRAM,
    env: dict[str, str] | None = None,
) -> Ended:
    """Train under `plan` ("2-1") with a fault. Not `mpirun.run`, which would clean up what is left."""
    num_ranks = sum(map(int, plan.partition(":")[0].split("-")))
    # No fork of a server: that would kill what is left.
    environment = os.environ | {"HYBRIDPIPE_FAULT": fault, forked.SOCKETS: ""} | (env or {})
    command, added = mpirun.mpirun_command(
        num_ranks, [sys.executable, str(program), plan, schedule, *options], environment
    )
    with tempfile.TemporaryFile("w+") as output:  # a pipe could be held open by what is left
        job = mpirun.start(command, environment | added, stdout=output, stderr=output)
        began = time.time()
        code, seconds, left = end_of(job)
        text = read(output)
    when = re.search(r"injected .* time ([\d.]+)", text)
    return Ended(code, began + seconds - (float(when[1]) if when else began), text, left)


def end_of(job: mpirun.Job) -> tuple[int, float, list[int]]:
    """Waits until the launcher is gone: its exit code, the seconds, and what was left a second later."""
    began = time.monotonic()
    try:
        code = job.process.wait(LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        code = mpirun.TIMED_OUT
    seconds = time.monotonic() - began
    while (left := job.left()) and time.monotonic() < began + seconds + GRACE_SECONDS:
        time.sleep(0.05)
    job.end()
    return code, seconds, left


def read(output: IO[str]) -> str:
    """All of a file that others write."""
    output.seek(0)
    return output.read()
