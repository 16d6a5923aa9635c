"""Transport: the protocol of moving bytes between ranks; `mpi_transport` implements it between processes.

Knows no content of messages. Invariant: messages of one (peer, tag) arrive in order.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

# A wait longer than this calls `on_slow`, and again after as long.
SLOW_WAIT_SECONDS = 1.0


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


class Unexpected(NamedTuple):
    """A message that has arrived without a posted receive."""

    tag: int
    message: Tensor


class Transport(Protocol):
    """Moves bytes between ranks; its buffers are contiguous one-dimensional uint8 tensors."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Return a buffer to send from or receive into: CPU memory, pinned if the device is a GPU."""

    def send(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        """Start sending; `buffer` is kept alive, and must not change, until the transfer is complete."""

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        """Post a receive of exactly `len(buffer)` bytes."""

    def unexpected(self, peer: int) -> list[Unexpected]:
        """Return the messages from a peer that have arrived without a posted receive."""
