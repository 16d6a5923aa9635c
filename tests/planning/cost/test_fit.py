"""The fits against lines and machines that are known."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpipe.planning.cost import fit
from hybridpipe.planning.profile import Measurement
from tests.planning.helpers import layer, model

SIZES = [64 * 4**i for i in range(9)]


def timings(start, per_byte, sizes=SIZES):
    return [(n, start + per_byte * n) for n in sizes]


@given(st.floats(0, 1), st.floats(1e-12, 1e-6))
def test_a_line_is_found_again(start, per_byte):
    line = fit.fit_line(timings(start, per_byte))
    for num_bytes, seconds in timings(start, per_byte):
        assert line.start_seconds + num_bytes * line.seconds_per_byte == pytest.approx(seconds, rel=1e-6)
    assert line.error < 1e-6


@pytest.mark.parametrize("start, per_byte", [(5e-5, 8e-9), (5e-4, 1e-10), (1e-2, 8e-8)])
def test_noise_is_averaged_out(start, per_byte):
    noise = np.random.default_rng(0).uniform(0.9, 1.1, len(SIZES))
    line = fit.fit_line([(n, t * e) for (n, t), e in zip(timings(start, per_byte), noise)])
    assert line.start_seconds == pytest.approx(start, rel=0.1)
    assert line.seconds_per_byte == pytest.approx(per_byte, rel=0.1)
    assert 0 < line.error < 0.3


@pytest.mark.parametrize("wrong", [0, 3, len(SIZES) - 2])
def test_an_outlier_moves_nothing(wrong):
    measured = timings(5e-5, 8e-9)
    measured[wrong] = measured[wrong][0], 20 * measured[wrong][1]
    line = fit.fit_line(measured)
    assert line.seconds_per_byte == pytest.approx(8e-9, rel=1e-6)
    if wrong:  # else the smallest size, which tells the start, is the wrong one
        assert line.start_seconds == pytest.approx(5e-5, rel=1e-6)
    assert line.error == pytest.approx(0.95, abs=0.01)


def test_as_slow_for_every_size():
    line = fit.fit_line([(n, 0.25) for n in SIZES])
    assert line == pytest.approx((0.25, fit.LEAST_SECONDS_PER_BYTE, 0), abs=1e-6)


def test_neither_start_nor_slope_is_negative():
    falling = fit.fit_line([(100, 3.0), (200, 2.0), (300, 1.0)])
    assert (falling.start_seconds, falling.seconds_per_byte) == pytest.approx((2, fit.LEAST_SECONDS_PER_BYTE))
    steep = fit.fit_line([(100, 1.0), (200, 4.0)])
    assert steep.start_seconds == 0 and 0.01 <= steep.seconds_per_byte <= 0.02


def test_two_points_lie_on_their_line():
    assert fit.fit_line([(10, 2.0), (30, 4.0)]) == pytest.approx((1, 0.1, 0))


def test_the_slope_is_not_less_than_what_is_known():
    measured = timings(5e-5, 8e-9)
    line = fit.fit_line(measured, least_seconds_per_byte=1.6e-8)
    num_bytes, seconds = measured[-1]
    assert line.seconds_per_byte == 1.6e-8
    assert line.start_seconds + num_bytes * 1.6e-8 == pytest.approx((1 + line.error) * seconds, rel=0.01)
    assert fit.fit_line(measured, least_seconds_per_byte=1e-9).seconds_per_byte == pytest.approx(8e-9)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ([], "at least two different sizes, got []"),
        ([(64, 1.0)], "at least two different sizes, got [(64, 1.0)]"),
        ([(64, 1.0), (64, 2.0)], "at least two different sizes"),
        ([(64, 1.0), (128, 0.0)], "finite numbers > 0, got (128, 0.0)"),
        ([(0, 1.0), (128, 1.0)], "finite numbers > 0, got (0, 1.0)"),
        ([(64, float("inf")), (128, 1.0)], "finite numbers > 0, got (64, inf)"),
    ],
)
def test_what_cannot_be_fitted_is_named(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        fit.fit_line(wrong)


def test_sharing():
    assert fit.shared_bandwidth(100, 400, 4) is None
    assert fit.shared_bandwidth(100, 370, 4) is None, "within what timings vary by"
    assert fit.shared_bandwidth(100, 110, 4) == 110
    assert fit.shared_bandwidth(100, 60, 1) == 60


LIMITED = fit.Line(0.5, 0.01, 0.0)  # 100 bytes a second


@pytest.mark.parametrize(
    "rested, expected",
    [
        ([(100, 0.5), (200, 0.5), (400, 2.5)], 200),  # 200 bytes of 400 were limited
        ([(100, 0.5), (200, 0.5)], 200),  # at least
        ([(100, 1.5), (400, 4.5)], None),
        ([(100, 1.1), (400, 3.5)], None),  # somewhat faster than the line: it is not quite right
        ([(100, 0.4), (400, 9.0)], None),
    ],
)
def test_a_burst_is_what_was_not_limited(rested, expected):
    found = fit.burst_bytes(rested, LIMITED)
    assert found == (expected and pytest.approx(expected))


@pytest.mark.parametrize(
    "at_once, expected",
    [
        (0, [(64, 1.0), (512, 2.0), (1024, 3.0)]),
        (63, [(1, 1.0), (449, 2.0), (961, 3.0)]),
        (64, [(64, 1.0), (448, 2.0), (960, 3.0)]),
        (512, [(64, 1.0), (512, 3.0)]),  # of those that pass whole the first
        (2000, [(64, 1.0)]),
    ],
)
def test_beyond_a_burst_is_what_is_limited(at_once, expected):
    assert fit.beyond([(64, 1.0), (512, 2.0), (1024, 3.0)], at_once) == expected


@pytest.mark.parametrize(
    "compute, allreduce, both, expected",
    [(4, 2, 4, 1), (4, 2, 6, 0), (4, 2, 5, 0.5), (2, 4, 5, 0.5), (4, 2, 7, 0), (4, 2, 3, 1)],
)
def test_overlap_is_the_hidden_part_of_the_shorter_one(compute, allreduce, both, expected):
    assert fit.overlap(compute, allreduce, both) == expected


def test_unevenness_is_what_processors_lose_while_fewer_ranks_compute_than_there_are():
    waited = [[0.0], [3.0], [8.0], [9.0]]
    assert fit.unevenness(waited, per_machine=4, processors=2) == 1.5, "one of two, for three seconds"
    assert fit.unevenness(waited, per_machine=4, processors=4) == (3 * 3 + 2 * 5 + 1 * 1) / 4
    assert fit.unevenness(waited, per_machine=4, processors=1) == 0.0, "the last one has all there is"
    assert fit.unevenness([[0.0, 5.0], [2.0, 4.0]], per_machine=4, processors=2) == 0.75, "a host of it"
    assert fit.unevenness([[0.0], [2.0]], per_machine=4, processors=4) == 1.0, "which can use no more"


def test_unevenness_between_machines_is_in_their_speeds():
    """Two machines, the second half as fast: that the first waits for it is no unevenness."""
    fast, slow = [[50.0, 51.0], [50.0, 49.0]], [[0.0, 6.0], [4.0, 0.0]]
    assert fit.unevenness(fast + slow, per_machine=2, processors=2) == pytest.approx((0 + 2 + 4 + 6) / 8)


def test_speeds_of_ranks_that_share_two_cores():
    two, four = partial(fit.compute_speeds, num_cores=2), partial(fit.compute_speeds, num_cores=4)
    assert two({1: 50.0, 2: 100.0, 4: 100.0}) == (1.0, 1.0, pytest.approx(2 / 3), 0.5)
    assert two({1: 50.0}) == (1.0,)
    assert four({1: 10.0, 4: 55.0}) == (1.0, 1.0, 1.0, 1.0), "never faster than alone"
    assert four({1: 1.0, 2: 1.8, 4: 3.0, 6: 3.0}) == pytest.approx((1, 0.9, 0.8, 0.75, 0.6, 0.5))
    assert two({1: 1.0, 2: 1.9, 4: 2.4}) == pytest.approx((1, 0.95, 2 / 3, 0.5)), "two cores do no more"


@pytest.mark.parametrize(
    "first, last, numbers",
    [
        (1, 3, [1, 2, 3]),
        (1, 7, [1, 2, 4, 7]),
        (2, 3, [2, 3]),
        (2, 4, [2, 4]),
        (3, 3, [3]),
        (3, 2, []),
        (1, 0, []),
    ],
)
def test_numbers_to_measure_at(first, last, numbers):
    assert fit.doubling(first, last) == numbers


def test_what_was_measured_for_some_numbers_is_known_for_all():
    assert fit.between({}) == ()
    assert fit.between({1: 4.0}) == (4.0,)
    assert fit.between({2: 1.0, 4: 3.0}) == (0.0, 1.0, 2.0, 3.0), "0 where none could be measured"


def test_machines_that_hardly_differ_are_equal():
    assert fit.relative_speeds([100.0]) is None
    assert fit.relative_speeds([100.0, 96.0, 104.0]) is None
    assert fit.relative_speeds([100.0, 50.0]) == (1.0, 0.5)
    assert fit.relative_speeds([100.0, 98.0, 130.0]) == (1.0, 0.98, 1.3)


def test_the_typical_rank_is_the_median_layer_by_layer():
    ranks = [
        model(layer(1.0, 2.0, update=1.0, parameters=8), layer(9.0), samples=4),
        model(layer(1.5, 9.0, update=1.0, parameters=8), layer(3.0), samples=4),
        model(layer(7.0, 2.5, update=4.0, parameters=8), layer(4.0), samples=4),
    ]
    expected = model(layer(1.5, 2.5, update=1.0, parameters=8), layer(4.0), samples=4)
    assert fit.typical(ranks) == replace(expected, load=3)
    assert fit.typical(ranks[:1]) == ranks[0], "alone, load is 1"


def test_the_typical_rank_is_the_median_at_every_size():
    def rank(forward):
        return replace(model(layer(forward), samples=4), others=(Measurement(2, (layer(forward / 2),)),))

    found = fit.typical([rank(1.0), rank(9.0), rank(3.0)])
    assert found == replace(rank(3.0), load=3)


def test_the_weights_part_of_a_backward_is_never_longer_than_the_backward():
    """One rank's part was longer than another's whole, and the profile was refused."""
    ranks = [
        model(replace(layer(1.0, backward, parameters=8), weight_seconds=part))
        for backward, part in ((5.0, 4.0), (2.0, 1.0), (1.0, 0.8))
    ]
    (found,) = fit.typical(ranks).layers
    assert found.backward_seconds == 2.0
    assert found.weight_seconds == 1.0
    (other,) = fit.typical([ranks[0], *2 * [replace(ranks[2], layers=ranks[0].layers)]]).layers
    assert other.weight_seconds == 4.0
