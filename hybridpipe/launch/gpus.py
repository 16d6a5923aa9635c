"""GPUs of a job, for the doctor: what Horovod, torch and MPI can do with them, and which rank has which.

Not known here: torch, MPI and Horovod, whose answers are arguments. Invariant: nothing is asked or changed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

APART = "start one rank a GPU, or hybridpipe setup --cuda staged, which takes any number"


@dataclass(frozen=True)
class Build:
    """Abilities of the installed builds.

    Args:
        torch_cuda: torch's version of CUDA; None if it has none.
        horovod_cuda: True if Horovod is built with CUDA.
        nccl: the version of Horovod's NCCL, such as 22809; 0 if it is built without.
        torch_nccl: True if torch.distributed has NCCL.
        cuda_aware: True if MPI says that it reads and writes the memory of GPUs itself.
    """

    torch_cuda: str | None
    horovod_cuda: bool = False
    nccl: int = 0
    torch_nccl: bool = False
    cuda_aware: bool = False


class RankDevice(NamedTuple):
    """A rank's device: its host, the GPU's identity and its name in words, which are empty on a CPU."""

    rank: int
    host: str
    gpu: str
    name: str


def describe(build: Build, names: Sequence[str], visible: str | None) -> str:
    """Return what there is and what it can do, in words.

    Args:
        build: the installed builds.
        names: of the GPUs that torch sees.
        visible: CUDA_VISIBLE_DEVICES; None if it is not set.
    """
    if build.torch_cuda is None:
        return "none: torch is built without CUDA, so training is on CPUs"
    if not names:
        limited = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        return f"torch has CUDA {build.torch_cuda} and sees none{limited}, so training is on CPUs"
    messages = (
        "CUDA-aware MPI is there, for HYBRIDPIPE_CUDA_AWARE_MPI=1"
        if build.cuda_aware
        else "MPI is not CUDA-aware"
    )
    kinds = " and ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
    ways = "messages by pinned memory, or by CUDA IPC for HYBRIDPIPE_CUDA_IPC=1"
    return f"{kinds}, CUDA {build.torch_cuda}; {_all_reduces(build)}; {ways}, {messages}"


def _all_reduces(build: Build) -> str:
    if build.nccl:
        return f"all-reduces by Horovod's {nccl_name(build.nccl)}, of one rank a GPU"
    if build.torch_nccl and not build.horovod_cuda:
        return "all-reduces by torch's NCCL, of one rank a GPU"
    return "all-reduces by host memory, of any number of ranks a GPU"


def nccl_name(version: int) -> str:
    """Return NCCL's name with its version, as in `NCCL 2.28` for 22809."""
    return f"NCCL {version // 10000}.{version // 100 % 100}"


def shared(devices: Iterable[RankDevice]) -> dict[tuple[str, str], list[int]]:
    """Return the ranks of each GPU, by host and identity; ranks on CPUs are left out."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for device in devices:
        if device.gpu:
            ranks.setdefault((device.host, device.gpu), []).append(device.rank)
    return ranks


def who_has_which(devices: Sequence[RankDevice]) -> str:
    """Return each host's GPUs with their ranks, such as `h1: rank 0 on cuda:0, ranks 1, 2 share cuda:1`."""
    names = {(device.host, device.gpu): device.name for device in devices}
    parts: dict[str, list[str]] = {device.host: [] for device in devices}
    for (host, gpu), ranks in shared(devices).items():
        several = len(ranks) > 1
        parts[host].append(f"{_ranks(ranks)} {'share' if several else 'on'} {names[host, gpu]}")
    for host in parts:
        if on_cpu := [device.rank for device in devices if device.host == host and not device.gpu]:
            parts[host].append(f"{_ranks(on_cpu)} on CPUs")
    return "; ".join(f"{host}: {', '.join(each)}" for host, each in parts.items())


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
