"""Machines as an earlier training in the same folder has measured them, for one under the same conditions.

Not known here: how they are measured. Invariant: all ranks use the same measurement, or none.
"""

import os
import platform
import socket
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hybridpipe.comm.mpi import MPI
from hybridpipe.config import Config
from hybridpipe.environment import num_cores
from hybridpipe.errors import UserError
from hybridpipe.files import parse, read_object, write_json
from hybridpipe.planning.cluster import Cluster
from hybridpipe.version import __version__

MACHINES = "machines.json"  # in a training's folder
FORMAT = "hybridpipe-machines/1"


@dataclass(frozen=True)
class Machines:
    """A measurement, and what it depends on.

    Args:
        conditions: text by name (`conditions`).
        cluster: the machines, without limits of memory.
    """

    conditions: dict[str, str]
    cluster: Cluster
    format: str = FORMAT


def conditions(world: MPI.Comm, config: Config) -> dict[str, str]:
    """Describe what a measurement of the machines depends on, the same on every rank. Collective.

    Besides hosts, launcher and versions it is the work that ranks do meanwhile, which slows others down.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    threads = os.environ.get("OMP_NUM_THREADS", "default")
    mine = f"{socket.gethostname()}: {device}, {num_cores()} cores, {threads} threads"
    by_srun = "SLURM_STEP_ID" in os.environ and "OMPI_COMM_WORLD_SIZE" not in os.environ
    train = config.train
    software = {"hybridpipe": __version__, "Python": platform.python_version(), "torch": torch.__version__}
    mpi = MPI.Get_library_version().rstrip("\0").splitlines()[0]
    return {
        "ranks": "; ".join(world.allgather(mine)),
        "launcher": "srun" if by_srun else "mpirun",
        "versions": ", ".join([*(f"{name} {version}" for name, version in software.items()), mpi]),
        "work": f"{config.model}, {train.minibatch}, {train.microbatch}, {train.precision}",
        "plan": f"{config.plan.source}, zero = {config.plan.zero}",  # decides what is measured
    }


def measured_before(world: MPI.Comm, out: Path, now: dict[str, str]) -> Cluster | None:
    """Return what a training in `out` has measured under the same conditions, else None. Collective."""
    found: Cluster | None = None
    if world.rank == 0 and (earlier := _read(out / MACHINES)) is not None and earlier.conditions == now:
        found = earlier.cluster
    found = world.bcast(found)
    return found


def _read(path: Path) -> Machines | None:
    """Return the measurement; None if there is none, or it is another version's."""
    if not path.exists():
        return None
    try:
        return parse(Machines, read_object(path), str(path))
    except UserError:  # it is measured anew, and written anew
        return None


def remember(out: Path, now: dict[str, str], cluster: Cluster) -> None:
    """Write a measurement for `measured_before`. Rank 0 only."""
    write_json(out / MACHINES, Machines(now, replace(cluster, memory_bytes=None)))
