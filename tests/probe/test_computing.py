"""What ranks of a machine do at once, from their speeds."""

import pytest

from hybridpipe.probe.computing import Computing


def test_four_ranks_on_two_cores_share_them():
    computing = Computing((1.0, 0.95, 0.63, 0.48), relative_speed=None)
    assert computing.sharing == 4
    assert computing.processors == pytest.approx(1.92)


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 0.9), (1.0, 1.0, 0.95, 0.9)])
def test_ranks_with_processors_of_their_own_share_none(speeds):
    assert Computing(speeds, relative_speed=None).sharing == 1
