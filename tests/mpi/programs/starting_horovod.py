"""Rank 0 has used Horovod before, the others have not: now they reduce together, with a cycle time set."""

import torch

from hybridpipe.collectives.horovod import HorovodCollectives, horovod
from hybridpipe.comm.mpi import MPI

world = MPI.COMM_WORLD
if world.rank == 0:
    horovod(MPI.COMM_SELF).shutdown()
collectives = HorovodCollectives(world, None)
for _ in range(3):  # the first is negotiated; then each rank finds in its own cache what is to be fused
    tensors = [torch.ones(2**18) for _ in range(4)]
    collectives.all_reduce(tensors, "bucket").wait()
    assert all(tensor.eq(world.size).all() for tensor in tensors)
collectives.close()
