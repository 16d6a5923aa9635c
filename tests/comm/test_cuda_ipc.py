"""Which ranks are tried for CUDA IPC; tests/mpi/test_ipc.py has the trial between processes."""

import pytest
import torch

from hybridpipe.comm import cuda_ipc
from hybridpipe.comm.cuda_ipc import WANTED, asked_for, neighbours, readers
from hybridpipe.comm.mpi import MPI
from hybridpipe.device import Lanes
from tests.engine.helpers import make_plan
from tests.late_cuda import LateLanes


@pytest.mark.parametrize(
    "name, holders, pairs",
    [
        ("1-1-1", [[0], [1]], {(0, 1), (1, 2)}),
        ("2-1", [], {(0, 2), (1, 2)}),
        ("2-3", [], {(a, b) for a in (0, 1) for b in (2, 3, 4)}),
        ("2-2", [], {(0, 2), (1, 3)}),
        ("1-1-1", [[0, 2]], {(0, 1), (1, 2), (0, 2)}),  # tied weights
        ("2-1-1", [[0, 2]], {(0, 2), (1, 2), (2, 3), (0, 3), (1, 3)}),
        ("3", [[0]], set()),
    ],
)
def test_those_are_tried_that_exchange_messages(name, holders, pairs):
    assert neighbours(make_plan(name, 6, 6), holders) == pairs


def test_two_stages_of_a_rank_have_the_last_and_the_first_one_as_neighbours():
    plan = make_plan("1-1-1", 6, 6, "interleaved-1f1b", chunks=2)
    assert neighbours(plan, []) == {(0, 1), (1, 2), (0, 2)}
    assert neighbours(make_plan("1-1-1", 6, 6, "zb-v", chunks=2), [[0, 5]]) == {(0, 1), (1, 2)}


class World:
    """A rank of two on one machine, the other of which says the same."""

    rank, size = 0, 2

    def allgather(self, own):
        return [own, own]

    def alltoall(self, said):
        pytest.fail("a trial")


@pytest.mark.parametrize("wanted, asks", [(None, False), ("", False), ("0", False), ("1", True)])
def test_who_does_not_ask_for_it_has_none(monkeypatch, wanted, asks):
    monkeypatch.delenv(WANTED, raising=False)
    if wanted is not None:
        monkeypatch.setenv(WANTED, wanted)
    assert asked_for(MPI.COMM_SELF) == asks


def test_a_cpu_is_not_tried():
    assert readers(World(), Lanes(torch.device("cpu")), {(0, 1)}) == frozenset()


def test_ranks_of_two_hosts_are_not_tried(monkeypatch):
    monkeypatch.setattr(cuda_ipc, "machine_leaders", lambda world: [0, 1])
    assert readers(World(), LateLanes(), {(0, 1)}) == frozenset()


def test_without_messages_there_is_no_trial():
    assert readers(MPI.COMM_SELF, LateLanes(), set()) == frozenset()


@pytest.mark.parametrize("seen, why", [(("b",), "the two ranks see other GPUs"), ((), "no access")])
def test_a_gpu_that_is_not_seen_or_not_reached_is_not_read(monkeypatch, seen, why):
    lanes = LateLanes()
    monkeypatch.setattr(lanes, "reaches", lambda device: False)
    gpu = cuda_ipc._Gpu(torch.device("cuda", 1), seen)
    monkeypatch.setattr(cuda_ipc, "visible_gpus", lambda: ())
    with pytest.raises(RuntimeError, match=why):
        cuda_ipc._PairTrial(lanes, 0, 1, gpu).write(b"", 64, 0)
