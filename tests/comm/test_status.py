import pytest

from hybridpipe.comm.status import Doing, RankStatus
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
