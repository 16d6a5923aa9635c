import pytest

from hybridpipe.comm.status import _Position
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
    position = _Position()
    assert str(position) == "outside a step"
    position.at(*at)
    assert str(position) == told


def test_between_steps_a_report_names_the_last_one():
    position = _Position()
    position.at(0, 5, AllReduce())
    position.outside()
    assert str(position) == "outside a step, after step 5"
