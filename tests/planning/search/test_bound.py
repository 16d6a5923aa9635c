"""The bound: hardly ever above what the simulator says, and close to it where the formula alone is not."""

import random
from dataclasses import replace

import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster, Collective, Level
from hybridpipe.planning.cost.estimate import estimate, estimates
from hybridpipe.planning.cost.formula import measured_speed, stage_costs
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import LayerProfile, ModelProfile
from hybridpipe.planning.search.bound import FASTER, least_seconds
from hybridpipe.planning.simulator.predict import predict
from tests.planning.helpers import layer, plan

# Two replicas in front, whose activations take 4 s each and share a port; all gradients pass at once.
FRONT = LayerProfile("front", 1.0, 2.0, 40, 400, 0, 0.5, gradient_bytes=0)
BEHIND = layer(1.0, 1.0, parameters=0, update=0.25)
TWO = ModelProfile((FRONT, BEHIND), 1)
SWITCH = Cluster.flat(3, bandwidth=100.0, latency_seconds=0.0)


def bound_of(plan: Plan, profile: ModelProfile, cluster: Cluster) -> float:
    """The bound, from the plan's estimates."""
    costs = stage_costs(profile, plan, measured_speed(profile, cluster))
    return least_seconds(plan, profile, cluster, estimates(plan, costs, cluster))


def test_by_hand():
    """Two activations of 4 s each share a port for one minibatch each."""
    least = bound_of(plan([2, 1], 1, "pipedream"), TWO, SWITCH)
    assert least == estimate(plan([2, 1], 1, "pipedream"), TWO, SWITCH) == approx(4.0)


@pytest.mark.parametrize(
    "case",
    [
        (plan([2, 1], 4, "pipedream-2bw"), SWITCH),
        (plan([2, 1], 4, "1f1b"), SWITCH),
        (plan([2, 1], 1, "pipedream"), replace(SWITCH, overlap=0.5)),
        (plan([2, 1], 1, "pipedream"), Cluster((replace(SWITCH.levels[0], burst_bytes=10.0),))),
    ],
    ids=["2bw", "1f1b", "overlap", "bursts"],
)
def test_elsewhere_only_a_part_of_the_formula_is_sure(case):
    closely = estimates(case[0], stage_costs(TWO, case[0]), case[1]).closely
    assert bound_of(case[0], TWO, case[1]) == approx(closely / FASTER)


def test_hardly_any_simulation_is_faster():
    """Random plans on random machines; in the first rounds, where its pace is taken, a pipeline may be."""
    draw = random.Random(0)
    problems = [_random_problem(draw) for _ in range(150)]
    bounds = [bound_of(candidate, profile, cluster) for profile, cluster, candidate in problems]
    simulated = [predict(plan, profile, cluster)[1].minibatch_seconds for profile, cluster, plan in problems]
    undercut = [seconds < 0.99 * least for least, seconds in zip(bounds, simulated, strict=True)]
    assert sum(undercut) <= 2
    assert sum(least > 0.8 * seconds for least, seconds in zip(bounds, simulated, strict=True)) > 75


def _random_problem(draw: random.Random) -> tuple[ModelProfile, Cluster, Plan]:
    def figure(low: float, high: float) -> float:
        return 10 ** draw.uniform(low, high)

    def level(name: str, ranks: int, bandwidth: float, shared: bool) -> Level:
        measured = Collective(figure(7, 9.5), figure(-5, -3)) if draw.random() < 0.3 else None
        share = bandwidth * draw.choice([0.5, 1.0, 2.0]) if shared else None
        return Level(name, ranks, bandwidth, figure(-5, -3), share, measured)

    inner, num_ranks = draw.choice([1, 2, 4]), draw.choice([4, 8, 12])
    bandwidth, handling = figure(7, 9.5), draw.choice([0.0, 1e-4])
    levels = [level("server", inner, bandwidth * draw.choice([1, 3, 30]), False)] if inner > 1 else []
    levels.append(level("network", num_ranks, bandwidth, draw.random() < 0.5))
    cluster = Cluster(tuple(levels), message_seconds=handling, allreduce_factor=draw.choice([0.5, 1.0]))

    layers = tuple(
        LayerProfile(
            "layer", figure(-3, -1), figure(-3, -0.7), 4 * int(figure(3, 7.5)), int(figure(3, 7.5)), 0
        )
        for _ in range(draw.randint(2, 4))
    )
    replicas = [1] * draw.randint(2, len(layers))
    for _ in range(num_ranks - len(replicas)):
        replicas[draw.choice([0, 0, *range(len(replicas))])] += 1
    cuts = [0, *sorted(draw.sample(range(1, len(layers)), len(replicas) - 1)), len(layers)]
    ranks = draw.sample(range(num_ranks), num_ranks)
    stages = []
    for start, stop, m in zip(cuts, cuts[1:], replicas, strict=False):
        stages.append(StageSpec(start, stop, m, tuple(ranks[:m])))
        del ranks[:m]
    limit = draw.choice([None, None, 2, 3])
    return ModelProfile(layers, 4), cluster, Plan(tuple(stages), "pipedream", max_in_flight=limit)


@pytest.mark.parametrize("made", [plan([2, 1], 1, "pipedream"), plan([2, 1], 6)], ids=["pipedream", "1f1b"])
def test_waiting_for_messages_leaves_the_bounds(made):
    waiting = replace(SWITCH, waits_for_messages=True)
    least = bound_of(made, TWO, waiting)
    assert least == bound_of(made, TWO, SWITCH)
    assert least <= predict(made, TWO, waiting)[1].minibatch_seconds
