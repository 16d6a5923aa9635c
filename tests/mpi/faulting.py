"""Jobs that something goes wrong in: what happened, how long the end took, what was left."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hybridpipe import launcher

PROGRAM = Path(__file__).parent / "programs" / "faulty.py"
GRACE_SECONDS = 1.0  # for what was just told to end
LIMIT_SECONDS = 60.0


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
        """The lines that tell a cause."""
        return [line for line in self.output.splitlines() if line.endswith("ending the job")]


def run(
    plan: str,
    schedule: str,
    fault: str,
    *options: str,
    program: Path = PROGRAM,
    env: dict[str, str] | None = None,
) -> Ended:
    """Train under `plan` ("2-1") with a fault. Not `launcher.run`, which would clean up what is left."""
    num_ranks = sum(map(int, plan.split("-")))
    token = uuid.uuid4().hex
    environment = os.environ | {"HYBRIDPIPE_FAULT": fault, launcher.TOKEN: token} | (env or {})
    command, added = launcher.mpirun_command(
        num_ranks, [sys.executable, str(program), plan, schedule, *options], environment
    )
    began = time.time()
    with tempfile.TemporaryFile("w+") as output:  # a pipe could be held open by what is left
        process = subprocess.Popen(
            command, env=environment | added, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            code = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            code = launcher.TIMED_OUT
        ended = time.time()
        left = _clean_up(process, token)
        output.seek(0)
        text = output.read()
    when = re.search(r"injected .* time ([\d.]+)", text)
    return Ended(code, ended - (float(when[1]) if when else began), text, left)


def _clean_up(process: subprocess.Popen, token: str) -> list[int]:
    """Ends what is left, and tells what was."""
    end = time.monotonic() + GRACE_SECONDS
    while (left := launcher._carriers(token)) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        process.kill()
    process.wait()
    return left
