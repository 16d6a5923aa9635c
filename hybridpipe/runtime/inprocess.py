"""In-process: the same executor with a thread for each rank, queues for the wire. No MPI messages move.

For tests and for looking at a plan at work in a debugger.
"""

import threading
from collections import defaultdict
from queue import SimpleQueue

import torch
from torch import Tensor

from hybridpipe.runtime.transport import Pending


class Mailboxes:
    """The wire between the ranks of one process: a queue for each (sender, receiver, tag)."""

    def __init__(self) -> None:
        self._queues: defaultdict[tuple[int, int, int], SimpleQueue[Tensor]] = defaultdict(SimpleQueue)
        self._lock = threading.Lock()

    def queue(self, sender: int, receiver: int, tag: int) -> "SimpleQueue[Tensor]":
        """Messages in order."""
        with self._lock:
            return self._queues[sender, receiver, tag]


class _Sent:
    def wait(self) -> None:
        """Buffered: done at once."""


class _Receiving:
    def __init__(self, buffer: Tensor, queue: "SimpleQueue[Tensor]", timeout_seconds: float) -> None:
        self._buffer, self._queue, self._timeout_seconds = buffer, queue, timeout_seconds

    def wait(self) -> None:
        """Raises queue.Empty when nothing comes in time."""
        message = self._queue.get(timeout=self._timeout_seconds)
        if len(message) != len(self._buffer):
            raise ValueError(f"a message of {len(message)} bytes came for a buffer of {len(self._buffer)}")
        self._buffer.copy_(message)


class QueueTransport:
    """Transport of one rank over the mailboxes."""

    def __init__(self, mailboxes: Mailboxes, rank: int, timeout_seconds: float = 30.0) -> None:
        self._mailboxes, self._rank, self._timeout_seconds = mailboxes, rank, timeout_seconds

    def send(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        """Put a copy into the peer's mailbox."""
        self._mailboxes.queue(self._rank, peer, tag).put(buffer.clone())
        return _Sent()

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        """Take from the mailbox when waited for."""
        return _Receiving(buffer, self._mailboxes.queue(peer, self._rank, tag), self._timeout_seconds)


class SharedGradients:
    """Gradients summed over the replicas of a stage, which are threads of one process."""

    bytes_reduced = 0

    def __init__(
        self,
        parameters: list[Tensor],
        replica: int,
        all_replicas: list[list[Tensor]],
        barrier: threading.Barrier,
    ) -> None:
        self._parameters, self._replica = parameters, replica
        self._all, self._barrier = all_replicas, barrier

    def arm(self) -> None:
        """Nothing starts early here."""

    def disarm(self) -> None:
        """Nothing did."""

    def finish(self) -> None:
        """Every replica computes the same sum, in the order of the replicas."""
        self._barrier.wait()
        sums = []
        for same in zip(*self._all, strict=True):
            present = [p.grad for p in same if p.grad is not None]
            sums.append(torch.stack(present).sum(0) if present else None)
        self._barrier.wait()
        for parameter, total in zip(self._parameters, sums, strict=True):
            parameter.grad = total
