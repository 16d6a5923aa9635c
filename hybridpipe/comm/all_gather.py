"""All-gather of weights into the memory that they have, over the communicator of a stage's replicas.

Knows bytes and MPI; no parameters. Within a host it took a fifth of the time of Horovod's all-gather, whose
output is made anew (docs/log). Invariant: a rank writes no share but its own to the others.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hybridpipe.comm.groups import WatchedComm
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.mpi_transport import MpiTransport
from hybridpipe.comm.transport import Pending

WORD = torch.int64  # counts of words instead of bytes: MPI counts in 32 bits


def all_gather(transport: MpiTransport, replicas: WatchedComm, weights: Tensor) -> Pending:
    """Start to fill a tensor with every replica's share of it. Collective over the replicas.

    Args:
        weights: of one dimension and any device; one share of a multiple of 8 bytes for each replica, in
            their order, of which this replica's is there.
    """
    host = weights.cpu()
    words = host.view(WORD).numpy()
    request = replicas.Iallgather(MPI.IN_PLACE, [words, MPI.INT64_T])
    pending = transport.watch(request, words, "all-gather of weights", replicas.ranks)
    return pending if host is weights else _Loading(pending, weights, host)


class _Loading:
    """An all-gather in the host's memory, from where a GPU takes the weights."""

    def __init__(self, pending: Pending, weights: Tensor, host: Tensor) -> None:
        self._pending, self._weights, self._host = pending, weights, host

    def wait(self, on_slow: Callable[[], None] | None = None) -> None:
        """Wait for the weights, and load them; `on_slow` as for `Pending`."""
        self._pending.wait(on_slow)
        self._weights.copy_(self._host)

    def is_complete(self) -> bool:
        """Return True if `wait` waits for no other rank."""
        return self._pending.is_complete()
