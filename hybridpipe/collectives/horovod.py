"""Horovod's collectives: a background thread that negotiates, fuses and reduces over MPI or NCCL.

Knows tensors and a communicator; no parameters.
Invariant: a process has one Horovod world, that of its stage's replicas, or of the ranks that are measured.
"""

import os
import time
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hybridpipe.collectives.all_gather import Gather
from hybridpipe.collectives.protocol import Handle
from hybridpipe.errors import UserError
from hybridpipe.health import failure
from hybridpipe.planning.cost.formula import BUCKET_BYTES

if TYPE_CHECKING:
    from mpi4py import MPI

# Pause between two polls of an all-reduce. Horovod's own wait polls without a pause: with four ranks on two
# cores it took up to 15 % of a core a rank from ranks that still computed and from Horovod's threads.
POLL_SECONDS = 200e-6

CYCLE_TIME = "HOROVOD_CYCLE_TIME"  # milliseconds between two cycles of Horovod's background thread
FUSION_THRESHOLD = "HOROVOD_FUSION_THRESHOLD"  # bytes


class HorovodCollectives:
    """Horovod's collectives over a communicator. Its tensor fusion joins small tensors.

    Args:
        gather: starts an all-gather by MPI, which is faster than Horovod's (`all_gather`).
    """

    is_ordered = False

    def __init__(self, replicas: "MPI.Comm", gather: Gather) -> None:
        self._hvd = horovod(replicas)
        self.all_gather = gather

    def all_reduce(self, tensors: Sequence[Tensor], name: str) -> Handle:
        """Start to sum each tensor in place (`Collectives`)."""
        number = self._hvd.grouped_allreduce_async_(tensors, name=name, op=self._hvd.Sum)
        return _HorovodHandle(self._hvd, number)

    def reduce_scatter(self, rows: Tensor, name: str) -> Handle:
        """Start to sum rows, one for each rank (`Collectives`)."""
        number = self._hvd.grouped_reducescatter_async([rows], name=name, op=self._hvd.Sum)
        return _HorovodHandle(self._hvd, number)

    def close(self) -> None:
        """Shut down this process's Horovod world. Collective."""
        self._hvd.shutdown()


class _HorovodHandle:
    """A collective of Horovod's in progress."""

    def __init__(self, hvd: Any, number: Any) -> None:
        self._hvd, self._number = hvd, number

    def wait(self) -> Sequence[Tensor]:
        """Return the results; sleep between polls, as Horovod's wait takes a core."""
        while not self._hvd.poll(self._number):
            time.sleep(POLL_SECONDS)
        results: Sequence[Tensor] = self._hvd.synchronize(self._number)
        return results


def horovod(communicator: "MPI.Comm") -> Any:
    """Return `horovod.torch`, initialised on `communicator`. Collective over it.

    Every stage has a Horovod world of its own: with Horovod's process sets all stages would share one
    negotiation loop, and a stall in one would stall all (measured: 2.5 s against 0.1 s).

    Raises:
        UserError: Horovod is not installed.
    """
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise UserError(f"Horovod is missing ({str(error).splitlines()[0]}): hybridpipe setup") from error
    if hvd.is_initialized():
        hvd.shutdown()
    # A tensor larger than the threshold is reduced in place. By default Horovod fuses up to 128 MiB and
    # copies all of it in and out: two ranks took 64 ms for three weights of 16 MiB, and 22 ms without fusion.
    # Horovod 0.28.1 crashes at its second start if both this and a cycle time are set.
    if CYCLE_TIME not in os.environ:
        os.environ.setdefault(FUSION_THRESHOLD, str(BUCKET_BYTES))
    elif FUSION_THRESHOLD not in os.environ:
        _start_once(hvd)
    hvd.init(comm=communicator)
    failure.look_first_at_exit()
    return hvd


@cache
def _start_once(hvd: Any) -> None:
    """Start and stop Horovod once in this process, so that all ranks fuse tensors by the same threshold.

    With a cycle time set, Horovod 0.28.1 fuses up to 128 MiB after its first start and 1 MiB after any later
    one: its `ParameterManager` outlives `shutdown` and writes the default of 1 ms into the wrong field. Each
    rank fuses cached tensors by its own threshold. Ranks that differed in their number of starts reduced
    different numbers of bytes, and waited for ever or wrote past the end of a buffer.
    """
    from hybridpipe.comm.mpi import MPI

    hvd.init(comm=MPI.COMM_SELF)
    hvd.shutdown()
