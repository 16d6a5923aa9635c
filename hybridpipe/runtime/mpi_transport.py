"""MPI transport: nonblocking sends and receives, and one thread that makes progress.

The thread tests what is under way (`Testsome`), then sleeps a moment. Without it a large nonblocking send
stands still while Python computes, over TCP and over shared memory without single copy (measured: 16 MB
arrived 500 to 1100 ms late). Sleeping instead of spinning leaves the cores to whoever computes.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from hybridpipe.runtime.mpi import MPI
from hybridpipe.runtime.transport import Pending

# Pauses between polls, doubled from the first to the second while nothing completes: short while the main
# thread waits, longer while it computes and receives posted ahead are all there is. A fixed 50 µs took 15 % of
# a core and slowed computing down by 7 %; a blocking MPI receive takes 87 %.
FIRST_PAUSE_SECONDS = 50e-6
WAITING_PAUSE_SECONDS = 200e-6
COMPUTING_PAUSE_SECONDS = 1e-3


class _Request:
    """One MPI request, completed by the communication thread."""

    __slots__ = ("buffer", "completed", "request", "transport")

    def __init__(self, request: MPI.Request, buffer: object, transport: "MpiTransport") -> None:
        self.request, self.buffer, self.transport = request, buffer, transport
        self.completed = threading.Event()

    def wait(self) -> None:
        if not self.completed.is_set():
            with self.transport.attention():
                self.completed.wait()

    def complete(self) -> None:
        self.buffer = None
        self.completed.set()


class MpiTransport:
    """Transport over a communicator of its own. Use as a context manager, or `close` it."""

    def __init__(self, communicator: MPI.Comm) -> None:
        self._communicator = communicator
        self._active: list[_Request] = []
        self._wake = threading.Condition()
        self._closed = False
        self._num_waiting = 0
        self._thread = threading.Thread(target=self._progress, name="hybridpipe-communication", daemon=True)
        self._thread.start()

    def send(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        """Start sending (`MPI_Isend`)."""
        return self.watch(self._communicator.Isend([buffer.numpy(), MPI.BYTE], peer, tag), buffer)

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        """Post a receive (`MPI_Irecv`) of the size that is sent: a longer message overruns the buffer."""
        return self.watch(self._communicator.Irecv([buffer.numpy(), MPI.BYTE], peer, tag), buffer)

    def watch(self, request: MPI.Request, buffer: object) -> Pending:
        """Let the communication thread complete any request, such as that of a nonblocking collective."""
        pending = _Request(request, buffer, self)
        with self._wake:
            self._active.append(pending)
            self._wake.notify()
        return pending

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

    @contextmanager
    def attention(self) -> Iterator[None]:
        """While someone waits, poll at once and often."""
        with self._wake:
            self._num_waiting += 1
            self._wake.notify()
        try:
            yield
        finally:
            with self._wake:
                self._num_waiting -= 1

    def _progress(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while active := self._under_way():
            finished = MPI.Request.Testsome([pending.request for pending in active])
            if finished:
                self._complete([active[i] for i in finished])
                pause = FIRST_PAUSE_SECONDS
                continue
            with self._wake:
                if self._wake.wait(pause):
                    pause = FIRST_PAUSE_SECONDS
                else:
                    longest = WAITING_PAUSE_SECONDS if self._num_waiting else COMPUTING_PAUSE_SECONDS
                    pause = min(2 * pause, longest)

    def _under_way(self) -> list[_Request]:
        """All requests that are not complete, as soon as there are some; none when there will be no more."""
        with self._wake:
            while not self._active and not self._closed:
                self._wake.wait()
            return list(self._active)

    def _complete(self, finished: list[_Request]) -> None:
        with self._wake:
            self._active = [pending for pending in self._active if pending not in finished]
        for pending in finished:
            pending.complete()
