"""Errors of allocations, and what is said of them."""

import errno

import pytest
import torch

from hybridpipe.environment.memory_limits import RankMemory
from hybridpipe.health import out_of_memory

REFUSED = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:125] . DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "400000000000000 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.fixture(autouse=True)
def nothing_expected(monkeypatch):
    monkeypatch.setattr(out_of_memory, "_expected", None)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), REFUSED, OSError(errno.ENOMEM, "fork"), torch.OutOfMemoryError("CUDA out of memory")],
)
def test_errors_of_allocations_are_known(error):
    assert out_of_memory.is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("shape"), OSError(errno.ENOSPC, "disk"), ValueError("memory")]
)
def test_other_errors_are_not_explained(error):
    assert not out_of_memory.explanation(error)


def test_torch_says_what_is_looked_for():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert out_of_memory.is_out_of_memory(caught.value)


def test_the_figures_are_told():
    assert out_of_memory.explanation(REFUSED).startswith("out of memory: the process has had ")
    out_of_memory.expect(RankMemory(10**9, 3 * 10**9, "cgroup"), 10**9)
    assert ", its limit is 3 GB (cgroup), 2 GB were predicted; " in out_of_memory.explanation(REFUSED)
    out_of_memory.expect(RankMemory(10**9), None)
    assert "limit is" not in out_of_memory.explanation(REFUSED)
