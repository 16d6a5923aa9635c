"""Exchange: rows of tensors that the replicas of a stage send each other, on a communicator of its own.

Knows tensors and MPI; nothing of experts. It is used in place of Horovod's all-to-all, which negotiates each
time and counts in 32 bits. Invariant: all replicas call the same methods in the same order.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from hybridpipe.comm.communicators import WatchedComm
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.mpi_transport import MpiTransport, memory_of


class RowExchange:
    """Exchanges rows among the ranks of a communicator, each of which calls the same methods.

    Args:
        replicas: communicator that nothing else uses.
        transport: waits.

    Attributes:
        bytes_sent: of rows to other ranks so far.
    """

    def __init__(self, replicas: WatchedComm, transport: MpiTransport) -> None:
        self._replicas, self._transport = replicas, transport
        self.size, self.bytes_sent = replicas.size, 0

    def numbers(self, sent: Tensor) -> Tensor:
        """Return the numbers that each rank has for this one; shape (ranks, n), int64, on the CPU.

        Args:
            sent: row r goes to rank r; shape, dtype and device of what is returned.
        """
        theirs = torch.empty_like(sent)
        request = self._replicas.Ialltoall([sent.numpy(), MPI.INT64_T], [theirs.numpy(), MPI.INT64_T])
        self._wait(request, (sent, theirs), "exchange of counts")
        return theirs

    def rows(self, sent: Tensor, sent_counts: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Return the rows that each rank has for this one, one after the other; on the device of `sent`.

        Args:
            sent: rows for each rank, one after the other; shape (rows, ...), with the same ... everywhere.
            sent_counts, counts: of the rows to and from each rank.
        """
        host = sent.detach().cpu().contiguous()
        theirs = torch.empty((sum(counts), *host.shape[1:]), dtype=host.dtype)
        row_bytes = host.element_size() * host.shape[1:].numel()
        row = MPI.BYTE.Create_contiguous(row_bytes).Commit()
        request = self._replicas.Ialltoallv(
            [memory_of(_bytes(host)), (sent_counts, _begins(sent_counts)), row],
            [memory_of(_bytes(theirs)), (counts, _begins(counts)), row],
        )
        self._wait(request, (host, theirs), f"exchange of {len(host)} rows")
        row.Free()
        self.bytes_sent += (len(host) - sent_counts[self._replicas.rank]) * row_bytes
        return theirs.to(sent.device)

    def _wait(self, request: MPI.Request, held: object, what: str) -> None:
        self._transport.watch(request, held, what, self._replicas.ranks).wait()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _begins(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]
