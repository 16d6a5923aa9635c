"""Memory of the ranks: each rank's limit, found or given, and what it holds before training.

Not known here: models and plans. Invariant: every rank gets the same list.
"""

from importlib import import_module
from typing import TYPE_CHECKING

import torch

from hybridpipe.comm.idle import idle_barrier, machine_leaders
from hybridpipe.device import visible_gpus
from hybridpipe.environment.allocator import held_by_process
from hybridpipe.environment.memory_limits import RESERVE, RankMemory, Room, memory_by_rooms, rooms
from hybridpipe.planning.cluster import Cluster

if TYPE_CHECKING:
    from mpi4py import MPI

GIVEN = "given"


def memory_of_ranks(
    world: "MPI.Comm", device: torch.device, given: int | None = None, cluster: Cluster | None = None
) -> list[RankMemory]:
    """Return the memory of each rank. Collective.

    The least limit counts. On a GPU that of the host is not looked at.

    Args:
        device: of this rank.
        given: bytes that a rank may have in all; None: only what is found counts.
        cluster: of as many ranks, whose `memory_bytes` are bytes for stages; rank 0's is used.
    """
    import_module("torch._dynamo")  # 80 MB, which the first optimizer would import, and no stage's
    cluster = world.bcast(cluster)
    on_host = device.type == "cpu"
    held = held_by_process() if on_host else torch.cuda.memory_allocated(device)
    if not on_host:
        torch.cuda.empty_cache()
    idle_barrier(world)  # ranks that share memory have let go of what they do not use, too
    mine = rooms() if on_host else [_gpu(device)]
    if given is not None:
        mine.append(Room(GIVEN, given, with_held=True))
    if cluster is not None and cluster.num_ranks == world.size and cluster.memory_bytes is not None:
        mine.append(Room("cluster.json", int(cluster.memory(world.rank) * RESERVE)))
    ranks: list[tuple[list[Room], int]] = world.allgather((mine, held))
    every, holdings = zip(*ranks, strict=True)
    return memory_by_rooms(every, holdings, machine_leaders(world))


def _gpu(device: torch.device) -> Room:
    free, _ = torch.cuda.mem_get_info(device)
    return Room("GPU memory", free, f"GPU {visible_gpus()[device.index or 0]}")
