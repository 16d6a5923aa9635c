"""The progress thread: where messages need one to arrive, and where it would only take a core.

Where the kernel lets a process read another's memory (CMA, XPMEM, KNEM), MPI has the receiver fetch a large
message by itself. Whether it does is tried and not asked for, as containers may forbid it and MPI libraries
differ. Not known here: transports.
"""

import time

import numpy as np
import torch

from hybridpipe.comm.groups import this_host
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.status import rank_status

NUM_BYTES = 2**20  # more than what MPI sends at once, over TCP too
# In each trial. A watchdog that looks for its messages moves others', once a second: not in every trial.
ASLEEP_SECONDS = 0.04
TRIALS = 3


def needs_progress_thread(world: MPI.Comm, device: torch.device) -> bool:
    """Whether messages are to be moved by a thread of their own. Collective over `world`.

    Not where all ranks are on one host, their compute threads leave no core for one more each, and no message
    waits for its sender: there it would only take a core from ranks that compute. (Two ranks on two cores
    trained 2 to 4 % faster without: docs/log.)
    """
    with rank_status.waiting("finding out how messages move", range(world.size)):
        host = this_host(world)
        busy = host.local_size * (torch.get_num_threads() + 1) > host.num_cores
        mine = host.local_size == world.size > 1 and busy and device.type == "cpu"
        return not (world.allreduce(mine, op=MPI.LAND) and _arrives_unaided(world))


def _arrives_unaided(world: MPI.Comm) -> bool:
    """Whether neighbours' messages arrive while who has sent them is asleep. Collective over `world`."""
    pairs = world.Dup()
    arrived = True
    for _ in range(TRIALS if pairs.rank ^ 1 < pairs.size else 0):
        arrived &= _trial(pairs, pairs.rank ^ 1)
    found = bool(world.allreduce(arrived, op=MPI.LAND))
    pairs.Free()
    return found


def _trial(pairs: MPI.Comm, peer: int) -> bool:
    """One message from the even rank to the odd one, who says whether it came before the other woke."""
    message = np.zeros(NUM_BYTES, np.uint8)
    if pairs.rank < peer:
        sending = pairs.Isend([message, MPI.BYTE], peer)
        time.sleep(ASLEEP_SECONDS)
        woken = time.monotonic()  # one clock for all processes of a host
        sending.Wait()
        pairs.send(woken, peer)
        return True
    pairs.Recv([message, MPI.BYTE], peer)
    there = time.monotonic()
    return bool(there < pairs.recv(source=peer))
