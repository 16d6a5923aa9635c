"""MPI transport: nonblocking sends and receives, and one thread that makes progress while others compute.

Whoever waits polls by itself; while nobody waits, the communication thread does. Without it a large
nonblocking send stands still while Python computes, over TCP and over shared memory without single copy
(measured: 16 MB arrived 500 to 1100 ms late). A rank that waits for long sleeps between polls, which leaves
the cores to whoever computes: a blocking MPI receive takes 87 % of one.
"""

import threading
import time
from collections.abc import Iterator

from torch import Tensor

from hybridpipe.runtime.mpi import MPI
from hybridpipe.runtime.transport import Pending

# A rank that waits looks again at once for so long, where every rank of its machine has a core of its own: a
# pause lasts at least 70 µs, the kernel's timer slack included, and a small message takes 2.
SPIN_SECONDS = 2e-3
# Then, or from the start where ranks outnumber cores, it pauses: from the first to the last, doubled in
# between while nothing completes.
FIRST_PAUSE_SECONDS = 20e-6
LAST_PAUSE_SECONDS = 200e-6
# The communication thread's pauses. Receives posted ahead are mostly all there is while a rank computes: a
# fixed 50 µs took 15 % of a core and slowed computing down by 7 %, 1 ms takes 2 %. A large send under way is
# another matter: without single copy it goes in fragments, each of which waits for polls of both sides
# (256 KiB to a rank that waits while the sender computes: 7.9 ms with the long pause, 3 ms with the short).
PAUSE_URGENT_SECONDS = 100e-6
PAUSE_SECONDS = 1e-3
# Doubled up to this until there is something new: 1 ms and no more takes 4 % of a core on a virtual machine,
# whose timers and thread switches are slow.
IDLE_PAUSE_SECONDS = 4e-3
# With nothing under way it takes so many pauses more before it sleeps until it is woken: to wake it for each
# message would cost more than a small message.
LINGER_PAUSES = 12
# A message of up to this size is on its way when `Isend` returns and needs no progress.
SMALL_BYTES = 4096
# Who waits tests its own request, and what else is under way once there is so much of it.
MOST_ACTIVE = 8


class _Request:
    """One MPI request under way."""

    __slots__ = ("buffer", "completed", "request", "transport", "urgent")

    def __init__(self, request: MPI.Request, buffer: object, transport: "MpiTransport", urgent: bool) -> None:
        self.request, self.buffer, self.transport, self.urgent = request, buffer, transport, urgent
        self.completed = False

    def wait(self) -> None:
        if not self.completed:
            self.transport.wait_for(self)

    def complete(self) -> None:
        self.buffer = None
        self.completed = True


class MpiTransport:
    """Transport over a communicator of its own. Use as a context manager, or `close` it.

    Args:
        cores_to_spare: every rank of this machine has a core of its own, so that one that waits may use it.
    """

    def __init__(self, communicator: MPI.Comm, cores_to_spare: bool = False) -> None:
        self._communicator = communicator
        self._spin_seconds = SPIN_SECONDS if cores_to_spare else 0.0
        self._active: list[_Request] = []
        self._polling = threading.Lock()  # held by the one thread that tests the requests
        self._guard = threading.Lock()  # guards what follows
        self._wake = threading.Condition(self._guard)  # wakes the communication thread
        self._asleep = False  # the communication thread, until it is woken
        self._brisk = False  # it makes short pauses
        self._pause = PAUSE_SECONDS
        self._closed = False
        self._num_waiting = 0
        self.thread = threading.Thread(target=self._progress, name="hybridpipe-communication", daemon=True)
        self.thread.start()

    def send(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        """Start sending (`MPI_Isend`)."""
        array = buffer.numpy()
        request = self._communicator.Isend([array, MPI.BYTE], peer, tag)
        return self._watch(_Request(request, buffer, self, urgent=array.nbytes > SMALL_BYTES))

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        """Post a receive (`MPI_Irecv`) of the size that is sent: a longer message overruns the buffer."""
        return self.watch(self._communicator.Irecv([buffer.numpy(), MPI.BYTE], peer, tag), buffer)

    def watch(self, request: MPI.Request, buffer: object) -> Pending:
        """Let any request be completed in the background, such as that of a nonblocking collective."""
        return self._watch(_Request(request, buffer, self, urgent=False))

    def _watch(self, pending: _Request) -> _Request:
        # Not tested here: a test that finds nothing yields the core (mpi_yield_when_idle), and with more
        # ranks than cores what is to be computed next waits for a time slice, a millisecond and more.
        with self._guard:
            self._active.append(pending)
            self._pause = PAUSE_SECONDS
            if self._asleep or (pending.urgent and not self._brisk):
                self._wake.notify()
        return pending

    def wait_for(self, pending: _Request) -> None:
        """Poll until the request is complete; the communication thread rests meanwhile."""
        with self._guard:
            self._num_waiting += 1
        end = time.perf_counter() + self._spin_seconds
        pauses = _pauses()
        while not self._test(pending):
            if time.perf_counter() >= end:
                time.sleep(next(pauses))
        with self._guard:
            self._num_waiting -= 1

    def close(self) -> None:
        """Wait for what is under way and end the communication thread."""
        with self._guard:
            self._closed = True
            self._wake.notify()
        self.thread.join()

    def __enter__(self) -> "MpiTransport":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _progress(self) -> None:
        """The communication thread."""
        idle_pauses = 0
        while True:
            with self._guard:
                if self._closed and not self._active:
                    return
                idle_pauses = 0 if self._active else idle_pauses + 1
                self._asleep = idle_pauses > LINGER_PAUSES
                self._brisk = any(pending.urgent for pending in self._active)
                pause = PAUSE_URGENT_SECONDS if self._brisk else self._pause
                self._pause = min(2 * self._pause, IDLE_PAUSE_SECONDS)
                self._wake.wait(None if self._asleep else pause)
                self._asleep = self._brisk = False
                due = bool(self._active) and not self._num_waiting
            if due:
                self._poll()

    def _test(self, pending: _Request) -> bool:
        """Is the request complete? If so, see to what else is, too."""
        with self._polling:
            if not pending.completed:
                if not pending.request.Test():
                    return False
                with self._guard:
                    self._active.remove(pending)
                pending.complete()
        if len(self._active) > MOST_ACTIVE:
            self._poll()
        return True

    def _poll(self) -> None:
        """Test what is under way."""
        with self._polling:
            with self._guard:
                active = list(self._active)
            finished = MPI.Request.Testsome([pending.request for pending in active])
            if not finished:
                return
            completed = [active[i] for i in finished]
            with self._guard:
                self._active = [pending for pending in self._active if pending not in completed]
            for pending in completed:
                pending.complete()


def _pauses() -> Iterator[float]:
    """Seconds to sleep between polls: doubled up to the last."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, LAST_PAUSE_SECONDS)
