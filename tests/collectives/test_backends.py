"""A backend that cannot be used is refused with what helps; `auto` takes what suits the device."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

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
