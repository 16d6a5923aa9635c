"""MPI transport: nonblocking sends and receives, and one thread that makes progress while others compute.

Whoever waits polls (`Testsome`, then a short sleep) by itself; while nobody waits, the communication thread
does. Without it a large nonblocking send stands still while Python computes, over TCP and over shared memory
without single copy (measured: 16 MB arrived 500 to 1100 ms late). Sleeping instead of spinning leaves the
cores to whoever computes: a blocking MPI receive takes 87 % of one.
"""

import threading
import time
from collections.abc import Iterator

from torch import Tensor

from hybridpipe.runtime.mpi import MPI
from hybridpipe.runtime.transport import Pending

# Pauses between polls, doubled from the first to the last while nothing completes. A waiting rank wants its
# message soon. While it computes, receives posted ahead are mostly all there is: a fixed 50 µs took 15 % of a
# core and slowed computing down by 7 %, these pauses take 2 %. A send under way is another matter: without
# single copy it goes in fragments, each of which waits for polls of both sides (256 KiB to a rank that waits
# while the sender computes: 7.9 ms with the long pause, 3 ms with the short one).
FIRST_PAUSE_SECONDS = 20e-6
LAST_PAUSE_WAITING_SECONDS = 200e-6
LAST_PAUSE_SENDING_SECONDS = 100e-6
LAST_PAUSE_COMPUTING_SECONDS = 1e-3


class _Request:
    """One MPI request under way."""

    __slots__ = ("buffer", "completed", "request", "sends", "transport")

    def __init__(self, request: MPI.Request, buffer: object, transport: "MpiTransport", sends: bool) -> None:
        self.request, self.buffer, self.transport, self.sends = request, buffer, transport, sends
        self.completed = False

    def wait(self) -> None:
        if not self.completed:
            self.transport.wait_for(self)

    def complete(self) -> None:
        self.buffer = None
        self.completed = True


class MpiTransport:
    """Transport over a communicator of its own. Use as a context manager, or `close` it."""

    def __init__(self, communicator: MPI.Comm) -> None:
        self._communicator = communicator
        self._active: list[_Request] = []
        self._polling = threading.Lock()  # held by the one thread that tests the requests
        self._wake = threading.Condition()  # guards what follows, and wakes the communication thread
        self._closed = False
        self._num_waiting = 0
        self._thread = threading.Thread(target=self._progress, name="hybridpipe-communication", daemon=True)
        self._thread.start()

    def send(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        """Start sending (`MPI_Isend`)."""
        return self.watch(self._communicator.Isend([buffer.numpy(), MPI.BYTE], peer, tag), buffer, sends=True)

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        """Post a receive (`MPI_Irecv`) of the size that is sent: a longer message overruns the buffer."""
        return self.watch(self._communicator.Irecv([buffer.numpy(), MPI.BYTE], peer, tag), buffer)

    def watch(self, request: MPI.Request, buffer: object, sends: bool = False) -> Pending:
        """Let any request be completed in the background, such as that of a nonblocking collective."""
        pending = _Request(request, buffer, self, sends)
        # Not tested here: a test that finds nothing yields the core (mpi_yield_when_idle), and with more
        # ranks than cores what is to be computed next waits for a time slice, a millisecond and more.
        with self._wake:
            self._active.append(pending)
            self._wake.notify()
        return pending

    def wait_for(self, pending: _Request) -> None:
        """Poll until the request is complete; the communication thread rests meanwhile."""
        with self._wake:
            self._num_waiting += 1
        for pause in _pauses(LAST_PAUSE_WAITING_SECONDS):
            self._poll()
            if pending.completed:
                break
            time.sleep(pause)
        with self._wake:
            self._num_waiting -= 1
            self._wake.notify()

    def close(self) -> None:
        """Wait for what is under way and end the communication thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def __enter__(self) -> "MpiTransport":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _progress(self) -> None:
        """The communication thread."""
        while self._has_work():
            for pause in _pauses(LAST_PAUSE_COMPUTING_SECONDS):
                if self._poll() or self._num_waiting:
                    break
                with self._wake:
                    if any(pending.sends for pending in self._active):
                        pause = min(pause, LAST_PAUSE_SENDING_SECONDS)
                    if self._wake.wait(pause):  # something new is under way
                        break

    def _has_work(self) -> bool:
        """True once something is under way and nobody polls; False once there will be nothing more."""
        with self._wake:
            while self._num_waiting or not self._active:
                if self._closed and not self._active:
                    return False
                self._wake.wait()
            return True

    def _poll(self) -> bool:
        """Test what is under way; True if something was completed."""
        with self._polling:
            with self._wake:
                active = list(self._active)
            finished = MPI.Request.Testsome([pending.request for pending in active])
            if not finished:
                return False
            with self._wake:
                completed = [active[i] for i in finished]
                self._active = [pending for pending in self._active if pending not in completed]
        for pending in completed:
            pending.complete()
        return True


def _pauses(last: float) -> Iterator[float]:
    """Seconds to sleep between polls: doubled up to the last."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, last)
