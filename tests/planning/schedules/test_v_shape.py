"""Orders of passes in a V: published idle times and peaks to the digit, and any times at all."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpipe.planning.cost.formula import StageCost
from hybridpipe.planning.plan import PassTimes
from hybridpipe.planning.schedules.generators import programs
from hybridpipe.planning.schedules.instructions import BackwardInput, BackwardWeight, Forward, text
from hybridpipe.planning.schedules.registry import TRAITS
from hybridpipe.planning.schedules.v_shape import ALIKE, BUILDING_BLOCKS, _duration, v_passes
from hybridpipe.planning.schedules.validate import InvalidProgram, validate
from hybridpipe.planning.simulator.predict import simulate
from tests.planning.helpers import free, parse, plan

SCHEDULES = tuple(BUILDING_BLOCKS)
# Slots that a group idles where all passes take one and messages none, by the number of groups: of the
# authors' and torch's own lists (Qi et al., NeurIPS 2024; github.com/sail-sg/zero-bubble).
IDLE = {"v-min": {4: 11, 8: 27}, "v-half": {4: 5, 8: 17}, "zb-v": {4: 3, 8: 7}}
PEAKS = {"v-min": {4: 4, 8: 8}, "v-half": {4: 6, 8: 10}, "zb-v": {4: 8, 8: 16}}
# Of v-half with room for one more each, up to zb-v's.
IDLE_WITH_ROOM = {4: [5, 4, 3], 8: [17, 15, 13, 11, 9, 8, 7]}


def alike(num_groups: int) -> tuple[PassTimes, ...]:
    return (ALIKE,) * (2 * num_groups)


def least_room(schedule: str, num_groups: int) -> int:
    return TRAITS[schedule].least_room(num_groups)


def passes(schedule: str, num_groups: int, count: int, times=None, more: int = 0):
    """The orders of groups with room for `more` than their schedule needs."""
    return v_passes(schedule, num_groups, count, least_room(schedule, num_groups) + more, times)


def idle(orders, count: int) -> int:
    """Slots of the whole minibatch less those in which a group works."""
    return _duration(orders, alike(len(orders))) - 6 * count


def peak(order) -> int:
    """The most microbatches held, of both chunks, each until its weights' half."""
    held = itertools.accumulate(
        isinstance(each, Forward) - isinstance(each, BackwardWeight) for each in order
    )
    return max(held)


@pytest.mark.parametrize("more", [0, 1, 5, 24])
@pytest.mark.parametrize("num_groups", [4, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_published_idle_times_and_peaks(schedule, num_groups, more):
    """They hold for any number of microbatches from 2p on."""
    count = 2 * num_groups + more
    orders = passes(schedule, num_groups, count)
    assert idle(orders, count) == IDLE[schedule][num_groups]
    assert max(map(peak, orders)) == PEAKS[schedule][num_groups] == least_room(schedule, num_groups)


@pytest.mark.parametrize("num_groups", [4, 8])
def test_with_room_v_half_idles_less_down_to_zb_v(num_groups):
    """Between the published peaks the idle time lies between the published ones."""
    count = 3 * num_groups
    rooms = range(PEAKS["v-half"][num_groups], PEAKS["zb-v"][num_groups] + 1)
    orders = [v_passes("v-half", num_groups, count, room) for room in rooms]
    assert [idle(each, count) for each in orders] == IDLE_WITH_ROOM[num_groups]
    assert [max(map(peak, each)) for each in orders] == list(rooms)


def test_the_simulator_agrees_with_the_order_about_its_time():
    for schedule, num_groups in itertools.product(SCHEDULES, (4, 8)):
        count = 3 * num_groups
        made = plan([1] * num_groups, count, schedule, chunks=2)
        costs = [StageCost(1.0, 2.0, weight_seconds=1.0)] * made.num_stages
        seconds = simulate(programs(made), made, costs, free(num_groups)).seconds
        assert seconds == pytest.approx(6 * count + IDLE[schedule][num_groups])


@pytest.mark.parametrize("num_groups", range(2, 9))
def test_zb_v_idles_and_holds_as_torchs_own_list(num_groups):
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
    count = 2 * num_groups + 1
    lists = visualizer.get_schedule_ops("ZBVZeroBubble", num_groups, count, num_stages_per_rank=2)
    kinds = {"FORWARD": Forward, "BACKWARD_INPUT": BackwardInput, "BACKWARD_WEIGHT": BackwardWeight}
    torchs = [
        [
            kinds[each.computation_type.name](each.microbatch_index, int(each.stage_index >= num_groups))
            for each in ops
            if each is not None
        ]
        for ops in lists
    ]
    ours = passes("zb-v", num_groups, count)
    assert list(map(Counter, torchs)) == list(map(Counter, ours))
    assert idle(ours, count) == idle(torchs, count) == num_groups - 1
    assert max(map(peak, ours)) == max(map(peak, torchs)) == 2 * num_groups


def test_an_order_as_text():
    made = plan([1, 1], 3, "v-min", chunks=2)
    assert {rank: text(program) for rank, program in programs(made).items()} == {
        0: "F0 sa0 F1 sa1 F2 sa2 ra0.1 F0.1 I0.1 sg0.1 W0.1 ra1.1 F1.1 rg0 I0 I1.1 sg1.1 W0 W1.1 rg1 I1 W1 "
        "ra2.1 F2.1 I2.1 sg2.1 W2.1 rg2 I2 W2 all-reduce step",
        1: "ra0 F0 F0.1 sa0.1 ra1 F1 F1.1 sa1.1 rg0.1 I0.1 I0 sg0 W0.1 ra2 F2 rg1.1 I1.1 I1 sg1 W0 F2.1 "
        "sa2.1 W1.1 W1 rg2.1 I2.1 I2 sg2 W2.1 W2 all-reduce step",
    }


@st.composite
def uneven(draw):
    """A schedule, groups, microbatches, any times of the passes, also none at all, and any room."""
    num_groups = draw(st.integers(2, 7))
    each = st.builds(PassTimes, *[st.integers(0, 20)] * 3, st.integers(0, 60))
    times = draw(st.lists(each, min_size=2 * num_groups, max_size=2 * num_groups))
    more = draw(st.integers(0, 2 * num_groups))
    return draw(st.sampled_from(SCHEDULES)), num_groups, draw(st.integers(1, 30)), tuple(times), more


@given(uneven())
@settings(deadline=None, derandomize=True, max_examples=200)
def test_uneven_stages_hold_no_more_and_are_no_slower_than_the_published_list(case):
    schedule, num_groups, count, times, more = case
    orders = passes(*case)
    every = {
        kind(m, c) for kind in (Forward, BackwardInput, BackwardWeight) for m in range(count) for c in (0, 1)
    }
    assert all(Counter(order) == Counter(every) for order in orders)
    assert max(map(peak, orders)) <= least_room(schedule, num_groups) + more
    published = passes(schedule, num_groups, count, more=more)
    assert _duration(orders, times) <= _duration(published, times)


@given(uneven(), st.integers(1, 3))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_any_times_give_programs_that_keep_the_rules(case, replicas):
    schedule, num_groups, count, times, more = case
    room = least_room(schedule, num_groups) + more
    made = plan([replicas] * num_groups, 30, schedule, chunks=2, pass_times=times, in_flight=room)
    validate(made, programs(made, count), count)


def test_an_order_follows_the_times():
    """A slow message: its group runs weights' halves until it comes."""
    slow = tuple(PassTimes(2, 2, 2, 7) for _ in range(8))
    assert passes("v-half", 4, 12, slow) != passes("v-half", 4, 12)
    assert _duration(passes("v-half", 4, 12, slow), slow) < _duration(passes("v-half", 4, 12), slow)


def test_more_than_the_schedule_promises_is_found():
    """Of two groups under v-min each holds four: a forward before its turn is one too many."""
    made = plan([1, 1], 6, "v-min", chunks=2)
    ran = programs(made)
    early = parse("F0 sa0 F1 sa1 F2 sa2 F3 sa3 ra0.1 F0.1")
    late = [each for each in ran[0] if each not in early]
    with pytest.raises(InvalidProgram, match="at most 4 microbatches of all chunks may be stashed"):
        validate(made, {**ran, 0: (*early, *late)})
