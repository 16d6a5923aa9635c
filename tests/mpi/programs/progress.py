"""Rank 0 sends 16 MB, then computes for half a second; rank 1 prints how long the message took."""

import sys
import time

import torch

from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.mpi_transport import MpiTransport

world = MPI.COMM_WORLD
torch.set_num_threads(1)
matrix = torch.ones(512, 512)

with MpiTransport(world.Dup()) as transport:
    for _ in range(5):
        buffer = torch.zeros(16 * 2**20, dtype=torch.uint8)
        if world.rank == 1:
            pending = transport.receive(buffer, 0, 0)
        world.Barrier()
        began = time.perf_counter()
        if world.rank == 0:
            pending = transport.send(buffer, 1, 0)
            while time.perf_counter() < began + 0.5:
                if sys.argv[1] == "torch":
                    matrix @ matrix
            pending.wait()
            world.send(began, 1)
        else:
            pending.wait()
            arrived = time.perf_counter()  # the clock of one host
            print(f"arrived after {(arrived - world.recv(source=0)) * 1e3:.1f} ms", flush=True)
