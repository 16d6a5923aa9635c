"""Progress thread: finds out if messages arrive only with the help of a thread on the sender.

Knows communicators and no transports. With single copy (CMA, XPMEM, KNEM) a receiver fetches a large message
by itself. This is tried out instead of queried, since containers may forbid it and MPI libraries differ.
"""

import time

import numpy as np
import torch

from hybridpipe.comm.communicators import this_host
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.status import rank_status

NUM_BYTES = 2**20  # more than MPI sends eagerly, over TCP too
# The sender's sleep in each trial.
ASLEEP_SECONDS = 0.04
TRIALS = 3  # several, since a watchdog's poll, once a second, may move the message of one trial


def needs_progress_thread(world: MPI.Comm, device: torch.device) -> bool:
    """Return True if each rank needs a thread that moves messages while it computes. Collective over `world`.

    No thread is needed if all ranks are on one host, their compute threads leave no core for another thread,
    and messages arrive while their sender sleeps. The thread would take a core from ranks that compute (two
    ranks on two cores trained 2 to 4 % faster without it: docs/log).
    """
    with rank_status.waiting("test of message progress", range(world.size)):
        host = this_host(world)
        lacks_cores = host.local_size * (torch.get_num_threads() + 1) > host.num_cores
        mine = host.local_size == world.size > 1 and lacks_cores and device.type == "cpu"
        return not (world.allreduce(mine, op=MPI.LAND) and arrive_unaided(world))


def arrive_unaided(world: MPI.Comm) -> bool:
    """Return True if large messages between neighbours arrive while their sender sleeps. Collective."""
    pairs = world.Dup()
    arrived = True
    for _ in range(TRIALS if pairs.rank ^ 1 < pairs.size else 0):
        arrived &= _trial(pairs, pairs.rank ^ 1)
    found = bool(world.allreduce(arrived, op=MPI.LAND))
    pairs.Free()
    return found


def _trial(pairs: MPI.Comm, peer: int) -> bool:
    """Send one message from the even to the odd rank; False on the odd rank if it came after the sleep."""
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
