"""Sums: tensors that shards of a replica, or replicas of a stage, add up, on a communicator of their own.

Knows tensors and MPI; nothing of modules. Invariant: all ranks call the same methods in the same order, and
all get the same numbers, bit for bit, so that what they compute alike stays alike.
"""

import torch
from torch import Tensor

from hybridpipe.comm.communicators import WatchedComm
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.mpi_transport import MpiTransport

_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}


class TensorSums:
    """Exchanges tensors among the ranks of a communicator, each of which calls the same methods.

    Args:
        ranks: communicator that nothing else uses.
        transport: waits.
        among: the ranks in words, for reports.

    Attributes:
        bytes_sent: of this rank's tensors so far, each counted once.
    """

    def __init__(self, ranks: WatchedComm, transport: MpiTransport, among: str = "shards") -> None:
        self._ranks, self._transport, self._among = ranks, transport, among
        self.index, self.size, self.bytes_sent = ranks.rank, ranks.size, 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, of one shape and dtype; half precision adds up in float32."""
        if tensor.dtype not in _TYPES:
            return self._gathered(tensor).sum(0, dtype=torch.float32).to(tensor.dtype).to(tensor.device)
        total = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self.bytes_sent += total.nbytes
        numbers = [total.numpy(), _TYPES[total.dtype]]
        request = self._ranks.Iallreduce(MPI.IN_PLACE, numbers, op=MPI.SUM)
        self._wait(request, total, f"sum of {total.nbytes} bytes over {self._among}")
        return total.to(tensor.device)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors, one after the other along the last dimension."""
        return torch.cat(list(self._gathered(tensor)), -1).to(tensor.device)

    def from_first(self, tensor: Tensor) -> Tensor:
        """Return the first rank's tensor, on the CPU; the others pass one of its shape and dtype."""
        shared = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        request = self._ranks.Ibcast([shared.reshape(-1).view(torch.uint8).numpy(), MPI.BYTE], 0)
        self._wait(request, shared, f"{shared.nbytes} bytes from the first of {self._among}")
        return shared

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors on the host, shape (ranks, ...)."""
        own = tensor.detach().cpu().contiguous()
        self.bytes_sent += own.nbytes
        everyone = torch.empty((self.size, *own.shape), dtype=own.dtype)
        sent, received = (each.reshape(-1).view(torch.uint8) for each in (own, everyone))
        request = self._ranks.Iallgather([sent.numpy(), MPI.BYTE], [received.numpy(), MPI.BYTE])
        self._wait(request, (own, everyone), f"gathering {own.nbytes} bytes from {self._among}")
        return everyone

    def _wait(self, request: MPI.Request, held: object, what: str) -> None:
        self._transport.watch(request, held, what, self._ranks.ranks).wait()
