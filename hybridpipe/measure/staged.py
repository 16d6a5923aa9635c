"""Staged transport: messages that come from a GPU and go to one, to measure links as training uses them.

Not known here: what is measured. Invariant: as in training, a copy out, MPI, and a copy in for each message.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from hybridpipe.comm.courier import staged
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.mpi_transport import MpiTransport
from hybridpipe.comm.transport import Pending, parts_of
from hybridpipe.device import Completion, GpuLanes


class _Onward(NamedTuple):
    """A message that goes on to the GPU when it has arrived."""

    pending: Pending
    body: Callable[[], Tensor]
    lanes: GpuLanes

    def wait(self, on_slow: Callable[[], None] | None = None) -> None:
        self.pending.wait(on_slow)
        self.body()
        self.lanes.synchronize()

    def is_complete(self) -> bool:
        return self.pending.is_complete()


class StagedTransport(MpiTransport):
    """A transport that takes sizes from its buffers, and bytes from and to the GPU.

    Args:
        lanes: of the GPU.
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        cores_to_spare: bool = False,
        progress_thread: bool = True,
        *,
        lanes: GpuLanes,
    ) -> None:
        super().__init__(communicator, cores_to_spare, progress_thread, pinned=True)
        self._lanes = lanes

    def send(self, buffer: Tensor, peer: int, tag: int, ready: Sequence[Completion] | None = None) -> Pending:
        """Start sending as many bytes as `buffer` has."""
        host = self.buffer(len(buffer))
        copied = self._lanes.copy_out(parts_of(host), parts_of(self._lanes.empty(len(buffer))))
        return super().send(host, peer, tag, copied)

    def receive(
        self, buffer: Tensor, peer: int, tag: int, arrived: Callable[[int], None] | None = None
    ) -> Pending:
        """Post a receive of as many bytes as `buffer` has."""
        pending, body = staged(super().receive, self._lanes, self.buffer(len(buffer)), peer, tag)
        return _Onward(pending, body, self._lanes)
