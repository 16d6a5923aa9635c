"""MPI's collectives: a thread that runs one blocking collective after another, beside computing.

Knows tensors and a communicator; no parameters.
Invariant: only the thread uses the communicator, so collectives have one order on all ranks.
"""

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from hybridpipe.collectives.all_gather import Gather
from hybridpipe.collectives.parcels import parcels_of
from hybridpipe.collectives.protocol import Handle
from hybridpipe.comm.mpi import MPI
from hybridpipe.device import GpuLanes, Lanes

# A large tensor is summed in pieces, which stay in the cache: within a host two ranks took 12 to 15 ms for
# 113 MiB in these pieces, and 25 to 29 ms as a whole (docs/log/all-reduce.md).
PIECE_BYTES = 2**22
RANKS_OF_A_PIECE = 4  # more take larger pieces: a ring sends a share of a piece in each of its steps
HALVES = (torch.float16, torch.bfloat16)  # MPI has no sums of these
POLL_SECONDS = 100e-6  # between two looks at a copy from a GPU


class MpiCollectives:
    """MPI's collectives over a duplicate of a communicator. Making one is collective over it.

    Sums of 16-bit numbers are made in float32 and rounded once.

    Args:
        lanes: of the device that holds the tensors; a GPU's travel through pinned memory.
        gather: starts an all-gather of weights (`all_gather`).
    """

    is_ordered = True

    def __init__(self, replicas: MPI.Comm, lanes: Lanes, gather: Gather) -> None:
        self._communicator, self._lanes = MPI.Intracomm(replicas).Dup(), lanes
        self.all_gather = gather
        self._todo = SimpleQueue[_MpiHandle | None]()
        self._thread = threading.Thread(target=self._run, name="collectives", daemon=True)
        self._thread.start()

    def all_reduce(self, tensors: Sequence[Tensor], name: str) -> Handle:
        """Start to sum each tensor in place (`Collectives`)."""
        parcels = parcels_of(tensors)
        hosts = [_HostCopy(parcel.content, self._lanes) for parcel in parcels]

        def reduce() -> None:
            for host in hosts:
                self._sum(host.arrived())

        def results() -> Sequence[Tensor]:
            for parcel, host in zip(parcels, hosts, strict=True):
                parcel.unpack(host.loaded())
            return tensors

        return self._start(reduce, results)

    def reduce_scatter(self, rows: Tensor, name: str) -> Handle:
        """Start to sum rows, one for each rank (`Collectives`).

        Each rank gets its row of every rank and adds them up. Within a host MPI's own reduce-scatter takes up
        to twice as long (docs/log/all-reduce.md).
        """
        sent, dtype = _HostCopy(rows, self._lanes), rows.dtype
        received = torch.empty_like(sent.memory, pin_memory=sent.memory.is_pinned())

        def results() -> Sequence[Tensor]:
            of_each = sent.loaded(received)
            return [of_each.sum(0, keepdim=True, dtype=_wide(dtype)).to(dtype)]

        def exchange() -> None:
            self._exchange(sent.arrived(), received)
            sent.release()

        return self._start(exchange, results)

    def close(self) -> None:
        """End the thread and free the communicator. Collective."""
        self._todo.put(None)
        self._thread.join()
        self._communicator.Free()

    def _start(self, action: Callable[[], None], results: Callable[[], Sequence[Tensor]]) -> Handle:
        work = _MpiHandle(action, results)
        self._todo.put(work)
        return work

    def _run(self) -> None:
        self._lanes.enter_thread()
        error: BaseException | None = None
        while (work := self._todo.get()) is not None:
            error = work.run(error)
            del work  # and what it holds, such as gradients

    def _sum(self, flat: Tensor) -> None:
        """Sum a tensor of one dimension in place over the ranks."""
        size = self._communicator.size
        if flat.dtype not in HALVES:
            num_bytes = PIECE_BYTES * -(-size // RANKS_OF_A_PIECE)
            for piece in torch.split(flat, num_bytes // flat.element_size()):
                self._communicator.Allreduce(MPI.IN_PLACE, piece.numpy())
            return
        share = -(-len(flat) // size)
        whole = torch.zeros(size * share, dtype=flat.dtype)
        whole[: len(flat)] = flat
        rows = torch.empty(size, share, dtype=flat.dtype)
        self._exchange(whole, rows)
        mine = rows.sum(0, dtype=_wide(flat.dtype)).to(flat.dtype)
        self._communicator.Allgather(_words(mine), _words(whole))
        flat.copy_(whole[: len(flat)])

    def _exchange(self, sent: Tensor, received: Tensor) -> None:
        """Send one of equally many rows to each rank, and receive one of each."""
        self._communicator.Alltoall(_words(sent), _words(received))


class _MpiHandle:
    """A collective that the thread has run, is running or will run."""

    def __init__(self, action: Callable[[], None], results: Callable[[], Sequence[Tensor]]) -> None:
        self._action, self._results = action, results
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self, error: BaseException | None) -> BaseException | None:
        """Run it unless one before has failed; keep an error for the thread that waits, and return it.

        After a failure this rank's next collective would meet another one of the other ranks.
        """
        self._error = error
        if error is None:
            try:
                self._action()
            except BaseException as own:
                self._error = own
        self._done.set()
        return self._error

    def wait(self) -> Sequence[Tensor]:
        """Return the results once they are there."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._results()


class _HostCopy:
    """A tensor in the host's memory: itself on a CPU, else a copy that its GPU is making.

    Attributes:
        memory: complete after `arrived`.
    """

    def __init__(self, tensor: Tensor, lanes: Lanes) -> None:
        self.memory = tensor
        self._lanes = lanes if isinstance(lanes, GpuLanes) and lanes.is_here(tensor) else None
        if self._lanes is not None:
            self.memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            (self._copied,) = self._lanes.copy_out([self.memory], [tensor])

    def arrived(self) -> Tensor:
        """Return the memory once the copy is complete."""
        while self._lanes is not None and not self._copied.query():
            time.sleep(POLL_SECONDS)
        return self.memory

    def release(self) -> None:
        """Let go of the memory."""
        self.memory = self.memory[:0].clone()

    def loaded(self, result: Tensor | None = None) -> Tensor:
        """Return a result in the host's memory, by default this memory, on the tensor's device."""
        result = self.memory if result is None else result
        return result if self._lanes is None else self._lanes.copy_in(result)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which numbers of a type are added up."""
    return torch.float32 if dtype in HALVES else dtype


def _words(tensor: Tensor) -> np.ndarray:
    """Return a contiguous tensor as MPI moves it, bit by bit."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(words).numpy()
