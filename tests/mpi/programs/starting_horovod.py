"""Rank 0 has used Horovod before, the others have not: now they reduce together, with a cycle time set."""

import torch

from hybridpipe.comm.mpi import MPI
from hybridpipe.optim.gradient_sync import horovod, wait_for

world = MPI.COMM_WORLD
if world.rank == 0:
    horovod(MPI.COMM_SELF).shutdown()
hvd = horovod(world)
for _ in range(3):  # the first is negotiated; then each rank finds in its own cache what is to be fused
    tensors = [torch.ones(2**18) for _ in range(4)]
    wait_for(hvd, hvd.grouped_allreduce_async_(tensors, name="bucket", op=hvd.Sum))
    assert all(tensor.eq(world.size).all() for tensor in tensors)
hvd.shutdown()
