"""Transport: the protocol of moving bytes between ranks; `mpi_transport` implements it between processes.

Knows no content of messages. Invariant: messages of one (peer, tag) arrive in order.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from hybridpipe.device import Completion

# A wait longer than this calls `on_slow`, and again after as long.
SLOW_WAIT_SECONDS = 1.0
# A longer message travels in parts, which are copied to and from a GPU while others are under way. Each is a
# handshake of its own, for which ranks that compute are slow: over TCP, 16 MiB in parts of 4 took 100 ms
# beside Python's work, in one 45.
PART_BYTES = 2**24

LARGEST_TAG = 2**15 - 1  # every MPI library allows it
# Tags of gradients of shared parameters, and of notes that a slot was read; all others are below.
SHARED_TAG, READ_TAG = LARGEST_TAG, LARGEST_TAG - 1


class Pending(Protocol):
    """A transfer in progress."""

    def wait(self, on_slow: Callable[[], None] | None = None) -> None:
        """Return once the buffer may be used again.

        Args:
            on_slow: called after every SLOW_WAIT_SECONDS of waiting; may raise.

        Raises:
            ProtocolError: a message of another size has arrived.
        """

    def is_complete(self) -> bool:
        """Return True if `wait` would return at once."""


class PendingParts(NamedTuple):
    """The transfers of a message's parts."""

    pending: Sequence[Pending]

    def wait(self, on_slow: Callable[[], None] | None = None) -> None:
        """Wait for each part."""
        for part in self.pending:
            part.wait(on_slow)

    def is_complete(self) -> bool:
        """Return True if all parts are complete."""
        return all(part.is_complete() for part in self.pending)


def parts_of(buffer: Tensor) -> list[Tensor]:
    """Return a message's parts, which share its memory.

    All but the last have PART_BYTES. The last is shorter, and empty where nothing is left, so that the end of
    a message shows (`is_last`).
    """
    if len(buffer) < PART_BYTES:
        return [buffer]
    return [buffer[start : start + PART_BYTES] for start in range(0, len(buffer) + 1, PART_BYTES)]


def is_last(part: Tensor) -> bool:
    """Return True if a part ends its message."""
    return len(part) < PART_BYTES


class Unexpected(NamedTuple):
    """A message that has arrived without a posted receive; `message` is its first part."""

    tag: int
    message: Tensor


class Transport(Protocol):
    """Moves bytes between ranks, any number of them.

    Its buffers are contiguous one-dimensional uint8 tensors.
    """

    def buffer(self, num_bytes: int) -> Tensor:
        """Return a buffer to send from or receive into: CPU memory, pinned if the device is a GPU."""

    def send(self, buffer: Tensor, peer: int, tag: int, ready: Sequence[Completion] | None = None) -> Pending:
        """Start sending; `buffer` is kept alive, and must not change, until the transfer is complete.

        Args:
            ready: an event for each of `parts_of(buffer)`, before which nothing is read from that part.
                Events of later parts and calls come later.
        """

    def receive(
        self, buffer: Tensor, peer: int, tag: int, arrived: Callable[[int], None] | None = None
    ) -> Pending:
        """Post a receive of exactly `len(buffer)` bytes.

        Args:
            arrived: called with the number of each part that has arrived, in any thread and order, one at a
                time and before the receive is complete.
        """

    def unexpected(self, peer: int) -> list[Unexpected]:
        """Return the messages from a peer that have arrived without a posted receive."""
