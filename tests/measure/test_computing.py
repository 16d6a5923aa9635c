"""Figures of ranks that share a machine, from the work that they did."""

import pytest

from hybridpipe.measure.computing import Computing

FOUR_ON_TWO = Computing({1: (10.0,), 2: (19.0,), 4: (19.2,)}, num_cores=2)


def test_four_ranks_on_two_cores_share_them():
    assert FOUR_ON_TWO.speeds == pytest.approx((1.0, 0.95, 1.91 / 3, 0.48))
    assert FOUR_ON_TWO.sharing == 4
    assert FOUR_ON_TWO.processors == pytest.approx(1.92)
    assert FOUR_ON_TWO.relative_speed is None


@pytest.mark.parametrize("done", [{1: 1.0}, {1: 1.0, 2: 1.8}, {1: 1.0, 2: 2.0, 4: 3.6}])
def test_ranks_with_processors_of_their_own_share_none(done):
    assert Computing({n: (of_all,) for n, of_all in done.items()}, num_cores=4).sharing == 1


def test_machines_are_compared_by_one_rank_alone():
    computing = Computing({1: (10.0, 5.0), 2: (20.0, 10.0)}, num_cores=2)
    assert computing.speeds == (1.0, 1.0)
    assert computing.relative_speed == (1.0, 1.0, 0.5, 0.5)


def test_what_a_neighbour_takes_for_a_second_is_not_the_ranks_own_doing():
    """Two ranks on two cores of a shared machine had 0.6 of a core each for a second: `auto` then took a
    pipeline that it thought would compute faster whenever one of them waited, and was 13 % off."""
    usual, disturbed = Computing({1: (10.0,), 2: (19.8,)}, 2), Computing({1: (10.0,), 2: (12.0,)}, 2)
    assert disturbed.speeds == (1.0, 0.6)
    assert disturbed.or_more(usual).speeds == usual.or_more(disturbed).speeds == usual.speeds
    slow_alone = Computing({1: (7.0,), 2: (19.6,)}, 2)
    assert slow_alone.or_more(usual).speeds == usual.speeds
