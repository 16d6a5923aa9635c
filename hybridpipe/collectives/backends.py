"""Backends: which of them a job can use, and the opening of one.

Knows BACKENDS and what each needs. Invariant: all ranks get the same answers.
"""

import os
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec

import torch

from hybridpipe.collectives.all_gather import all_gather
from hybridpipe.collectives.protocol import Collectives
from hybridpipe.comm.groups import WatchedComm
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.mpi_transport import MpiTransport
from hybridpipe.device import lanes_of, visible_gpus
from hybridpipe.errors import UserError
from hybridpipe.planning.checks import AUTO_SYNC, BACKENDS

NCCL_SHARES = "NCCL_MULTI_RANK_GPU_ENABLE"  # "1" lets ranks share a GPU, from NCCL 2.30 on


def open_collectives(
    backend: str, replicas: WatchedComm, transport: MpiTransport | None, device: torch.device
) -> Collectives:
    """Open a backend over the replicas of a stage. Collective over them.

    Args:
        backend: one of BACKENDS that is usable (`why_unusable`).
        transport: moves weights where the backend leaves that to MPI; None: none are gathered.
    """
    if backend == "torch":
        from hybridpipe.collectives.torch_distributed import TorchCollectives

        return TorchCollectives(replicas, device)
    gather = partial(all_gather, transport, replicas)  # type: ignore[arg-type]
    if backend == "mpi":
        from hybridpipe.collectives.mpi import MpiCollectives

        return MpiCollectives(replicas, lanes_of(device), gather)
    from hybridpipe.collectives.horovod import HorovodCollectives

    return HorovodCollectives(replicas, gather)


def why_unusable(world: MPI.Comm, device: torch.device) -> Mapping[str, str]:
    """Return for each backend that some rank cannot use why, with a remedy. Collective.

    Args:
        device: of this rank.
    """
    gpu = visible_gpus()[device.index or 0] if device.type == "cuda" else ""
    places = [place for place in world.allgather((MPI.Get_processor_name(), gpu)) if place[1]]
    shares = len(set(places)) < len(places)
    of_ranks = world.allgather({name: _why(name, device, shares) for name in BACKENDS})
    first = {name: next(filter(None, (each[name] for each in of_ranks)), "") for name in BACKENDS}
    return {name: why for name, why in first.items() if why}


def suited(whys: Mapping[str, str], device: torch.device, wanted: str) -> list[str]:
    """Return the backends that a job may use, the default first.

    Args:
        whys: as from `why_unusable`.
        wanted: one of BACKENDS, or AUTO_SYNC for any of them that suits the device.

    Raises:
        UserError: the wanted one cannot be used.
    """
    if wanted != AUTO_SYNC:
        if wanted in whys:
            raise UserError(f"sync {wanted!r} cannot be used: {whys[wanted]}")
        return [wanted]
    # On CPUs gloo is no faster than MPI, and on GPUs MPI goes through the host's memory.
    of_device = ["horovod", "torch"] if device.type == "cuda" else ["horovod", "mpi"]
    return [name for name in of_device if name not in whys] or ["mpi"]


def _why(backend: str, device: torch.device, shares_gpu: bool) -> str:
    """Return why this rank cannot use a backend; empty if it can."""
    if backend == "torch":
        return _why_not_torch(device, shares_gpu)
    return _why_not_horovod(device, shares_gpu) if backend == "horovod" else ""


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
    if device.type != "cuda":
        return ""
    import horovod.torch as hvd

    if not hvd.cuda_built():
        return "Horovod is built without CUDA: hybridpipe setup --cuda nccl"
    if shares_gpu and hvd.nccl_built() and os.environ.get(NCCL_SHARES) != "1":
        return "Horovod's NCCL takes one rank a GPU, and ranks share one: hybridpipe setup --cuda staged"
    return ""
