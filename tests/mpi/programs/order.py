"""Messages of many sizes, several under way at once, in both directions, each compared bit for bit."""

import torch

from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.mpi_transport import MpiTransport

world = MPI.COMM_WORLD
peer = 1 - world.rank
generators = [torch.Generator().manual_seed(rank) for rank in range(2)]

with MpiTransport(world.Dup()) as transport:
    for size in (1, 64, 4096, 100_000, 4_000_000):
        made = [
            [torch.randint(0, 256, (size,), generator=g, dtype=torch.uint8) for _ in range(6)]
            for g in generators
        ]
        received = [torch.zeros(size, dtype=torch.uint8) for _ in range(6)]
        receiving = [transport.receive(buffer, peer, tag=i % 2) for i, buffer in enumerate(received)]
        sending = [transport.send(buffer, peer, tag=i % 2) for i, buffer in enumerate(made[world.rank])]
        for pending in receiving + sending:
            pending.wait()
        for got, expected in zip(received, made[peer], strict=True):
            assert torch.equal(got, expected), size
