"""Gpus: each rank's own GPU, and which ranks compute on one processor.

Knows hosts and the GPUs that their ranks see; no plan. Invariant: all ranks of a host choose by one rule.
"""

import torch

from hybridpipe.comm.communicators import default_num_threads, this_host
from hybridpipe.comm.idle import machine_leaders
from hybridpipe.comm.mpi import MPI
from hybridpipe.device import device_of_rank, visible_gpus
from hybridpipe.notices import notices


def own_device(world: MPI.Comm, device: torch.device | str | None) -> torch.device:
    """Choose this rank's device, as `device_of_rank`, and make it torch's current one. Collective.

    Ranks of a host may see different GPUs, as Slurm's `--gpus-per-task` lets them.
    """
    seen, host = visible_gpus(), world.Split_type(MPI.COMM_TYPE_SHARED)
    alike = [rank for rank, theirs in enumerate(host.allgather(seen)) if theirs == seen]
    chosen = device_of_rank(alike.index(host.rank), len(alike), len(seen), device)
    host.Free()
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)  # pinned memory and layers that use "cuda" take the current device
    return chosen


def processor_leaders(world: MPI.Comm, device: torch.device) -> list[int]:
    """Return for each rank the first that computes on the same GPU, or on the same machine. Collective."""
    gpu = visible_gpus()[device.index] if device.type == "cuda" else ""
    machine = machine_leaders(world)[world.rank]
    processors = world.allgather((machine, gpu))
    return [processors.index(each) for each in processors]


def tell_shared_gpus(world: MPI.Comm, device: torch.device) -> None:
    """Say on rank 0 if several ranks compute on one GPU. Collective."""
    on_gpus = world.allgather(device.type == "cuda")
    leaders = processor_leaders(world, device)
    ranks = [[rank for rank, leader in enumerate(leaders) if leader == each] for each in range(world.size)]
    most = max((each for each in ranks if each and on_gpus[each[0]]), key=len, default=[])
    if world.rank == 0 and len(most) > 1:
        told = ", ".join(map(str, most))
        notices.tell(f"ranks {told} share a GPU: its time and its memory")


def device_with_threads(world: MPI.Comm, device: torch.device | str | None) -> torch.device:
    """Choose this rank's device, and set its compute threads unless the user has. Collective."""
    chosen = own_device(world, device)
    tell_shared_gpus(world, chosen)
    num_threads = default_num_threads(this_host(world))
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return chosen
