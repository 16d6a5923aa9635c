"""Cuts: the balanced one."""

import pytest
from cuts import balanced


@pytest.mark.parametrize("seconds, num_stages, expected", [((1, 1, 1, 3), 2, (3,)), ((2, 1, 1, 2), 2, (2,))])
def test_the_balanced_cut_has_the_shortest_longest_stage(seconds, num_stages, expected):
    assert balanced(seconds, num_stages) == expected
