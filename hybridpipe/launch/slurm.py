"""Slurm: what the supervisor of a job asks of its cluster. Standard library only.

Not known here: ranks and launchers. Invariant: only a job that runs is requeued; a cancelled one stays so.
"""

import re
import subprocess
import sys
from collections.abc import Mapping

SECONDS = 20.0  # for an answer of the controller


def hosts(env: Mapping[str, str]) -> list[str]:
    """Return the names of the job's hosts; none in a container, where srun finds them itself."""
    return _told("scontrol", "show", "hostnames", env.get("SLURM_JOB_NODELIST", "")).split()


def is_running(env: Mapping[str, str]) -> bool:
    """Return True unless Slurm is about to end or requeue the job; False outside of one."""
    return "SLURM_JOB_ID" in env and _told("squeue", "-hj", env["SLURM_JOB_ID"], "-o%T") == "RUNNING"


def kill_wait() -> float | None:
    """Return the seconds from the TERM to the KILL of a job that Slurm ends; None if they are not known."""
    found = re.search(r"^KillWait\s*= (\d+)", _told("scontrol", "show", "config"), re.M)
    return None if found is None else float(found[1])


def requeue(env: Mapping[str, str]) -> bool:
    """Return the job to the queue; False if it does not run, or Slurm refuses, which says why itself."""
    if not is_running(env):
        return False
    try:
        done = subprocess.run(["scontrol", "requeue", env["SLURM_JOB_ID"]], timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"hybridpipe: the job is not requeued: {error}", file=sys.stderr, flush=True)
        return False
    return done.returncode == 0


def _told(*command: str) -> str:
    """Return what a command of Slurm prints; nothing if there is none, or no answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
