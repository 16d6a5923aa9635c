"""The bound: hardly ever above what the simulator says, and close to it where the formula alone is not."""

import random
from dataclasses import replace

import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster, Collective, Level
from hybridpipe.planning.cost.estimate import estimate, estimates
from hybridpipe.planning.cost.formula import stage_costs
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.profile import LayerProfile, ModelProfile
from hybridpipe.planning.search.bound import FASTER, least_seconds
from hybridpipe.planning.simulator.predict import predict
from tests.planning.helpers import layer, model, plan

# Two replicas in front, whose activations take 4 s each and share a port; all gradients pass at once.
FRONT = LayerProfile("front", 1.0, 2.0, 40, 400, 0, 0.5, gradient_bytes=0)
BEHIND = layer(1.0, 1.0, parameters=0, update=0.25)
TWO = ModelProfile((FRONT, BEHIND), 1)
SWITCH = Cluster.flat(3, bandwidth=100.0, latency_seconds=0.0)


def test_by_hand():
    """In the header's symbols F = 1, B = 2, u = 0.5, w' = 2, a' = 0.25; both bounds of 2-1, h = 2, h' = 1."""
    formula, one, way = least_seconds(plan([2, 1], 1, "pipedream"), TWO, SWITCH)
    assert formula == estimate(plan([2, 1], 1, "pipedream"), TWO, SWITCH) == approx(4.0)  # the port
    # 40 bytes are summed in 0.4 s; all of it at half the rate, as activations are under way for 8 s.
    assert one == approx((1 + 0.8 + 0.5) / 2)
    # F, two activations, two minibatches behind the cut, B, u; the all-reduce hides behind B. In two rounds.
    assert way == approx((1 + 8 + 2 * 2 + 0.25 + 2 + 0.5) / 2 / 2)


def test_a_round_waits_for_gradients_on_the_links_of_its_all_reduce():
    """4 s are summed; 8 s long at half the rate for activations, 8 s less F and u for gradients."""
    heavy = replace(FRONT, parameter_bytes=2000, gradient_bytes=400)
    _, one, _ = least_seconds(plan([2, 1], 1, "pipedream"), ModelProfile((heavy, BEHIND), 1), SWITCH)
    assert one == approx((1 + 20 + (8 + 8 - 1.5) / 2 + 0.5) / 2)


def test_an_order_of_1f1b_behind_the_cut_halves_the_rounds():
    """2-1-1: the last backward of a round there comes after the first forward of the next, its only one."""
    middle = layer(1.0, 1.0, output=0)
    *_, way = least_seconds(
        plan([2, 1, 1], 1, "pipedream"), model(FRONT, middle, BEHIND), Cluster.flat(4, 100.0, 0.0)
    )
    assert way == approx((1 + 8 + 2 + 2 + 0.5) / 2)


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
    assert list(least_seconds(case[0], TWO, case[1])) == [approx(closely / FASTER)]


@pytest.mark.parametrize(
    "profile, cluster",
    [
        (model(replace(FRONT, parameter_bytes=0), BEHIND), SWITCH),  # no all-reduce
        (model(layer(), replace(FRONT, parameter_bytes=2**21), BEHIND), Cluster.flat(3, 1e9, 0.0)),  # early
        (TWO, replace(SWITCH, relative_speed=(1.0, 0.5, 1.0))),  # in the first stage
    ],
    ids=["no weights", "first layers without weights", "uneven ranks"],
)
def test_replicas_that_need_not_wait_for_each_other_have_no_rounds(profile, cluster):
    """The second: where the first layers have no weights, an all-reduce may end before a backward does."""
    n = profile.num_layers
    two = Plan((StageSpec(0, n - 1, 2), StageSpec(n - 1, n, 1)), "pipedream")
    assert list(least_seconds(two, profile, cluster)) == [approx(estimate(two, profile, cluster))]


def test_it_is_close_where_many_send_to_one():
    """PipeDream's 15-1 of a network like VGG-16: the last stage waits for the activations of a round."""
    front = LayerProfile("convolution", 0.023, 0.035, 1_000_000, 12_800_000, 0, gradient_bytes=12_800_000)
    behind = LayerProfile("fully connected", 0.02, 0.04, 495_000_000, 0, 0)
    profile = ModelProfile((front,) * 10 + (behind,), 128)
    cluster = Cluster.flat(16, 1.25e9 / 4, 5e-5)
    many = Plan((StageSpec(0, 10, 15), StageSpec(10, 11, 1)), "pipedream")
    simulated = predict(many, profile, cluster)[1].minibatch_seconds
    assert estimate(many, profile, cluster) < 0.9 * simulated
    assert 0.97 * simulated < max(least_seconds(many, profile, cluster)) <= simulated * (1 + 1e-9)


def test_no_simulation_is_faster():
    """Random plans on random machines; in the first rounds, where its pace is taken, a pipeline may be."""
    draw, count = random.Random(0), 0
    while count < 150:
        profile, cluster, candidate = _random_problem(draw)
        _, *rounds = least_seconds(candidate, profile, cluster)
        if rounds:
            count += 1
            assert max(rounds) <= predict(candidate, profile, cluster)[1].minibatch_seconds * 1.01


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


@pytest.mark.parametrize("bandwidth, summing", [(25.0, 1.6), (50.0, 0.8), (80.0, 0.8), (400.0, 0.2)])
def test_activations_slow_an_all_reduce_that_takes_more_than_half_a_port(bandwidth, summing):
    """40 bytes are summed by a ring of two, while activations are under way for 8 s."""
    measured = Cluster((replace(SWITCH.levels[0], allreduce=Collective(bandwidth, 0.0)),))
    _, one, _ = least_seconds(plan([2, 1], 1, "pipedream"), TWO, measured)
    assert one == approx((1 + summing + 0.5) / 2)


def test_three_replicas_send_to_two_receivers_in_turns():
    """Rounds have two messages for one receiver and one for the other."""
    front = replace(FRONT, parameter_bytes=300)
    slow = Cluster((Level("all", 5, 100.0, 0.0, allreduce=Collective(100.0, 0.0)),))
    _, one, _ = least_seconds(plan([3, 2], 1, "pipedream"), ModelProfile((front, BEHIND), 1), slow)
    alone = 300 * 4 / 3 / 100  # at half its rate while messages are under way
    assert one == approx((1 + min(2 * alone, alone + 8 / 2) + 0.5) / 3)


@pytest.mark.parametrize("made", [plan([2, 1], 1, "pipedream"), plan([2, 1], 6)], ids=["pipedream", "1f1b"])
def test_waiting_for_messages_leaves_the_bounds(made):
    waiting = replace(SWITCH, waits_for_messages=True)
    assert list(least_seconds(made, TWO, waiting)) == list(least_seconds(made, TWO, SWITCH))
    least = max(least_seconds(made, TWO, waiting))
    assert least <= predict(made, TWO, waiting)[1].minibatch_seconds
