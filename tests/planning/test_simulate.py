import itertools
import random
import re
from dataclasses import replace
from functools import cache

import pytest
from pytest import approx

from hybridpipe.planning.cluster import AllReduce as AllReduceFigures
from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.cost import BUCKET_BYTES, StageCost, estimate, stage_costs
from hybridpipe.planning.instructions import AllReduce, Backward, Forward, Step, parse, text
from hybridpipe.planning.plan import SCHEDULES, Plan
from hybridpipe.planning.schedules import forward_programs, programs
from hybridpipe.planning.simulate import Deadlock, predict, simulate

from .helpers import free, layer, model, plan

COMBINATIONS = [
    replicas for stages in range(1, 5) for replicas in itertools.product(range(1, 5), repeat=stages)
]


def times(timeline, rank, kind):
    """Start and end of each of the rank's instructions of a kind."""
    return [
        approx((event.start_seconds, event.end_seconds))
        for event in timeline.events[rank]
        if isinstance(event.instruction, kind)
    ]


# The pipeline


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("p, m", [(1, 1), (1, 8), (2, 1), (2, 3), (3, 7), (4, 2), (4, 8), (8, 32)])
def test_bubble_matches_the_paper(schedule, p, m):
    timeline, _ = predict(plan([1] * p, m, schedule), model(*[layer(1, 2)] * p), free(p))
    assert timeline.bubble_fraction == approx((p - 1) / (m + p - 1))
    assert timeline.seconds == approx(3 * (m + p - 1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_rank_idles_once_replicas_and_cuts_balance(schedule):
    """Stage 0 costs twice as much and has twice the ranks: after the fill, nobody waits."""
    _, prediction = predict(plan([2, 1], 40, schedule), model(layer(2, 4), layer(1, 2)), free(3))
    assert prediction.bubble_fraction < 0.1


def recurrence(orders, forward, backward, transfer, latency):
    """When the last rank of a straight pipeline ends, from two recurrences; `orders`: one list a stage.

    Work starts when the stage has done what stands before it and its input is there; a message starts
    when it is ready and the one before it has left.
    """

    @cache
    def end(s, what, b):
        i = orders[s].index((what, b))
        ready = [end(s, *orders[s][i - 1])] if i else [0.0]
        if what == "F" and s > 0:
            ready.append(sent(s - 1, what, b) + latency)
        if what == "B" and s < len(orders) - 1:
            ready.append(sent(s + 1, what, b) + latency)
        return max(ready) + (forward if what == "F" else backward)[s]

    @cache
    def sent(s, what, b):
        return max(end(s, what, b), sent(s, what, b - 1) if b else 0.0) + transfer

    return max(end(s, *order[-1]) for s, order in enumerate(orders))


@pytest.mark.parametrize("seed", range(40))
def test_straight_pipelines_match_the_recurrence(seed):
    """Two stages with any transfer; more with latency only, as each port then has one kind of message."""
    draw = random.Random(seed)
    stages, m = draw.choice([2, 2, 3, 4]), draw.randint(1, 9)
    forward, backward = ([draw.randint(1, 20) / 10 for _ in range(stages)] for _ in "FB")
    transfer, latency = (draw.randint(0, 25) / 10 if stages == 2 else 0.0), draw.randint(0, 10) / 10
    straight = plan([1] * stages, m, draw.choice(SCHEDULES))
    costs = [StageCost(f, b, output_bytes=transfer) for f, b in zip(forward, backward)]
    ran = programs(straight)
    orders = [
        [(word[0], int(word[1:])) for word in text(ran[rank]).split() if word[0] in "FB"] for rank in ran
    ]
    timeline = simulate(ran, straight, costs, Cluster.flat(stages, 1.0, latency))
    assert timeline.seconds == approx(recurrence(orders, forward, backward, transfer, latency))


@pytest.mark.parametrize("p, m", [(2, 5), (4, 8)])
def test_gpipe_takes_what_the_closed_formula_says(p, m):
    """Equal stages; a transfer that is shorter than a forward hides but for the fill and the drain."""
    profile, cluster = model(*[layer(1, 2, output=50)] * p), Cluster.flat(p, 100.0, 0.25)
    straight = plan([1] * p, m, "gpipe")
    seconds = predict(straight, profile, cluster)[0].seconds
    assert seconds == approx(3 * (m + p - 1) + 2 * (p - 1) * 0.75)
    assert seconds == approx(estimate(straight, profile, cluster))


def test_a_receive_lasts_as_long_as_the_rank_waited():
    timeline, _ = predict(plan([1, 1], 1), model(layer(1, 2, output=1), layer(4, 8)), Cluster.flat(2, 2.0, 0))
    seen = {
        rank: [(str(event.instruction), event.start_seconds, event.end_seconds) for event in events]
        for rank, events in timeline.events.items()
    }
    assert seen == {
        0: [
            ("F0", 0, 1),
            ("sa0", 1, 1),
            ("rg0", 1, 14),
            ("B0", 14, 16),
            ("all-reduce", 16, 16),
            ("step", 16, 16),
        ],
        1: [
            ("ra0", 0, 1.5),
            ("F0", 1.5, 5.5),
            ("B0", 5.5, 13.5),
            ("sg0", 13.5, 13.5),
            ("all-reduce", 13.5, 13.5),
            ("step", 13.5, 13.5),
        ],
    }


def test_an_evaluation_can_be_simulated():
    made = plan([2, 1], 4)
    costs = stage_costs(model(layer(1), layer(1)), made)
    assert simulate(forward_programs(made, 4), made, costs, free(3)).seconds == 5


# Deadlock


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_no_deadlock_with_buffered_sends(schedule, num_microbatches):
    """Every replica count may meet every other."""
    for replicas in COMBINATIONS:
        made = plan(replicas, num_microbatches, schedule)
        timeline, _ = predict(made, model(*[layer(parameters=1)] * len(replicas)), free(made.num_ranks))
        assert {
            rank: tuple(event.instruction for event in events) for rank, events in timeline.events.items()
        } == (programs(made))


@pytest.mark.parametrize("num_microbatches", [1, 5])
def test_gpipe_needs_no_buffering(num_microbatches):
    for replicas in COMBINATIONS:
        made = plan(replicas, num_microbatches, "gpipe")
        costs = stage_costs(model(*[layer()] * len(replicas)), made)
        buffered = simulate(programs(made), made, costs, free(made.num_ranks))
        synchronous = simulate(programs(made), made, costs, free(made.num_ranks), synchronous=True)
        assert synchronous.seconds >= buffered.seconds - 1e-9


def test_1f1b_under_synchronous_sends_finishes_or_the_report_names_what_waits():
    finished = 0
    for replicas in COMBINATIONS:
        made = plan(replicas, 5, "1f1b")
        ran, costs = programs(made), stage_costs(model(*[layer()] * len(replicas)), made)
        try:
            simulate(ran, made, costs, free(made.num_ranks), synchronous=True)
            finished += 1
        except Deadlock as report:
            named = re.findall(r"rank (\d+) \(stage (\d+)\) waits at instruction (\d+), (\w+)", str(report))
            assert len(named) >= 2 and str(report).count(";") == len(named) - 1
            for rank, stage, i, word in named:
                assert word[:2] in ("sa", "sg", "ra", "rg") and str(ran[int(rank)][int(i)]) == word
                assert made.place(int(rank)).stage == int(stage)
    assert 0 < finished < len(COMBINATIONS)


PAIR = plan([1, 1], 2)


@pytest.mark.parametrize(
    "lines, synchronous, waiting",
    [
        pytest.param(
            [text(program) for program in programs(PAIR).values()],
            True,
            "rank 0 (stage 0) waits at instruction 3, sa1; rank 1 (stage 1) waits at instruction 3, sg0",
            id="1f1b relies on buffered sends",
        ),
        pytest.param(
            ["F0 rg0 B0", "ra0 F0 B0 sg0"],
            False,
            "rank 0 (stage 0) waits at instruction 1, rg0; rank 1 (stage 1) waits at instruction 0, ra0",
            id="a send is missing",
        ),
        pytest.param(
            ["F0 sa0 rg0 B0 F1 sa1 rg1 B1", "ra1 F1 B1 sg1 ra0 F0 B0 sg0"],
            False,
            "rank 0 (stage 0) waits at instruction 2, rg0; rank 1 (stage 1) waits at instruction 0, ra1",
            id="order swapped",
        ),
        pytest.param(
            ["F0 sa0 rg1 B0 rg0 B1", "ra0 F0 B0 sg0"],
            False,
            "rank 0 (stage 0) waits at instruction 2, rg1",
            id="only the stuck rank is named",
        ),
    ],
)
def test_a_bad_program_is_reported(lines, synchronous, waiting):
    costs = stage_costs(model(layer(), layer()), PAIR)
    with pytest.raises(Deadlock, match=f"^nothing can advance: {re.escape(waiting)}$"):
        simulate(dict(enumerate(map(parse, lines))), PAIR, costs, free(2), synchronous=synchronous)


def test_a_replica_that_skips_the_all_reduce_is_waited_for():
    made = plan([2], 2)
    bad = {0: parse("F0 B0 all-reduce step"), 1: parse("F1 step")}
    with pytest.raises(Deadlock, match=r": rank 0 \(stage 0\) waits at instruction 2, all-reduce$"):
        simulate(bad, made, stage_costs(model(layer(parameters=1)), made), free(2))


# Processors


@pytest.mark.parametrize(
    "num_microbatches, seconds",
    [
        (1, 3),  # alone: full speed
        (2, 3),  # two ranks on two slots: full speed
        (3, 4.5),  # three ranks on two slots: 2/3 each
        (4, 6),  # four ranks on two slots: half each
        (5, 9),  # the first has two: half speed with the others, then alone
    ],
)
def test_ranks_of_a_node_share_its_processors(num_microbatches, seconds):
    cluster = Cluster((Level("node", 4, 1e300, 0.0),), node_ranks=4, compute_slots=2)
    assert predict(plan([4], num_microbatches), model(layer(1, 2)), cluster)[0].seconds == approx(seconds)


def test_nodes_do_not_share():
    cluster = Cluster((Level("network", 4, 1e300, 0.0),), node_ranks=2, compute_slots=1)
    timeline, _ = predict(plan([4], 3), model(layer(1, 2)), cluster)
    assert times(timeline, 0, Backward) == [(2, 6)] and times(timeline, 2, Backward) == [(1, 3)]


def test_a_slow_rank_takes_longer():
    cluster = Cluster((Level("network", 2, 1e300, 0.0),), relative_speed=(1.0, 0.5))
    timeline, _ = predict(plan([2], 2), model(layer(1, 2)), cluster)
    assert times(timeline, 0, Backward) == [(1, 3)] and times(timeline, 1, Backward) == [(2, 6)]


# Links: each message takes 1 s, and 1/4 s of latency


@pytest.mark.parametrize(
    "replicas, forward_seconds, starts",
    [
        ((2, 1), 1.0, {2: [2.25, 3.25]}),  # both are ready at 1 and take turns at the receiver's port
        ((2, 2), 1.0, {2: [2.25], 3: [2.25]}),  # nothing is shared
        ((1, 2), 0.5, {1: [1.75], 2: [2.75]}),  # ready at 0.5 and 1; the sender's port is free again at 1.5
    ],
)
def test_messages_take_turns_at_a_port(replicas, forward_seconds, starts):
    costs = [StageCost(forward_seconds, 0.0, output_bytes=100), StageCost(0.125, 0.0)]
    made = plan(replicas, 2, "gpipe")
    timeline = simulate(programs(made), made, costs, Cluster.flat(made.num_ranks, 100.0, 0.25))
    for rank, expected in starts.items():
        assert times(timeline, rank, Forward) == [(start, start + 0.125) for start in expected]


def test_a_message_within_a_node_is_faster():
    cluster = Cluster((Level("node", 2, 100.0, 0.0), Level("network", 4, 10.0, 0.0)))
    profile = model(*[layer(1, 1, output=100)] * 4)
    timeline, _ = predict(plan([1] * 4, 1), profile, cluster)
    assert [times(timeline, rank, Forward) for rank in range(4)] == [
        [(0, 1)],
        [(2, 3)],
        [(13, 14)],
        [(15, 16)],
    ]


# The all-reduce: two buckets, ready after 4 s and after all 6 s of the last backward, which starts at 2 s


@pytest.mark.parametrize(
    "bucket_seconds, wait",
    [
        (1, (8, 9)),  # the first hides behind the backward, the second follows it
        (2, (8, 10)),  # the first ends just as the second is ready
        (3, (8, 12)),  # the first reaches 1 s beyond the backward, and the second follows the first
    ],
)
def test_the_all_reduce_hides_behind_the_backward(bucket_seconds, wait):
    layers = layer(1, 2, parameters=BUCKET_BYTES), layer(1, 4, parameters=BUCKET_BYTES, update=0.5)
    figures = AllReduceFigures(BUCKET_BYTES / bucket_seconds, latency_seconds=0.0)
    cluster = replace(free(2), allreduce=figures)
    timeline, _ = predict(Plan.data_parallel(2, 2, 2), model(*layers), cluster)
    for rank in range(2):
        assert times(timeline, rank, Backward) == [(2, 8)]
        assert times(timeline, rank, AllReduce) == [wait]
        assert times(timeline, rank, Step) == [(wait[1], wait[1] + 0.5)]


@pytest.mark.parametrize(
    "num_microbatches, waits",
    [
        (1, [(3, 4), (0, 4)]),  # rank 1 has no microbatch: zeros, ready at once
        (3, [(6, 7), (3, 7)]),  # rank 0 has two, and only the last one's backward ends the sum
    ],
)
def test_every_replica_joins_the_all_reduce(num_microbatches, waits):
    cluster = Cluster.flat(2, bandwidth=100.0, latency_seconds=0.0)
    timeline, _ = predict(plan([2], num_microbatches), model(layer(1, 2, parameters=100)), cluster)
    assert [times(timeline, rank, AllReduce) for rank in range(2)] == [[wait] for wait in waits]


# The prediction


def test_prediction():
    profile = model(layer(1, 2, parameters=10, activation=5, output=3), layer(1, 2, activation=7), samples=4)
    _, prediction = predict(plan([1, 1], 3), profile, free(2))
    assert prediction.minibatch_seconds == approx(12)
    assert prediction.samples_per_second == approx(1)
    assert prediction.bubble_fraction == approx(0.25)
    assert prediction.peak_memory_bytes == (10 * 2 + 2 * 5 + 3, 7 + 3)


@pytest.mark.parametrize(
    "made, message",
    [
        (plan([1, 2], 2), "plan needs 1 + 2 = 3 ranks, got 2"),
        (plan([1], 2), "the plan cuts 1 layers, the profile has 2"),
    ],
)
def test_what_does_not_belong_together_is_refused(made, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        predict(made, model(layer(), layer()), free(2))


def test_a_message_takes_processor_time_at_both_ends():
    """One microbatch through two stages (f = 1, b = 2): two messages, each handled twice for 0.25."""
    made = plan((1, 1), 1)
    costs = [StageCost(1.0, 2.0)] * 2
    cluster = replace(free(2), message_seconds=0.25)
    timeline = simulate(programs(made), made, costs, cluster)
    assert timeline.seconds == approx(1 + 2 + 1 + 2 + 2 * 2 * 0.25)
    assert str(timeline.events[0][1].instruction) == "sa0"
    assert timeline.events[0][1].seconds == approx(0.25)
