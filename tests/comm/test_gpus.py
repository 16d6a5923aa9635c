"""Which GPU each rank gets, with hosts and GPUs that are told."""

import pytest
import torch

from hybridpipe.comm import gpus
from hybridpipe.comm.mpi import MPI


class World:
    """A rank among others, whose answers are known."""

    def __init__(self, rank: int, answers: list) -> None:
        self.rank, self.size, self.answers = rank, len(answers), answers

    def Split_type(self, kind):
        assert kind == MPI.COMM_TYPE_SHARED
        return self

    def Free(self):
        pass

    def allgather(self, own):
        assert own == self.answers[self.rank]
        return self.answers


def chosen(monkeypatch, seen: list[tuple[str, ...]], device=None) -> list[torch.device]:
    """Return each rank's device on a host whose ranks see these GPUs."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    found = []
    for rank, own in enumerate(seen):
        monkeypatch.setattr(gpus, "visible_gpus", lambda own=own: own)
        found.append(gpus.own_device(World(rank, seen), device))
    return found


@pytest.mark.parametrize("device", [None, "cuda"])
@pytest.mark.parametrize(
    "seen, indices",
    [
        ([("a", "b")] * 2, [0, 1]),
        ([("a", "b")] * 4, [0, 0, 1, 1]),
        ([("a",), ("b",)], [0, 0]),  # Slurm's --gpus-per-task
        ([("a", "b"), ("c", "d"), ("a", "b")], [0, 0, 1]),
    ],
)
def test_ranks_that_see_the_same_gpus_share_them_out(monkeypatch, seen, indices, device):
    assert chosen(monkeypatch, seen, device) == [torch.device("cuda", index) for index in indices]


def test_a_rank_that_sees_no_gpu_computes_on_the_cpu(monkeypatch):
    assert chosen(monkeypatch, [(), ("a",)]) == [torch.device("cpu"), torch.device("cuda", 0)]


def leaders(monkeypatch, machines: list[int], on: list[str]) -> list[int]:
    monkeypatch.setattr(gpus, "machine_leaders", lambda world: machines)
    device = torch.device("cpu") if on[0] == "" else torch.device("cuda", 0)
    monkeypatch.setattr(gpus, "visible_gpus", lambda: (on[0],))
    return gpus.processor_leaders(World(0, list(zip(machines, on, strict=True))), device)


def test_a_processor_is_a_gpu_or_a_machine(monkeypatch):
    assert leaders(monkeypatch, [0, 0, 0, 3], ["a", "a", "b", "a"]) == [0, 0, 2, 3]
    assert leaders(monkeypatch, [0, 0, 2, 2], [""] * 4) == [0, 0, 2, 2]


def test_a_shared_gpu_is_told_once(monkeypatch, capsys):
    monkeypatch.setattr(gpus, "processor_leaders", lambda world, device: [0, 0, 2, 2, 2])
    for rank in range(5):
        gpus.tell_shared_gpus(World(rank, [True, True, True, True, True]), torch.device("cuda", 0))
    assert capsys.readouterr().err == "hybridpipe: ranks 2, 3, 4 share a GPU: its time and its memory\n"


def test_cpus_and_a_gpu_for_each_are_no_news(monkeypatch, capsys):
    for found, on_gpus in ([[0, 1], [True, True]], [[0, 0], [False, False]]):
        monkeypatch.setattr(gpus, "processor_leaders", lambda world, device, found=found: found)
        gpus.tell_shared_gpus(World(0, on_gpus), torch.device("cuda" if on_gpus[0] else "cpu"))
    assert capsys.readouterr().err == ""
