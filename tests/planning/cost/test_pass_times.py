"""The times by which passes are ordered, and what a rank with neighbours does not send."""

from dataclasses import replace

import numpy as np
import pytest

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.estimate import estimates
from hybridpipe.planning.cost.formula import plan_cut_figures, plan_terms, stage_costs
from hybridpipe.planning.cost.memory import LOOK_AHEAD, peak_memory_bytes
from hybridpipe.planning.cost.pass_times import with_pass_times
from hybridpipe.planning.simulator.predict import predict
from tests.planning.helpers import free, layer, model, plan

FOUR = model(*[layer(1, 2, output=5, activation=7)] * 4)
TRAINED = model(*[layer(1, 2, parameters=4, output=5)] * 4)
NET = Cluster.flat(2, 10.0, 0.5)
FOLDED = plan([1, 1], 6, "zb-v", chunks=2)


def test_times_are_parts_of_the_longest_pass_and_none_is_for_the_turn():
    timed = with_pass_times(FOLDED, TRAINED, NET)
    assert timed.pass_times == (
        (1000, 1000, 1000, 1000),  # a message takes 0.5 and 5 bytes at 10 a second
        (1000, 1000, 1000, 0),
        (1000, 1000, 1000, 1000),
        (1000, 1000, 1000, 0),
    )


def test_a_slow_rank_and_processor_time_of_messages_count():
    slow = replace(NET, relative_speed=(1.0, 0.5), message_seconds=0.25)
    assert with_pass_times(FOLDED, TRAINED, slow).pass_times == (
        (500, 500, 500, 625),
        (1000, 1000, 1000, 0),
        (1000, 1000, 1000, 625),
        (500, 500, 500, 0),
    )


def test_recomputation_makes_the_first_half_of_a_backward_longer():
    timed = with_pass_times(replace(FOLDED, recompute=True), TRAINED, NET)
    assert timed.pass_times[0] == (500, 1000, 500, 500)


def test_other_plans_and_passes_without_time_have_none():
    straight = plan([1, 1, 1, 1], 6, "zero-bubble")
    assert with_pass_times(straight, FOUR, Cluster.flat(4, 10.0, 0.5)) is straight
    assert with_pass_times(FOLDED, model(*[layer(0, 0)] * 4), NET) is FOLDED


def test_nothing_is_charged_for_the_turn():
    busy = replace(NET, message_seconds=0.25)
    costs = stage_costs(FOUR, FOLDED)
    assert [cost.output_bytes for cost in costs] == [cost.gradient_bytes for cost in costs] == [5, 0, 5, 5]
    assert (plan_cut_figures(FOLDED, busy, False)[:, 1] == 0).all()
    assert plan_terms(FOLDED, costs, busy).work == pytest.approx([3 + 2 * 0.25] * 4)  # one message each way


def test_cuts_between_two_ranks_share_their_link():
    """Slow messages set the pace: down and up the V each direction carries one message a microbatch."""
    slow = Cluster.flat(3, 0.1, 0.0)
    folded = plan([1, 1, 1], 6, "zb-v", chunks=2)
    six = model(*[layer(1, 2, output=5)] * 6)
    found = estimates(folded, stage_costs(six, folded), slow).seconds
    one_cut = plan_cut_figures(folded, slow, False)[2][0] * 5
    ways = 4 * 2 * 5 / 0.1
    assert found == pytest.approx(np.sum([3.0] * 6) / 2 + ways + one_cut)


def test_the_input_at_the_turn_is_the_output_that_is_kept_there():
    """Of one microbatch rank 1 keeps what both its stages do, and the outputs, but no input twice."""
    one = plan([1, 1], 1, "zb-v", chunks=2)
    stash = 5 + (7 + 5) + (7 + 5)  # the input, activations and the output of each stage
    messages = 2 * (2 * 5 + LOOK_AHEAD * 5)
    assert peak_memory_bytes(FOUR, one)[1] == stash + messages
    again = stash - 2 * 12 + 5 + 12  # both inputs, and the one that is computed again
    assert peak_memory_bytes(FOUR, replace(one, recompute=True))[1] >= again


def test_what_is_left_between_the_halves_counts_until_the_weights_half():
    """Two microbatches whose weights' halves wait: they keep what their layers need, not their stash."""
    lean = replace(FOUR, layers=tuple(replace(each, split_bytes=1) for each in FOUR.layers))
    full = replace(FOUR, layers=tuple(replace(each, split_bytes=100) for each in FOUR.layers))
    peaks = [peak_memory_bytes(each, FOLDED) for each in (lean, FOUR, full)]
    assert peaks[0] < peaks[1] < peaks[2]


@pytest.mark.parametrize("schedule", ["zb-v", "v-half", "v-min"])
def test_the_times_of_a_profile_make_no_plan_slower(schedule):
    uneven = model(*[layer(1 + i % 3, 2 + i % 2, output=4 + i) for i in range(8)])
    made = plan([1] * 4, 12, schedule, chunks=2)
    for cluster in (free(4), Cluster.flat(4, 10.0, 0.2)):
        timed = with_pass_times(made, uneven, cluster)
        seconds, listed = (predict(each, uneven, cluster)[1].minibatch_seconds for each in (timed, made))
        assert seconds <= listed * 1.001
