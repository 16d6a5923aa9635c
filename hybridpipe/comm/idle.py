"""Together: what ranks that measure at once need of each other, without taking a core from any.

Who waits here sleeps between two looks: a blocking MPI call burns the core of whoever is being measured.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from hybridpipe.comm.status import rank_status
from hybridpipe.environment import cores
from hybridpipe.planning.cost.fit import typical
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.types import Agree

if TYPE_CHECKING:
    from mpi4py import MPI

PAUSE_SECONDS = 5e-4
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def idle_barrier(world: "MPI.Comm") -> None:
    """A barrier that sleeps."""
    _sleep_until(world, world.Ibarrier())


def largest(world: "MPI.Comm", number: float) -> float:
    """The largest of all ranks' numbers; a barrier, too."""
    from hybridpipe.comm.mpi import MPI

    found = np.array([number])
    _sleep_until(world, world.Iallreduce(MPI.IN_PLACE, found, op=MPI.MAX))
    return float(found[0])


def machine_leaders(world: "MPI.Comm") -> list[int]:
    """For each rank the first rank that uses the same machine's processors.

    Hosts that are containers, or network namespaces, of one machine have its boot id in common.
    """
    from hybridpipe.comm.mpi import MPI

    machine = _BOOT_ID.read_text() if _BOOT_ID.is_file() else MPI.Get_processor_name()
    machines = world.allgather(machine)
    return [machines.index(each) for each in machines]


def cores_to_spare(world: "MPI.Comm") -> bool:
    """Has every rank of this machine a core of its own? Collective."""
    num_ranks, num_cores = machine_cores(world)
    return num_ranks <= num_cores


def machine_cores(world: "MPI.Comm") -> tuple[int, int]:
    """The number of this machine's ranks, and of the cores that they have together. Collective."""
    leaders = machine_leaders(world)
    mine = [
        each
        for each, leader in zip(world.allgather(cores()), leaders, strict=True)
        if leader == leaders[world.rank]
    ]
    return len(mine), len(frozenset().union(*mine))  # a launcher may have bound each to its own


def share_cores(world: "MPI.Comm") -> None:
    """Give each rank of a host its part of the cores to compute with, unless the user has said how many."""
    from hybridpipe.comm.groups import default_num_threads, this_host

    num_threads = default_num_threads(this_host(world))
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def measure_together(world: "MPI.Comm", measure: Callable[[Agree], ModelProfile]) -> ModelProfile:
    """The profile under the load that will be: every rank measures at once, and all have the same result.

    Collective. Figures are the medians over the ranks of the first machine.
    """
    profile = measure(partial(largest, world))
    idle_barrier(world)
    profiles = world.gather(profile)
    leaders = machine_leaders(world)
    if profiles is not None:
        profile = typical([each for each, leader in zip(profiles, leaders, strict=True) if leader == 0])
    agreed: ModelProfile = world.bcast(profile)
    return agreed


def _sleep_until(world: "MPI.Comm", request: "MPI.Request") -> None:
    with rank_status.waiting("measuring together", range(world.size)):
        while not request.Test():
            time.sleep(PAUSE_SECONDS)
