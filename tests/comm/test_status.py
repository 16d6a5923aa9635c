import pytest

from hybridpipe.comm.status import Doing, RankStatus, Wait
from hybridpipe.planning.schedules.instructions import AllReduce, Backward, Forward


@pytest.mark.parametrize(
    "at, told",
    [
        ((2, 41, Backward(7)), "stage 2, step 41, microbatch 7, instruction B7"),
        ((0, 0, AllReduce()), "stage 0, step 0, microbatch none, instruction all-reduce"),
        ((1, None, Forward(0)), "stage 1, step none (evaluation), microbatch 0, instruction F0"),
    ],
)
def test_a_report_says_where(at, told):
    status = RankStatus()
    assert str(status) == "outside a step"
    status.doing = Doing(*at)
    assert str(status) == told


def test_between_steps_a_report_names_the_last_one():
    status = RankStatus()
    status.doing = Doing(0, 5, None)
    assert str(status) == "outside a step, after step 5"


@pytest.mark.parametrize(
    "wait, told",
    [
        (Wait("all-reduce", (0, 3)), "all-reduce with ranks 0, 3"),
        (Wait("send", (4,), tag=6, num_bytes=128), "send to rank 4, tag 6, 128 bytes"),
        (Wait("receive", (4,), tag=0, num_bytes=0), "receive from rank 4, tag 0, 0 bytes"),
    ],
)
def test_a_wait_says_for_whom(wait, told):
    assert str(wait) == told


def test_a_wait_within_a_wait_ends_in_the_outer_one():
    status = RankStatus()
    with status.waiting("Horovod's start", range(2)):
        outer = status.wait
        with status.waiting("broadcast", [1]):
            assert status.wait == Wait("broadcast", (1,))
        assert status.wait is outer
    assert status.wait is None


def test_a_rank_that_begins_something_else_has_moved():
    status = RankStatus()
    doing, wait = status.doing, status.wait
    assert not status.has_moved_since(doing, wait)
    with status.waiting("barrier", [1]):
        assert status.has_moved_since(doing, wait)
        status.doing = Doing(0, 1, Forward(0))
        assert status.has_moved_since(doing, status.wait)
    assert not status.has_moved_since(status.doing, None)


def test_a_rank_is_busy_in_an_instruction_and_in_a_wait():
    status = RankStatus()
    status.doing = Doing(0, 5, None)
    assert not status.is_busy
    with status.waiting("barrier", [1]):
        assert status.is_busy
    status.doing = Doing(0, 5, Forward(0))
    assert status.is_busy


def test_the_thread_that_saves_is_seen_to_move():
    status = RankStatus()
    with status.in_saving("writes a shard"):
        assert status.saving == "writes a shard" and status.disk_moved_at > 0
        status.disk_moved_at = 0.0
    assert status.saving == "" and status.disk_moved_at > 0
