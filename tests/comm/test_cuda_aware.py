"""CUDA-aware MPI is used where it is asked for and found, and a trial agrees. A CPU stands for the GPU."""

import pytest
import torch

from hybridpipe.comm import cuda_aware as module
from hybridpipe.comm.cuda_aware import ASKED, cuda_aware, library_says_so
from hybridpipe.comm.mpi import MPI
from hybridpipe.errors import UserError

CPU, WORLD = torch.device("cpu"), MPI.COMM_SELF


@pytest.mark.parametrize("value", [None, "", "0"])
def test_it_is_not_used_unless_it_is_asked_for(monkeypatch, value):
    monkeypatch.delenv(ASKED, raising=False)
    if value is not None:
        monkeypatch.setenv(ASKED, value)
    monkeypatch.setattr(module, "library_says_so", lambda: True)
    assert cuda_aware(WORLD, torch.device("cuda", 0)) is False


def test_a_library_that_cannot_is_not_tried(monkeypatch):
    monkeypatch.setenv(ASKED, "1")
    monkeypatch.setattr(module, "library_says_so", lambda: False)
    monkeypatch.setattr(module, "_arrives", lambda *_: pytest.fail("it would crash"))
    with pytest.raises(UserError, match=rf"{ASKED}=1 asks MPI to read .* says that it cannot: leave it out"):
        cuda_aware(WORLD, CPU)


def test_a_trial_decides(monkeypatch):
    monkeypatch.setenv(ASKED, "1")
    monkeypatch.setattr(module, "library_says_so", lambda: True)
    assert cuda_aware(WORLD, CPU) is False  # a rank without a GPU has nothing to read
    assert module._arrives(WORLD, CPU, 100) is True
    monkeypatch.setattr(module, "_arrives", lambda world, device, num_bytes: num_bytes < 100)
    with pytest.raises(UserError, match="got a message between GPUs wrong"):
        cuda_aware(WORLD, CPU)


def test_this_library_tells():
    assert library_says_so() in (True, False)
    if not torch.cuda.is_available():
        assert not library_says_so()
