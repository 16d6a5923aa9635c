"""A rank's side of the meeting of groups, with a real meeting; each group is a thread, a world of one."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hybridpipe.comm.group_meeting import MeetingSums
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.status import rank_status
from hybridpipe.comm.training_group import TrainingGroup
from hybridpipe.config.options import GroupOptions
from hybridpipe.errors import UserError
from hybridpipe.launch.meeting import Meeting

OPTIONS = GroupOptions(count=2)


@pytest.fixture
def groups():
    meeting = Meeting(2, "127.0.0.1")
    world = MPI.COMM_SELF
    made = [MeetingSums(TrainingGroup(world, world, index, OPTIONS, meeting.address)) for index in range(2)]
    yield made
    for each in made:
        each.free()
    meeting.close()
    rank_status.wait = None


def together(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(20) for each in [pool.submit(*call) for call in calls]]


def begin(groups, plan="1"):
    """Let both come; the first has the centre and gives it."""
    first, second = groups
    centre = torch.tensor([1.0, 2.0], dtype=torch.float64)

    def gives():
        given = first.join(0, plan, True)
        assert given is None and first.is_asked
        first.give(centre)

    _, given = together((gives,), (second.join, 0, plan, True))
    assert torch.equal(given, centre) and not second.is_asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_add_up(groups, dtype):
    begin(groups)
    tensors = [torch.full((3,), float(index + 1), dtype=dtype) for index in range(2)]
    sums = together(*((group.add_up, each) for group, each in zip(groups, tensors, strict=True)))
    for each, tensor, group in zip(sums, tensors, groups, strict=True):
        assert each is tensor and each.tolist() == [3.0] * 3 and each.dtype == dtype
        assert group.count == 2 and group.bytes_sent == tensor.nbytes


def test_a_rank_that_trains_nothing_takes_part(groups):
    """As one whose stage is frozen; `frombuffer` takes no empty content."""
    begin(groups)
    sums = together(*((group.add_up, torch.empty(0)) for group in groups))
    assert [each.numel() for each in sums] == [0, 0]


def test_a_group_goes_on_alone(groups):
    begin(groups)
    groups[1].leave()
    assert groups[0].add_up(torch.ones(2)).tolist() == [1.0, 1.0] and groups[0].count == 1


def test_a_group_that_trains_something_else_is_told_so(groups):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(groups[0].join, 0, "plan 1, every 8", True)
        time.sleep(0.5)
        told = "groups: group 1 trains plan 1, every 9; group 0 plan 1, every 8: give all of them the same"
        with pytest.raises(UserError) as raised:
            groups[1].join(0, "plan 1, every 9", True)
        groups[1].leave()
        groups[0].leave()  # it would wait
        assert first.exception(20) is not None
    assert str(raised.value) == told


def test_a_meeting_that_is_gone_ends_in_one_line():
    world = MPI.COMM_SELF
    group = MeetingSums(TrainingGroup(world, world, 0, OPTIONS, "127.0.0.1:9:token"))
    with pytest.raises(UserError, match=r"the groups' meeting at 127\.0\.0\.1:9 cannot be reached"):
        group.join(0, "plan 1", True)
