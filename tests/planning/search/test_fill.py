from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.memory import peak_memory_bytes
from hybridpipe.planning.cost.pass_times import with_pass_times
from hybridpipe.planning.schedules.generators import programs
from hybridpipe.planning.schedules.v_shape import BUILDING_BLOCKS
from hybridpipe.planning.schedules.validate import validate
from hybridpipe.planning.search.fill import filled, tuned
from hybridpipe.planning.search.search import fits
from hybridpipe.planning.simulator.predict import predict
from tests.planning.helpers import free, layer, model, plan, search

EQUAL = model(*[replace(layer(1, 2, 1, activation=100), weight_seconds=1)] * 4)
MESSAGES = Cluster.flat(4, bandwidth=1e300, latency_seconds=0.5)


def fill(made, profile, cluster):
    return filled(made, profile, cluster, partial(fits, profile=profile, cluster=cluster))


def test_equal_times_and_free_messages_give_zb_h2():
    """2 p - 1 in flight, and 2 (p - 1) weight gradients left for the time to the first stage and back."""
    found = fill(plan([1] * 4, 16, "zero-bubble"), EQUAL, free(4))
    assert (found.in_flight, found.weight_lag) == (7, 6)
    timeline, prediction = predict(found, EQUAL, free(4))
    assert timeline.slowest_rank_seconds == pytest.approx(3 * 16)  # no bubble at all
    assert found.predicted == prediction


def test_messages_want_more_in_flight_and_a_longer_lag():
    found = fill(plan([1] * 4, 32, "zero-bubble"), EQUAL, MESSAGES)
    assert (found.in_flight, found.weight_lag) == (10, 9)


@pytest.mark.parametrize("room", [4, 5, 6, 9, 30])
def test_what_is_found_fits_into_memory(room):
    cluster = replace(MESSAGES, memory_bytes=100 * room + 2)
    made = plan([1] * 4, 32, "zero-bubble")
    found = fill(made, EQUAL, cluster)
    if room == 4:  # enough for ZB-H1 alone
        assert found is None
        return
    assert max(peak_memory_bytes(EQUAL, found)) <= 100 * room + 2
    assert found.predicted.minibatch_seconds <= predict(made, EQUAL, cluster)[1].minibatch_seconds


def test_without_memory_for_any_lag_nothing_is_found():
    made = plan([1] * 4, 32, "zero-bubble")
    assert fill(made, EQUAL, replace(MESSAGES, memory_bytes=300)) is None


def test_layers_that_take_no_time_are_no_reason_for_more_than_there_is():
    """A first stage would need any number in flight, and a last one any number of weight gradients."""
    profile = model(layer(0, 0), *[layer(1, 2, 1)] * 3, layer(0, 0))
    found = fill(plan([1] * 5, 12, "zero-bubble"), profile, free(5))
    assert (found.in_flight, found.weight_lag) == (12, 12)


def test_a_pipeline_without_a_bubble_stays_as_it_is():
    profile = model(layer(0, 0), layer(1, 2, 1), layer(0, 0))
    assert fill(plan([1] * 3, 6, "zero-bubble"), profile, free(3)) is None


def test_a_search_returns_the_numbers_and_what_is_best_without_them():
    profile = model(*[replace(each, parameter_bytes=1000) for each in EQUAL.layers])  # dear to reduce
    best, *others = search(profile, Cluster.flat(4, 100.0, 0.5), 32, schedule="zero-bubble")
    assert best.plan.in_flight == 10 and best.plan.predicted is not None
    assert {each.plan.in_flight for each in others} == {None}


def test_of_equally_long_plans_the_one_of_the_higher_pace_is_first():
    """ZB-H1 and ZB-H2 end at the same time, but the ranks of ZB-H2 are free for the next minibatch before."""
    profile = model(*[replace(each, parameter_bytes=1000) for each in EQUAL.layers])
    best, other, *_ = search(profile, Cluster.flat(4, 100.0, 0.0), 32, schedule="zero-bubble")
    assert best.seconds == pytest.approx(other.seconds)
    assert (best.plan.in_flight, other.plan.in_flight) == (7, None)


def test_the_numbers_are_chosen_for_more_plans_than_the_best_without_them():
    """Without numbers three replicas of all layers are faster than any two stages."""
    rows = [(2, 40, 100), (3, 0, 400), (2, 0, 100), (1, 40, 200), (2, 400, 100)]
    layers = [replace(layer(each, 2 * each, *sizes), weight_seconds=each) for each, *sizes in rows]
    best, *others = search(model(*layers), Cluster.flat(4, 100.0, 0.0), 6, schedule="zero-bubble")
    without = [each for each in others if each.plan.in_flight is None]
    assert (best.plan.name, best.plan.in_flight, best.plan.weight_lag) == ("2-2", 3, 3)
    assert without[0].plan.name == "3" and best.seconds < 0.9 * without[0].seconds


def test_where_messages_meet_fewer_in_flight_are_faster_than_a_bubble_needs():
    """A message takes as long as a forward and a half."""
    profile = model(*[replace(EQUAL.layers[0], output_bytes=150)] * 3)
    cluster = Cluster.flat(3, 100.0, 0.0)
    needed = fill(plan([1] * 3, 16, "zero-bubble"), profile, cluster)
    assert (needed.in_flight, needed.weight_lag) == (11, 0)  # a lag delays forwards that others wait for
    found = tuned(needed, profile, cluster, lambda _: True)
    assert (found.in_flight, found.weight_lag) == (5, 0) and found.predicted.minibatch_seconds == 59.0
    every = [replace(needed, in_flight=n, weight_lag=late) for n in (3, 4, 6, 8, 16) for late in (0, 2, 5, 9)]
    assert min(predict(each, profile, cluster)[1].minibatch_seconds for each in every) > 58


def test_tuned_numbers_fit_into_memory():
    profile = model(*[replace(EQUAL.layers[0], output_bytes=200)] * 2)
    needed = fill(plan([1] * 2, 16, "zero-bubble"), profile, Cluster.flat(2, 100.0, 0.0))
    free_lag = tuned(needed, profile, Cluster.flat(2, 100.0, 0.0), lambda _: True).weight_lag
    assert free_lag > needed.weight_lag
    held = tuned(needed, profile, Cluster.flat(2, 100.0, 0.0), lambda each: each.weight_lag < free_lag)
    assert held.weight_lag < free_lag


def test_a_search_tunes_the_numbers_of_its_best():
    profile = model(*[replace(EQUAL.layers[0], output_bytes=150, parameter_bytes=10**4)] * 3)
    best = search(profile, Cluster.flat(3, 100.0, 0.0), 16, schedule="zero-bubble")[0]
    assert best.plan.in_flight == 5 and best.seconds == pytest.approx(59.0)


EIGHT = model(*[replace(layer(1, 2, 1, activation=100), weight_seconds=1)] * 8)


def rooms_of_v(made, profile, cluster):
    found = fill(with_pass_times(made, profile, cluster), profile, cluster)
    return found and found.in_flight


@pytest.mark.parametrize("room, in_flight", [(6, None), (7, 7), (8, 8), (9, 8), (30, 8)])
def test_a_v_takes_the_room_that_there_is(room, in_flight):
    """From v-half's own to zb-v's; with free messages more gains nothing."""
    cluster = replace(free(4), memory_bytes=100 * room + 4)
    made = plan([1] * 4, 16, "v-half", chunks=2)
    assert rooms_of_v(made, EIGHT, cluster) == in_flight


def test_messages_want_more_room_in_a_v():
    assert rooms_of_v(plan([1] * 4, 16, "zb-v", chunks=2), EIGHT, Cluster.flat(4, 1e300, 1.0)) > 8


@st.composite
def uneven_in_a_v(draw):
    """A plan in a V of any layers and links, and parts of the memory that two microbatches more take."""
    figures = st.integers(0, 9)
    num_groups, replicas = draw(st.integers(2, 4)), draw(st.integers(1, 2))
    layers = [
        replace(
            layer(1 + draw(figures), 1 + draw(figures), 1, draw(figures), 1 + draw(figures)), split_bytes=1
        )
        for _ in range(2 * num_groups)
    ]
    made = plan(
        [replicas] * num_groups, draw(st.integers(1, 20)), draw(st.sampled_from(sorted(BUILDING_BLOCKS))), 2
    )
    cluster = Cluster.flat(
        made.num_ranks, draw(st.sampled_from([1.0, 10.0, 1e300])), draw(st.sampled_from([0, 2.0]))
    )
    return model(*layers), made, cluster, draw(st.floats(1, 1.5))


@given(uneven_in_a_v())
@settings(deadline=None, derandomize=True, max_examples=60)
def test_what_is_found_for_a_v_fits_is_valid_and_faster(case):
    profile, made, cluster, part = case
    made = with_pass_times(made, profile, cluster)
    limited = replace(cluster, memory_bytes=int(max(peak_memory_bytes(profile, made)) * part))
    if (found := fill(made, profile, limited)) is not None:
        assert fits(found, profile, limited) and found.in_flight > made.room
        validate(found, programs(found))
        assert found.predicted == predict(found, profile, limited)[1]
        assert found.predicted.minibatch_seconds < predict(made, profile, limited)[1].minibatch_seconds


def test_more_room_may_take_less_memory_and_what_is_found_fits():
    """Room for nine takes 304 bytes, and for eight 306, as another microbatch then comes first."""
    rows = [(3, 3, 1), (3, 3, 1), (3, 2, 50), (2, 2, 50), (1, 1, 50), (1, 1, 1)]
    layers = [layer(ahead, back, 1, activation=held) for ahead, back, held in rows]
    profile = model(*[replace(each, split_bytes=1) for each in layers])
    made = with_pass_times(plan([1] * 3, 8, "v-min", 2), profile, free(3))
    peaks = [max(peak_memory_bytes(profile, replace(made, in_flight=room))) for room in (8, 9)]
    found = fill(made, profile, replace(free(3), memory_bytes=304))
    assert peaks == [306, 304] and found.in_flight == 9


def test_a_search_gives_a_v_the_room_that_memory_has():
    """Weights are dear to reduce, so that there are stages; of v-half's six there may be seven."""
    profile = model(*[replace(each, parameter_bytes=1000) for each in EIGHT.layers])
    cluster = Cluster.flat(4, 100.0, 0.0)
    needed = max(peak_memory_bytes(profile, plan([1] * 4, 32, "v-half", chunks=2)))
    limited = replace(cluster, memory_bytes=needed + 100)
    best, *others = search(profile, limited, 32, schedule="v-half")
    assert best.plan.in_flight == 7
    assert best.seconds < min(each.seconds for each in others if each.plan.in_flight is None)
    assert max(best.plan.predicted.peak_memory_bytes) <= needed + 100
