"""MPI transport: nonblocking sends and receives, and one thread that makes progress.

The thread tests what is under way (`Testsome`), then sleeps a moment. Without it a large nonblocking send
stands still while Python computes, over TCP and over shared memory without single copy (measured: 16 MB
arrived 500 to 1100 ms late). Sleeping instead of spinning leaves the cores to whoever computes.
"""

import threading
import time

from torch import Tensor

from hybridpipe.runtime.mpi import MPI
from hybridpipe.runtime.transport import Pending

# Between polls while anything is under way. A blocking MPI receive burns 0.87 of a core instead.
POLL_SECONDS = 50e-6


class _Request:
    """One MPI request, completed by the communication thread."""

    __slots__ = ("buffer", "completed", "request")

    def __init__(self, request: MPI.Request, buffer: object) -> None:
        self.request, self.buffer = request, buffer
        self.completed = threading.Event()

    def wait(self) -> None:
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
        pending = _Request(request, buffer)
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

    def _progress(self) -> None:
        while True:
            with self._wake:
                while not self._active:
                    if self._closed:
                        return
                    self._wake.wait()
                active = list(self._active)
            finished = MPI.Request.Testsome([pending.request for pending in active])
            if not finished:
                time.sleep(POLL_SECONDS)
                continue
            completed = [active[i] for i in finished]
            with self._wake:
                self._active = [pending for pending in self._active if pending not in completed]
            for pending in completed:
                pending.complete()
