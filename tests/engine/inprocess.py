"""In-process: the same executor with a thread for each rank, queues for the wire. No MPI messages move."""

import threading
from collections import defaultdict
from collections.abc import Callable
from queue import Empty, Queue

import torch
from torch import Tensor

from hybridpipe.comm.messages import Buffers, ProtocolError
from hybridpipe.comm.transport import SLOW_WAIT_SECONDS, Pending, Unexpected


class Mailboxes:
    """The wire between the ranks of one process: a queue for each (sender, receiver, tag)."""

    def __init__(self) -> None:
        self._queues: defaultdict[tuple[int, int, int], Queue[Tensor]] = defaultdict(Queue)
        self._lock = threading.Lock()

    def queue(self, sender: int, receiver: int, tag: int) -> "Queue[Tensor]":
        """Messages in order."""
        with self._lock:
            return self._queues[sender, receiver, tag]

    def lying(self, sender: int, receiver: int) -> list[Unexpected]:
        """The messages that have not been taken."""
        with self._lock:
            return [
                Unexpected(tag, message)
                for (source, target, tag), queue in self._queues.items()
                if (source, target) == (sender, receiver)
                for message in list(queue.queue)
            ]


class _Sent:
    def wait(self, on_slow: Callable[[], None] | None = None) -> None:
        """Buffered: done at once."""

    def is_complete(self) -> bool:
        return True


class _Receiving:
    def __init__(self, buffer: Tensor, queue: "Queue[Tensor]", timeout_seconds: float) -> None:
        self._buffer, self._queue, self._timeout_seconds = buffer, queue, timeout_seconds
        self._completed = False

    def wait(self, on_slow: Callable[[], None] | None = None) -> None:
        """Raises queue.Empty when nothing comes in time."""
        if self._completed:
            return
        try:
            message = self._queue.get(timeout=min(SLOW_WAIT_SECONDS, self._timeout_seconds))
        except Empty:
            if on_slow is not None:
                on_slow()
            message = self._queue.get(timeout=self._timeout_seconds)
        if len(message) != len(self._buffer):
            raise ProtocolError(f"{len(message)} bytes came where the plan expects {len(self._buffer)}")
        self._buffer.copy_(message)
        self._completed = True

    def is_complete(self) -> bool:
        return self._completed or not self._queue.empty()


class QueueTransport:
    """Transport of one rank over the mailboxes."""

    def __init__(self, mailboxes: Mailboxes, rank: int, timeout_seconds: float = 30.0) -> None:
        self._mailboxes, self._rank, self._timeout_seconds = mailboxes, rank, timeout_seconds
        self.buffer = Buffers().take

    def send(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        """Put a copy into the peer's mailbox."""
        self._mailboxes.queue(self._rank, peer, tag).put(buffer.clone())
        return _Sent()

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        """Take from the mailbox when waited for."""
        return _Receiving(buffer, self._mailboxes.queue(peer, self._rank, tag), self._timeout_seconds)

    def unexpected(self, peer: int) -> list[Unexpected]:
        """What lies in the peer's mailbox for this rank: whoever has asked takes it when it waits."""
        return self._mailboxes.lying(peer, self._rank)


class SharedSync:
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

    @property
    def owned(self) -> list[Tensor]:
        """All of them."""
        return self._parameters

    def renew(self) -> None:
        """Nothing depends on what is trained."""

    def close(self) -> None:
        """Nothing to give back."""

    def begin_final_backward(self) -> None:
        """Nothing starts early here."""

    def end_final_backward(self) -> None:
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
