import pytest
import torch

from hybridpipe.measure import probe
from hybridpipe.measure.links import HANDLED_BYTES, LARGE_BYTES, _handled_bytes
from hybridpipe.measure.probe import _equal_units


@pytest.mark.parametrize(
    "leaders, size",
    [
        ([0, 0, 2, 2], 2),
        ([0, 1, 2], 1),
        ([0, 0, 0], 3),
        ([0, 0, 0, 3, 3], None),  # the probe hung: a rank sent to one that did not receive
        ([0, 1, 0, 1], None),
        ([0, 0, 2], None),
    ],
)
def test_hosts_of_unequal_size_are_refused(leaders, size):
    assert _equal_units(leaders) == size


@pytest.mark.parametrize(
    "bandwidth, sizes",
    [
        (1e10, [HANDLED_BYTES, LARGE_BYTES]),
        (1.25e8, [HANDLED_BYTES, 250_000]),  # 2 ms
        (1.25e7, [HANDLED_BYTES]),  # a large one would still be on its way
    ],
)
def test_messages_that_are_there_in_time(bandwidth, sizes):
    assert _handled_bytes(1 / bandwidth) == sizes


class Alone:
    """A world of one rank."""

    def allgather(self, own):
        return [own]


def test_ranks_share_what_their_gpu_has_left(monkeypatch):
    """A rank's own memory is the measured copy's, which training does not have."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    monkeypatch.setattr(probe, "idle_barrier", lambda world: None)
    assert probe._memory_bytes(Alone(), torch.device("cuda", 0), per_processor=3) == 25


@pytest.mark.skipif(not probe._MEMORY.exists(), reason="needs Linux's meminfo")
def test_ranks_share_what_their_machine_has_left():
    one, three = (probe._memory_bytes(Alone(), torch.device("cpu"), n) for n in (1, 3))
    assert one > 2 * three > 0
