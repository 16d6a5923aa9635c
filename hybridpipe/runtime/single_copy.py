"""Single copy: do messages between the ranks of one host arrive without their sender's help?

Where the kernel lets a process read another's memory (CMA, XPMEM, KNEM), MPI has the receiver fetch a large
message by itself. Whether it does is tried and not asked for, as containers may forbid it and MPI libraries
differ. Not known here: what follows from it.
"""

import time

import numpy as np
import torch

from hybridpipe.runtime.communicators import this_host
from hybridpipe.runtime.mpi import MPI
from hybridpipe.runtime.position import position

SIZES_BYTES = (2**13, 2**20)  # both larger than what MPI sends at once
ASLEEP_SECONDS = 0.05


def needs_no_thread(world: MPI.Comm, device: torch.device) -> bool:
    """Whether a communication thread would only take a core from ranks that compute. Collective over `world`.

    That is where all ranks are on one host, their compute threads leave no core for one more each, and no
    message waits for its sender. (Two ranks on two cores trained 2 to 4 % faster without: performance log.)
    """
    host = this_host(world)
    busy = host.local_size * (torch.get_num_threads() + 1) > host.num_cores
    mine = host.local_size == world.size > 1 and busy and device.type == "cpu"
    with position.waiting("finding out how messages move", range(world.size)):
        return bool(world.allreduce(mine, op=MPI.LAND)) and _arrives_unaided(world)


def _arrives_unaided(world: MPI.Comm) -> bool:
    """Whether neighbours' messages arrive while who has sent them is asleep. Collective over `world`."""
    pairs = world.Dup()
    is_sender, peer = pairs.rank % 2 == 0, pairs.rank ^ 1
    arrived = True
    if peer < pairs.size:
        messages = [np.zeros(num_bytes, np.uint8) for num_bytes in SIZES_BYTES]
        if is_sender:
            sending = [pairs.Isend([message, MPI.BYTE], peer) for message in messages]
            time.sleep(ASLEEP_SECONDS)
            woken = time.monotonic()  # one clock for all processes of a host
            MPI.Request.Waitall(sending)
            pairs.send(woken, peer)
        else:
            for message in messages:
                pairs.Recv([message, MPI.BYTE], peer)
            there = time.monotonic()
            arrived = there < pairs.recv(source=peer)
    found = bool(world.allreduce(arrived, op=MPI.LAND))
    pairs.Free()
    return found
