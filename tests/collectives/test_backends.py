"""A backend that cannot be used is refused with what helps; `auto` takes what suits the device."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from hybridpipe.collectives import backends
from hybridpipe.collectives.backends import Usable, suited, usable
from hybridpipe.errors import UserError


@pytest.mark.parametrize(
    "on_gpus, missing, expected",
    [
        (False, [], ["horovod", "mpi"]),
        (False, ["horovod"], ["mpi"]),
        (True, [], ["horovod", "torch"]),
        (True, ["horovod"], ["torch"]),
        (True, ["horovod", "torch"], ["mpi"]),
    ],
)
def test_auto(on_gpus, missing, expected):
    assert suited(Usable(dict.fromkeys(missing, "it is not there"), on_gpus), "auto") == expected


def test_the_wanted_one_or_none():
    assert suited(Usable({}, False), "torch") == ["torch"]
    with pytest.raises(UserError, match=r"^sync 'horovod' cannot be used: Horovod is not installed"):
        suited(Usable({"horovod": "Horovod is not installed: hybridpipe setup"}, False), "horovod")


class World:
    """One rank by itself, as far as questions to all go."""

    def allgather(self, mine):
        return [mine]


def test_a_horovod_that_does_not_load_is_left_out(monkeypatch):
    """Such as one for another torch, after an upgrade: `auto` takes MPI, and the reason is told."""
    broken = ModuleType("horovod")
    broken.__path__, broken.__spec__ = [], ModuleSpec("horovod", None)
    monkeypatch.setitem(sys.modules, "horovod", broken)
    monkeypatch.delitem(sys.modules, "horovod.torch", raising=False)
    found = usable(World(), torch.device("cpu"))
    assert found.whys["horovod"].startswith("Horovod does not load (No module named 'horovod.torch'")
    assert suited(found, "auto") == ["mpi"]


class Horovod(ModuleType):
    """`horovod.torch` with CUDA, and an NCCL if it has a number."""

    def __init__(self, nccl):
        super().__init__("horovod.torch")
        self.mpi_built = self.cuda_built = lambda: True
        self.nccl_built = lambda: nccl


class Apart(World):
    """Ranks whose GPUs are these, by host."""

    def __init__(self, *places):
        self.places = places

    def allgather(self, mine):
        return [*self.places] if isinstance(mine, tuple) else [mine]


@pytest.mark.parametrize(
    "nccl, may_share, of_shared",
    [
        (22809, "", ["mpi"]),
        (22809, "1", ["mpi"]),  # 2.28 does not know the variable
        (23007, "", ["mpi"]),
        (23007, "1", ["horovod"]),
        (0, "", ["horovod"]),  # all-reduces through the host's memory
    ],
)
def test_nccl_takes_one_rank_a_gpu(monkeypatch, nccl, may_share, of_shared):
    """Ranks that see one GPU each under the same number, as Slurm has it, do not share it."""
    package = ModuleType("horovod")
    package.__path__, package.__spec__, package.torch = [], ModuleSpec("horovod", None), Horovod(nccl)
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setitem(sys.modules, "horovod.torch", package.torch)
    monkeypatch.setattr(backends, "visible_gpus", lambda: ("a",))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True, raising=False)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", may_share)
    apart = ("h1", "a"), ("h1", "b"), ("h2", "a")
    gpu = torch.device("cuda", 0)
    assert suited(usable(Apart(*apart), gpu), "auto") == ["horovod", "torch"]
    assert suited(usable(Apart(*apart, ("h1", "b")), gpu), "auto") == of_shared


def test_ranks_on_gpus_and_on_cpus_take_what_suits_both():
    found = usable(Apart(("h1", "a"), ("h2", "")), torch.device("cpu"))
    assert suited(found, "auto") == ["mpi"]
    with pytest.raises(UserError, match="some ranks are on GPUs and some on CPUs: sync 'mpi' takes both"):
        suited(found, "horovod")
