"""Staged transport: messages that come from a GPU and go to one, to measure links as training uses them.

Not known here: what is measured. Invariant: as in training, a copy out, MPI, and a copy in for each message.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.mpi_transport import MpiTransport
from hybridpipe.comm.transport import Pending
from hybridpipe.device import Completion, GpuLanes


class _Onward(NamedTuple):
    """A message that goes on to the GPU when it has arrived."""

    pending: Pending
    host: Tensor
    lanes: GpuLanes

    def wait(self, on_slow: Callable[[], None] | None = None) -> None:
        self.pending.wait(on_slow)
        self.lanes.copy_in(self.host)
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

    def send(self, buffer: Tensor, peer: int, tag: int, ready: Completion | None = None) -> Pending:
        """Start sending as many bytes as `buffer` has."""
        host = self.buffer(len(buffer))
        copied = self._lanes.copy_out(host, self._lanes.empty(len(buffer)))
        return super().send(host, peer, tag, copied)

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        """Post a receive of as many bytes as `buffer` has."""
        host = self.buffer(len(buffer))
        return _Onward(super().receive(host, peer, tag), host, self._lanes)
