"""Transport: moves bytes between ranks, in order for each (peer, tag); knows no tensors' meaning.

The protocol alone; `mpi_transport` moves them between processes.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

# Who has waited for so long asks whether what it waits for can still come, and again after as long.
SLOW_WAIT_SECONDS = 1.0


class Pending(Protocol):
    """A transfer under way."""

    def wait(self, on_slow: Callable[[], None] | None = None) -> None:
        """Return once the buffer may be used again.

        Args:
            on_slow: called now and then if it takes long; may raise.

        Raises:
            ProtocolError: a message of another size has come.
        """

    def is_complete(self) -> bool:
        """Whether `wait` would return at once."""


class Unexpected(NamedTuple):
    """A message that has come, and that nobody has asked for."""

    tag: int
    message: Tensor


class Transport(Protocol):
    """The wire between ranks; its buffers are contiguous one-dimensional uint8 tensors."""

    def buffer(self, num_bytes: int) -> Tensor:
        """A buffer where this transport sends from, and receives into: CPU memory, pinned for a GPU."""

    def send(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        """Start sending; `buffer` is held, and must not change, until it is done."""

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        """Post a receive of exactly `len(buffer)` bytes."""

    def unexpected(self, peer: int) -> list[Unexpected]:
        """What has come from there without having been asked for, so far."""
