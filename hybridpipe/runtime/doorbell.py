"""Doorbell: within a host whoever sends rings, so that whoever waits can sleep until then.

MPI lets nobody sleep: who waits for a message looks again and again, and each look gives the processor away.
So datagrams of Linux go beside it, with nothing in them. Knows no messages.
Invariant: a ring is a hint: it may come for nothing, or before its message; who sleeps looks in the end.
"""

import select
import socket
import sys
import time
from contextlib import suppress

import numpy as np

from hybridpipe.runtime.mpi import MPI

TRIAL_BYTES = 2**18  # far more than MPI sends at once
TRIAL_SECONDS = 0.1  # for ranks that wait for a processor, too; it takes less than a millisecond
TRIAL_PAUSE_SECONDS = 1e-4


class Doorbell:
    """This rank's bell, and those of the ranks of a communicator that share its host. Collective.

    There are none unless all of the host's ranks want them, nor where a large message needs its sender's
    help, for a sender that computes gives none: where shared memory is without single copy. `peers` is empty
    then.
    """

    def __init__(self, communicator: MPI.Comm, wanted: bool = True) -> None:
        self._addresses: dict[int, bytes] = {}
        host = communicator.Split_type(MPI.COMM_TYPE_SHARED)
        self._socket = _bound_socket() if wanted and host.size > 1 else None
        address = self._socket.getsockname() if self._socket else None
        addresses = host.allgather((communicator.rank, address))
        if all(address for _, address in addresses):
            self._addresses = dict(addresses)
            if not self._moves_alone(host, [rank for rank, _ in addresses]):
                self.close()
        else:
            self.close()
        host.Free()

    @property
    def peers(self) -> frozenset[int]:
        """The ranks that can be rung, and that ring."""
        return frozenset(self._addresses)

    def ring(self, peer: int) -> None:
        """There is a message now. A peer that is gone does not hear it, nor one that has not heard many."""
        assert self._socket is not None
        with suppress(OSError):
            self._socket.sendto(b"", self._addresses[peer])

    def sleep(self, seconds: float) -> bool:
        """Until somebody rings or has rung since the last time, or for so long. Did somebody?"""
        assert self._socket is not None
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(1e3 * seconds):
            return False
        with suppress(BlockingIOError):
            while True:
                self._socket.recv(1)
        return True

    def close(self) -> None:
        """Ring, and be rung, no more."""
        self._addresses = {}
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _moves_alone(self, host: MPI.Comm, ranks: list[int]) -> bool:
        """Does a large message come to the rank beside while its sender stays out of MPI? Collective."""
        beside, alone = host.rank ^ 1, True
        host.Barrier()
        if beside < host.size:
            trial = np.zeros(TRIAL_BYTES, dtype=np.uint8)
            if host.rank < beside:
                request = host.Isend(trial, beside)
                alone = self.sleep(TRIAL_SECONDS)
            else:
                request = host.Irecv(trial, beside)
                end = time.monotonic() + TRIAL_SECONDS
                while not (arrived := request.Test()) and time.monotonic() < end:
                    time.sleep(TRIAL_PAUSE_SECONDS)
                if arrived:
                    self.ring(ranks[beside])
            request.Wait()
        agreed: bool = host.allreduce(alone, MPI.LAND)
        return agreed


def _bound_socket() -> socket.socket | None:
    """With a name of its own, in no folder; None where there are no such sockets."""
    if sys.platform != "linux":
        return None
    try:
        found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        found.bind("")
    except OSError:
        return None
    found.setblocking(False)
    return found
