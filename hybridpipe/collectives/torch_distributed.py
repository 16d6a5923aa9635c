"""Collectives by torch.distributed: gloo between CPUs, NCCL between GPUs, both from torch's own wheel.

Knows tensors and a communicator; no parameters, and not the script's own process groups.
Invariant: only this object uses its process group, so collectives have one order on all ranks.
"""

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from hybridpipe.collectives.addresses import own_address
from hybridpipe.collectives.parcels import parcels_of
from hybridpipe.collectives.protocol import Handle
from hybridpipe.comm.mpi import MPI

POLL_SECONDS = 100e-6  # between two looks at a collective on CPUs: gloo's own wait hears no signal
dist: Any = torch.distributed  # its types name neither stores nor process groups
# The watchdog reports a hang. gloo and NCCL must not end a rank earlier: another may be saving a checkpoint.
TIMEOUT = timedelta(days=7)
# gloo sees at once that another rank is gone. That rank's own report, or mpirun's, tells the cause.
LOST_SECONDS = 5.0


class TorchCollectives:
    """Collectives of a process group over the ranks of a communicator. Making one is collective over it.

    Args:
        replicas: the ranks; through it they learn the group's address.
        device: of the tensors.
    """

    is_ordered = True

    def __init__(self, replicas: MPI.Comm, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._rank, self._size = replicas.rank, replicas.size
        address = own_address(replicas)
        self._store = _store(replicas, address)
        kind = dist.ProcessGroupNCCL if self._on_gpu else dist.ProcessGroupGloo
        options = kind.Options() if self._on_gpu else _gloo(address)
        options._timeout = TIMEOUT
        self._group: Any = kind(self._store, self._rank, self._size, options)

    def all_reduce(self, tensors: Sequence[Tensor], name: str) -> Handle:
        """Start to sum each tensor in place (`Collectives`)."""
        parcels = parcels_of(tensors)
        started = [self._group.allreduce([parcel.content]) for parcel in parcels]

        def results() -> Sequence[Tensor]:
            for parcel in parcels:
                parcel.unpack(parcel.content)
            return tensors

        return self._handle(started, results)

    def reduce_scatter(self, rows: Tensor, name: str) -> Handle:
        """Start to sum rows, one for each rank (`Collectives`)."""
        if self._on_gpu:
            mine = torch.empty_like(rows[:1])
            return self._handle([self._group._reduce_scatter_base(mine, rows)], lambda: [mine])
        of_each = torch.empty_like(rows)  # gloo before torch 2.8 has no reduce-scatter
        started = self._group.alltoall_base(of_each, rows, [], [])
        return self._handle([started], lambda: [of_each.sum(0, keepdim=True)])

    def all_gather(self, weights: Tensor) -> Handle:
        """Start to fill a tensor with each rank's share of it (`Collectives`)."""
        words = weights.view(torch.int64)  # so that any type of weights can be gathered
        share = len(words) // self._size
        mine = words[self._rank * share : (self._rank + 1) * share]
        started = self._group._allgather_base(words, mine if self._on_gpu else mine.clone())
        return self._handle([started], lambda: [weights])

    def close(self) -> None:
        """Close the group's connections. Collective."""
        if self._on_gpu:
            getattr(self._group, "shutdown", self._group.abort)()  # torch 2.6 has no shutdown
        self._group = self._store = None

    def _handle(self, started: Sequence[Any], results: Callable[[], Sequence[Tensor]]) -> Handle:
        return _TorchHandle(started, results, polls=not self._on_gpu)


class _TorchHandle:
    """Collectives of torch's in progress.

    Args:
        results: returns the tensors once all are done.
        polls: sleep until they are done; False lets the GPU's stream wait.
    """

    def __init__(self, started: Sequence[Any], results: Callable[[], Sequence[Tensor]], polls: bool) -> None:
        self._started, self._results, self._polls = started, results, polls

    def wait(self) -> Sequence[Tensor]:
        """Return the results once they are there."""
        for work in self._started:
            while self._polls and not work.is_completed():
                time.sleep(POLL_SECONDS)
            try:
                work.wait()
            except RuntimeError:
                time.sleep(LOST_SECONDS)  # the job ends meanwhile, unless this is the cause
                raise
        return self._results()


def _store(replicas: MPI.Comm, address: str) -> Any:
    """Open the store through which the ranks of a group find each other, at the first one. Collective."""
    size, first = replicas.size, replicas.rank == 0
    mine = dist.TCPStore(address, 0, size, True, TIMEOUT, wait_for_workers=False) if first else None
    host, port = replicas.bcast(None if mine is None else (address, mine.port))
    return mine or dist.TCPStore(host, port, size, False, TIMEOUT, wait_for_workers=False)


def _gloo(address: str) -> Any:
    """Return options by which gloo listens where the user says, or at an address."""
    options, named = dist.ProcessGroupGloo._Options(), os.environ.get("GLOO_SOCKET_IFNAME")
    on = {"interface": named.split(",")[0]} if named else {"hostname": address}
    options._devices = [dist.ProcessGroupGloo.create_device(**on)]
    return options
