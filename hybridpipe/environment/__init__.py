"""Environment of a process: its cores, its rank, the number of ranks that its launcher started, its terminal.

Not known here: MPI itself; only the standard library is imported. Invariant: nothing is changed.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")  # set by launchers
# Set by `hybridpipe launch --groups`: a group's index, their number, and the address of their meeting.
GROUP_OF_JOB = "HYBRIDPIPE_GROUP"


def cores() -> frozenset[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(cores())


def this_machine() -> str:
    """Return a name that is equal for processes that see each other in /proc."""
    machine = ""
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            machine += os.readlink(path) if Path(path).is_symlink() else Path(path).read_text().strip()
        except OSError:
            machine += str(os.getpid())  # no other process has it in common
    return machine


def group_prefix(env: Mapping[str, str] = os.environ) -> str:
    """Return what lines of a group begin with that is a job of its own, such as "group 1: "; else nothing."""
    launched = env.get(GROUP_OF_JOB)
    return f"group {launched.split()[0]}: " if launched else ""


def launched_rank(env: Mapping[str, str] = os.environ) -> int:
    """Return this process's rank from the launcher's variables, before MPI starts; 0 without a launcher."""
    return next((int(env[name]) for name in RANK_VARIABLES if name in env), 0)


def promised_ranks(env: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks that the launcher of this process started; None without a launcher.

    A smaller world means that launcher and MPI do not fit together: every process has a world of its own.
    """
    if "SLURM_STEP_ID" in env and "OMPI_COMM_WORLD_SIZE" not in env:  # a task of srun, not a batch script
        return int(env.get("SLURM_STEP_NUM_TASKS", "1"))
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if name in env:
            return int(env[name])
    return None


def apart(num_ranks: int) -> str | None:
    """Say that the launcher has started more ranks than a world has; None if it has not.

    Each then sees a world of its own: the launcher and MPI do not fit each other.
    """
    promised = promised_ranks() or 1
    if num_ranks >= promised:
        return None
    return f"the launcher started {promised} ranks, and this one sees a world of {num_ranks}"


def on_terminal(env: Mapping[str, str] = os.environ) -> bool:
    """True if stderr is shown on a terminal. Under mpirun only the launcher knows, through a variable."""
    if "OMPI_COMM_WORLD_RANK" in env or "PMI_RANK" in env:
        return env.get("HYBRIDPIPE_TERMINAL") == "1"
    return sys.stderr.isatty()
