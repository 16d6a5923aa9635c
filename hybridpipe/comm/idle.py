"""Idle waits: barriers and reductions that sleep between polls, for ranks that measure at the same time.

A blocking MPI call would occupy a core that the measured rank needs.
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
    """Wait for all ranks and sleep between polls. Collective."""
    _sleep_until(world, world.Ibarrier())


def largest(world: "MPI.Comm", number: float) -> float:
    """Return the largest of all ranks' numbers and sleep between polls. Collective."""
    from hybridpipe.comm.mpi import MPI

    found = np.array([number])
    _sleep_until(world, world.Iallreduce(MPI.IN_PLACE, found, op=MPI.MAX))
    return float(found[0])


def machine_leaders(world: "MPI.Comm") -> list[int]:
    """Return for each rank the first rank on the same machine. Collective.

    Containers and network namespaces of one machine share its boot id.
    """
    from hybridpipe.comm.mpi import MPI

    machine = _BOOT_ID.read_text() if _BOOT_ID.is_file() else MPI.Get_processor_name()
    machines = world.allgather(machine)
    return [machines.index(each) for each in machines]


def cores_to_spare(world: "MPI.Comm") -> bool:
    """Return True if every rank of this machine has a core of its own. Collective."""
    num_ranks, num_cores = machine_cores(world)
    return num_ranks <= num_cores


def machine_cores(world: "MPI.Comm") -> tuple[int, int]:
    """Return the number of this machine's ranks and the number of cores they may use. Collective."""
    leaders = machine_leaders(world)
    mine = [
        each
        for each, leader in zip(world.allgather(cores()), leaders, strict=True)
        if leader == leaders[world.rank]
    ]
    return len(mine), len(frozenset().union(*mine))  # ranks may be bound to different cores


def share_cores(world: "MPI.Comm") -> None:
    """Set torch's threads to a rank's share of its host's cores, unless OMP_NUM_THREADS is set.

    Collective.
    """
    from hybridpipe.comm.communicators import default_num_threads, this_host

    num_threads = default_num_threads(this_host(world))
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def measure_together(world: "MPI.Comm", measure: Callable[[Agree], ModelProfile]) -> ModelProfile:
    """Measure a profile on all ranks at once, as training will load them. Collective.

    Returns:
        the same profile on all ranks: medians over the ranks of the first machine.
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
    with rank_status.waiting("joint measurement", range(world.size)):
        while not request.Test():
            time.sleep(PAUSE_SECONDS)
