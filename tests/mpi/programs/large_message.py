"""An activation of 3 GiB crosses from rank 0 to rank 1, and its gradient of one number a row comes back."""

import torch

from hybridpipe import Plan, StageSpec
from hybridpipe.comm.courier import Courier
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.mpi_transport import MpiTransport
from hybridpipe.comm.p2p import PointToPoint
from hybridpipe.device import Lanes
from hybridpipe.planning.schedules.generators import programs

ROWS, COLUMNS = 3 * 2**10, 2**18  # of four bytes
PLAN = Plan((StageSpec(0, 1), StageSpec(1, 2)), schedule="gpipe", num_microbatches=1)

rank = MPI.COMM_WORLD.rank
with MpiTransport(MPI.COMM_WORLD.Dup()) as transport:
    p2p = PointToPoint(PLAN, rank, Courier(transport, Lanes(torch.device("cpu"))))
    p2p.begin(programs(PLAN, 1)[rank], lambda _: ROWS, step=0, training=True)
    first = torch.arange(ROWS, dtype=torch.int32)[:, None]
    columns = torch.arange(COLUMNS, dtype=torch.int32)
    if rank == 0:
        p2p.send_activation(0, (first * 2**18 + columns, torch.zeros(2, requires_grad=True)))
        _, told = p2p.receive_gradient(0)
        print("the last row begins with", int(told[0]), "and", p2p.bytes_sent, "bytes were sent")
    else:
        received, _ = p2p.receive_activation(0)
        for row in range(ROWS):
            assert torch.equal(received[row], row * 2**18 + columns), row
        p2p.send_gradient(0, [None, torch.tensor([float(received[-1, 0]), 0.0])])
