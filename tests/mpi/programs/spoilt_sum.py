"""Under mpirun: one all-reduce fails in the thread of rank 1, and a larger one has been started behind it."""

import torch

from hybridpipe.collectives.mpi import MpiCollectives
from hybridpipe.comm.mpi import MPI
from hybridpipe.device import Lanes
from hybridpipe.health import failure

failure.install()
world = MPI.COMM_WORLD
collectives = MpiCollectives(world, Lanes(torch.device("cpu")), None)
sums = collectives._sum


def spoilt(flat: torch.Tensor) -> None:
    if world.rank == 1 and len(flat) == 1000:
        raise MemoryError("injected")
    sums(flat)


collectives._sum = spoilt
with failure.guard():
    for work in [collectives.all_reduce([torch.ones(n)], str(n)) for n in (1000, 300_000)]:
        work.wait()
