"""Backends: which of them a job can use, and the opening of one.

Knows BACKENDS and what each needs. Invariant: all ranks get the same answers.
"""

import os
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.distributed
from torch import Tensor

from hybridpipe.collectives.all_gather import all_gather
from hybridpipe.collectives.protocol import Collectives, Handle
from hybridpipe.comm.communicators import WatchedComm
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.mpi_transport import MpiTransport
from hybridpipe.device import lanes_of, visible_gpus
from hybridpipe.errors import UserError
from hybridpipe.planning.checks import AUTO_SYNC, BACKENDS

# "1" lets ranks share a GPU from NCCL 2.30 on, whose number is 23000.
NCCL_SHARES, NCCL_SHARES_FROM = "NCCL_MULTI_RANK_GPU_ENABLE", 23000


def open_collectives(
    backend: str, replicas: WatchedComm, transport: MpiTransport | None, device: torch.device
) -> Collectives:
    """Open a backend over the replicas of a stage. Collective over them.

    Args:
        backend: one of BACKENDS that is usable (`usable`).
        transport: moves weights where the backend leaves that to MPI; None: none are gathered.
    """
    if backend == "torch":
        from hybridpipe.collectives.torch_distributed import TorchCollectives

        return TorchCollectives(replicas, device)
    gather = _no_gather if transport is None else partial(all_gather, transport, replicas)
    if backend == "mpi":
        from hybridpipe.collectives.mpi import MpiCollectives

        return MpiCollectives(replicas, lanes_of(device), gather)
    from hybridpipe.collectives.horovod import HorovodCollectives

    return HorovodCollectives(replicas, gather)


def _no_gather(weights: Tensor) -> Handle:
    raise RuntimeError("these collectives were opened without a transport, which moves weights")


class Usable(NamedTuple):
    """Backends that a job can use, the same on every rank.

    Args:
        whys: for each backend that some rank cannot use why, with a remedy.
        on_gpus: some rank computes on a GPU.
    """

    whys: Mapping[str, str]
    on_gpus: bool


def usable(world: MPI.Comm, device: torch.device) -> Usable:
    """Find the backends that all ranks can use. Collective.

    Args:
        device: of this rank.
    """
    gpu = visible_gpus()[device.index or 0] if device.type == "cuda" else ""
    places = world.allgather((MPI.Get_processor_name(), gpu))
    gpus = [place for place in places if place[1]]
    shares, mixed = len(set(gpus)) < len(gpus), 0 < len(gpus) < len(places)
    of_ranks = world.allgather({name: _why(name, device, shares, mixed) for name in BACKENDS})
    first = {name: next(filter(None, (each[name] for each in of_ranks)), "") for name in BACKENDS}
    return Usable({name: why for name, why in first.items() if why}, bool(gpus))


def suited(found: Usable, wanted: str) -> list[str]:
    """Return the backends that a job may use, the default first.

    Args:
        wanted: one of BACKENDS, or AUTO_SYNC for any of them that suits the devices.

    Raises:
        UserError: the wanted one cannot be used.
    """
    if wanted != AUTO_SYNC:
        if wanted in found.whys:
            raise UserError(f"sync {wanted!r} cannot be used: {found.whys[wanted]}")
        return [wanted]
    # On CPUs gloo is no faster than MPI, and on GPUs MPI goes through the host's memory.
    of_devices = ["horovod", "torch"] if found.on_gpus else ["horovod", "mpi"]
    return [name for name in of_devices if name not in found.whys] or ["mpi"]


def _why(backend: str, device: torch.device, shares_gpu: bool, mixed: bool) -> str:
    """Return why this rank cannot use a backend; empty if it can."""
    if backend == "mpi":
        return ""
    if mixed:
        return "some ranks are on GPUs and some on CPUs: sync 'mpi' takes both"
    return (_why_not_torch if backend == "torch" else _why_not_horovod)(device, shares_gpu)


def _why_not_torch(device: torch.device, shares_gpu: bool) -> str:
    if not torch.distributed.is_available():
        return "this torch is built without torch.distributed"
    if device.type != "cuda":
        return "" if torch.distributed.is_gloo_available() else "this torch is built without gloo"
    if shares_gpu:
        return "NCCL takes one rank a GPU, and ranks share one: sync 'mpi' takes any number"
    return "" if torch.distributed.is_nccl_available() else "this torch is built without NCCL"


def _why_not_horovod(device: torch.device, shares_gpu: bool) -> str:
    if find_spec("horovod") is None:
        return "Horovod is not installed: hybridpipe setup"
    try:
        import horovod.torch as hvd
    except ImportError as error:
        told = str(error).splitlines()[0]
        return f"Horovod does not load ({told}): hybridpipe setup, or pip uninstall horovod"
    if not hvd.mpi_built():
        return "Horovod is built without MPI: pip uninstall horovod, then hybridpipe setup"
    if device.type != "cuda":
        return ""
    if not hvd.cuda_built():
        return "Horovod is built without CUDA: hybridpipe setup --cuda nccl"
    may_share = os.environ.get(NCCL_SHARES) == "1" and hvd.nccl_built() >= NCCL_SHARES_FROM
    if shares_gpu and hvd.nccl_built() and not may_share:
        return "Horovod's NCCL takes one rank a GPU, and ranks share one: hybridpipe setup --cuda staged"
    return ""
