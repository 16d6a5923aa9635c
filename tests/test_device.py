"""A rank's device, and its lanes' order of work over the stand-in."""

import pytest
import torch

from hybridpipe.device import Lanes, device_of_rank, lanes_of, visible_gpus
from tests.late_cuda import FREE, LateLanes


@pytest.mark.parametrize(
    "num_gpus, count, expected",
    [
        (4, 4, [0, 1, 2, 3]),
        (2, 4, [0, 0, 1, 1]),  # neighbours share one
        (1, 3, [0, 0, 0]),
        (4, 2, [0, 2]),
        (2, 3, [0, 0, 1]),
    ],
)
def test_ranks_share_gpus_out_in_blocks(num_gpus, count, expected):
    for device in (None, "cuda", torch.device("cuda")):
        chosen = [device_of_rank(index, count, num_gpus, device) for index in range(count)]
        assert chosen == [torch.device("cuda", index) for index in expected]


def test_a_device_with_an_index_is_taken_as_it_is():
    assert device_of_rank(1, 2, 4, "cuda:3") == torch.device("cuda", 3)
    assert device_of_rank(1, 2, 4, "cpu") == torch.device("cpu")


def test_without_a_gpu_the_cpu_is_chosen():
    assert device_of_rank(0, 1, 0, None) == torch.device("cpu")
    if not torch.cuda.is_available():
        assert visible_gpus() == ()


def test_a_cpu_waits_for_nothing():
    lanes = lanes_of(torch.device("cpu"))
    marks = [lanes.mark(), lanes.mark()]
    assert type(lanes) is Lanes and lanes.seconds(marks) is marks and marks[0] <= marks[1]
    assert lanes.load(tensor := torch.ones(3)) is tensor


def host(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.uint8)


def test_a_copy_out_comes_after_what_was_computed_before_it():
    lanes = LateLanes()
    with lanes.cuda:
        message, there = lanes.empty(2), host(0, 0)
        message.copy_(host(1, 2))  # computed late
        (copied,) = lanes.copy_out([there], [message])
        message.copy_(host(3, 4))  # after it
        assert not copied.query() and there.tolist() == [0, 0]
        while not copied.query():
            pass
        assert there.tolist() == [1, 2]


def test_what_comes_in_is_there_for_the_next_computation_and_held_until_it_was_read():
    lanes = LateLanes()
    with lanes.cuda:
        there = lanes.copy_in(host(5, 6))
        assert there.tolist() == [5, 6]
        assert [point.held[0].tolist() for point in lanes._arriving] == [[5, 6]]
        for _ in range(5):
            lanes.copy_in(host(7))
        assert len(lanes._arriving) < 6


def test_parts_are_copied_as_they_come_and_all_are_there_for_the_next_computation():
    lanes = LateLanes()
    with lanes.cuda:
        room, parts = lanes.room(3), [host(5, 6), host(7)]
        copied = [lanes.start_copy_in(room[2:], parts[1]), lanes.start_copy_in(room[:2], parts[0])]
        assert room.tolist() == [FREE] * 3 and not copied[0].query()
        assert lanes.copied_in(room, copied).tolist() == [5, 6, 7]
        assert [point.held[0].tolist() for point in lanes._arriving] == [[7], [5, 6]]


def test_a_room_is_for_mpi_alone_until_it_is_used():
    lanes = LateLanes()
    with lanes.cuda:
        room = lanes.room(3)
        assert room.tolist() == [FREE] * 3
        room.numpy()[:] = 1, 2, 3  # MPI
        assert lanes.head(room, 2).tolist() == [1, 2]
        assert lanes.used(room).tolist() == [1, 2, 3]


def test_times_are_read_when_the_work_is_done():
    lanes = LateLanes()
    with lanes.cuda:
        marks = [lanes.mark() for _ in range(3)]
        assert not any(mark.reached for mark in marks)
        seconds = lanes.seconds(marks)
        assert all(mark.reached for mark in marks) and seconds == sorted(seconds)
        assert lanes.seconds([]) == []
