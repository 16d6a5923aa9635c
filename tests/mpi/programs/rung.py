"""Rank 1 waits half a second for a message; prints how often it looked, where the sender rings."""

import time

import torch

from hybridpipe.runtime.mpi import MPI
from hybridpipe.runtime.mpi_transport import MpiTransport

MANY = 30  # more rings than Linux keeps, by default


class Counting(MpiTransport):
    """Counts looks for messages."""

    looks = 0

    def _probe(self) -> MPI.Message | None:
        self.looks += 1
        return super()._probe()


world = MPI.COMM_WORLD
with Counting(world.Dup()) as transport:
    for size in (64, 2**20):
        buffer = torch.zeros(size, dtype=torch.uint8)
        world.Barrier()
        if world.rank == 0:
            time.sleep(0.5)
            transport.send(torch.full_like(buffer, 7), 1, 0).wait()
        else:
            transport.looks = 0
            transport.receive(buffer, 0, 0).wait()
            print(f"{transport.looks} looks, rung: {bool(transport.rung)}", flush=True)
            assert buffer.eq(7).all()
    buffers = [torch.zeros(64, dtype=torch.uint8) for _ in range(MANY)]
    if world.rank == 0:
        sending = [transport.send(buffer.fill_(i), 1, 0) for i, buffer in enumerate(buffers)]
        world.Barrier()
        for pending in sending:
            pending.wait()
    else:
        world.Barrier()
        for i, buffer in enumerate(buffers):
            transport.receive(buffer, 0, 0).wait()
            assert buffer.eq(i).all()
