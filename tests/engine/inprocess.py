"""In-process ranks: a transport over queues and a gradient sync over shared memory, without MPI."""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from queue import Empty, Queue
from typing import NamedTuple

import torch
from torch import Tensor

from hybridpipe.comm.messages import Buffers, ProtocolError
from hybridpipe.comm.transport import SLOW_WAIT_SECONDS, Pending, Unexpected, parts_of
from hybridpipe.device import Completion


class _Message(NamedTuple):
    """A message, which may be read once it is ready."""

    buffer: Tensor
    ready: Sequence[Completion]  # of each part

    def content(self) -> Tensor:
        """Return the message's bytes; wait until they are there."""
        for each in self.ready:
            while not each.query():
                pass
        return self.buffer


class Mailboxes:
    """The wire between the ranks of one process: a queue for each (sender, receiver, tag)."""

    def __init__(self) -> None:
        self._queues: defaultdict[tuple[int, int, int], Queue[_Message]] = defaultdict(Queue)
        self._lock = threading.Lock()

    def queue(self, sender: int, receiver: int, tag: int) -> "Queue[_Message]":
        """Return the queue from a sender to a receiver under a tag."""
        with self._lock:
            return self._queues[sender, receiver, tag]

    def waiting(self, sender: int, receiver: int) -> list[Unexpected]:
        """Return the messages that have not been received."""
        with self._lock:
            return [
                Unexpected(tag, message.content())
                for (source, target, tag), queue in self._queues.items()
                if (source, target) == (sender, receiver)
                for message in list(queue.queue)
            ]


class _Sent:
    def wait(self, on_slow: Callable[[], None] | None = None) -> None:
        """Return at once, since queues buffer the message."""

    def is_complete(self) -> bool:
        return True


class _Receiving:
    def __init__(
        self,
        buffer: Tensor,
        queue: "Queue[_Message]",
        timeout_seconds: float,
        arrived: Callable[[int], None] | None,
    ) -> None:
        self._buffer, self._queue, self._timeout_seconds = buffer, queue, timeout_seconds
        self._arrived = arrived
        self._completed = False

    def wait(self, on_slow: Callable[[], None] | None = None) -> None:
        """Wait for the message, and raise queue.Empty after the timeout."""
        if self._completed:
            return
        try:
            message = self._queue.get(timeout=min(SLOW_WAIT_SECONDS, self._timeout_seconds))
        except Empty:
            if on_slow is not None:
                on_slow()
            message = self._queue.get(timeout=self._timeout_seconds)
        content = message.content()
        if len(content) != len(self._buffer):
            raise ProtocolError(f"{len(content)} bytes came where the plan expects {len(self._buffer)}")
        self._buffer.numpy()[:] = content.numpy()
        for part in reversed(range(len(parts_of(content)))) if self._arrived is not None else ():
            self._arrived(part)
        self._completed = True

    def is_complete(self) -> bool:
        return self._completed or not self._queue.empty()


class QueueTransport:
    """Transport of one rank over the mailboxes."""

    def __init__(self, mailboxes: Mailboxes, rank: int, timeout_seconds: float = 30.0) -> None:
        self._mailboxes, self._rank, self._timeout_seconds = mailboxes, rank, timeout_seconds
        self.buffer = Buffers().take

    def send(self, buffer: Tensor, peer: int, tag: int, ready: Sequence[Completion] | None = None) -> Pending:
        """Put a copy into the peer's mailbox, or the buffer itself if it is not ready."""
        message = _Message(buffer.clone(), ()) if ready is None else _Message(buffer, ready)
        assert ready is None or len(ready) == len(parts_of(buffer))
        self._mailboxes.queue(self._rank, peer, tag).put(message)
        return _Sent()

    def receive(
        self, buffer: Tensor, peer: int, tag: int, arrived: Callable[[int], None] | None = None
    ) -> Pending:
        """Return a receive that takes the message from the mailbox in its `wait`."""
        queue = self._mailboxes.queue(peer, self._rank, tag)
        return _Receiving(buffer, queue, self._timeout_seconds, arrived)

    def unexpected(self, peer: int) -> list[Unexpected]:
        """Return all messages from the peer in the mailboxes; posted receives take theirs only in `wait`."""
        return self._mailboxes.waiting(peer, self._rank)


class SharedSync:
    """Sums gradients over the replicas of a stage, which are threads of one process."""

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

    def renew(self) -> None:
        """Do nothing: the sum covers all parameters."""

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    def begin_final_backward(self) -> None:
        """Do nothing: no sum starts early."""

    def end_final_backward(self) -> None:
        """Do nothing: no sum has started."""

    def finish(self, completes: bool = True) -> None:
        """Compute the sum in the order of the replicas, the same on each of them."""
        self._barrier.wait()
        sums = []
        for same in zip(*self._all, strict=True):
            present = [p.grad for p in same if p.grad is not None]
            sums.append(torch.stack(present).sum(0) if present else None)
        self._barrier.wait()
        for parameter, total in zip(self._parameters, sums, strict=True):
            parameter.grad = total
