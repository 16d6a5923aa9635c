"""Transport: moves bytes between ranks, in order for each (peer, tag); knows no tensors' meaning.

The protocol, and the buffers that its users fill. `mpi_transport` moves them between processes,
`inprocess` between threads.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Who has waited for so long asks whether what it waits for can still come, and again after as long.
DOUBT_SECONDS = 1.0


class Pending(Protocol):
    """A transfer under way."""

    def wait(self, doubt: Callable[[], None] | None = None) -> None:
        """Return once the buffer may be used again.

        Args:
            doubt: called now and then if it takes long; may raise.

        Raises:
            ProtocolError: a message of another size has come.
        """

    def is_complete(self) -> bool:
        """Whether `wait` would return at once."""


class Unclaimed(NamedTuple):
    """A message that has come, and that nobody has asked for."""

    tag: int
    message: Tensor


class Transport(Protocol):
    """What the executor needs of the wire; buffers are contiguous one-dimensional uint8 CPU tensors."""

    def send(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        """Start sending; `buffer` is held, and must not change, until it is done."""

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        """Post a receive of exactly `len(buffer)` bytes."""

    def unclaimed(self, peer: int) -> list[Unclaimed]:
        """What has come from there without having been asked for, so far."""


class Buffers:
    """Byte buffers that are used again: fresh memory costs a page fault every 4 KiB.

    A buffer comes back by itself once no tensor looks at its memory any more. No one could give it back
    by hand in time: autograd may keep a view of a received gradient as a parameter's `.grad`.
    """

    def __init__(self, pinned: bool = False) -> None:
        self._free: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self._pinned = pinned

    def take(self, num_bytes: int) -> Tensor:
        """A buffer of that many bytes, with anything in it."""
        free = self._free[num_bytes]
        if free:
            memory = free.pop()
        else:
            memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned).numpy()
        alias = memory.view()  # the tensor's storage holds the alias; its end is the end of the last tensor
        weakref.finalize(alias, free.append, memory).atexit = False
        return torch.from_numpy(alias)
