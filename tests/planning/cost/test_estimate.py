"""The closer estimate: what the order of passes costs, and all-reduces that meet messages."""

import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.estimate import Estimates, estimates
from hybridpipe.planning.cost.formula import stage_costs
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.simulator.predict import predict
from tests.planning.helpers import layer, model, plan

SWITCH = Cluster.flat(6, bandwidth=100.0, latency_seconds=0.0)
# A message of 3 s each way between the first two stages, none behind them.
FAR_APART = model(layer(output=300), layer(), layer(0.5, 0.5))


def estimated(profile: ModelProfile, plan: Plan) -> Estimates:
    return estimates(plan, stage_costs(profile, plan), SWITCH)


def simulated(profile: ModelProfile, plan: Plan) -> float:
    return predict(plan, profile, SWITCH)[1].minibatch_seconds


@pytest.mark.parametrize("schedule, count", [("pipedream", 1), ("pipedream-2bw", 8)])
def test_two_stages_in_a_row_wait_for_each_other(schedule, count):
    """The first stage has one microbatch more on its way than the second: two pass in 3 + 6 + 3 s.

    To the end and back three take 13 s, which alone would be 4.3 s each.
    """
    straight = plan([1, 1, 1], count, schedule)
    assert estimated(FAR_APART, straight).seconds == approx(count * 13 / 3)
    assert estimated(FAR_APART, straight).closely == simulated(FAR_APART, straight) == approx(6 * count)


def test_so_do_those_that_flush():
    straight = plan([1, 1, 1], 32)
    assert estimated(FAR_APART, straight).closely == approx(simulated(FAR_APART, straight), rel=0.04)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_a_stage_that_forwards_all_first_waits_for_none(count):
    """Of few microbatches hardly any stage waits; searches took plans up to a fifth slower."""
    profile, straight = model(*[layer(output=10)] * 4), plan([1, 1, 1, 1], count)
    assert estimated(profile, straight).closely == approx(simulated(profile, straight), rel=0.03)


def test_schedules_without_a_warm_up_have_no_such_order():
    straight = plan([1, 1, 1], 32, "gpipe")
    assert estimated(FAR_APART, straight).closely == approx(estimated(FAR_APART, straight).seconds)


def test_a_message_meets_those_of_the_cuts_beside_it():
    """A cycle of 3 + 6 + 3 s for two microbatches takes half of the other cut's 2 s longer."""
    profile = model(layer(output=300), layer(output=100), layer(0.1, 0.1))
    straight = plan([1, 1, 1], 1, "pipedream")
    assert estimated(profile, straight).closely == approx(6.5)
    assert simulated(profile, straight) > 6.2


def test_replicas_pause_for_an_all_reduce_that_nothing_hides():
    """An all-reduce of 20 s for two minibatches, which half of the messages of 2 s delay."""
    profile = model(layer(0.1, 0.2, parameters=2000, output=100), layer(0.5, 0.5))
    made = plan([2, 1], 1, "pipedream")
    assert estimated(profile, made).unhindered == approx(10.05)
    assert estimated(profile, made).closely == approx(10.55)
    assert 10.55 < simulated(profile, made) < 11.5
