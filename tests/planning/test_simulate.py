import itertools
import math
import random
import re
import time
from dataclasses import replace
from functools import cache

import pytest
from pytest import approx

from hybridpipe.planning.cluster import AllReduce as AllReduceFigures
from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.cost import BUCKET_BYTES, GradientBucket, StageCost, estimate, stage_costs
from hybridpipe.planning.instructions import (
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Step,
    parse,
    text,
)
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.schedules import forward_programs, programs
from hybridpipe.planning.simulate import Deadlock, predict, simulate

from .helpers import free, layer, model, plan

STRAIGHT = ("1f1b", "gpipe")
FLUSHED = (*STRAIGHT, "zero-bubble")
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


@pytest.mark.parametrize("schedule", STRAIGHT)
@pytest.mark.parametrize("p, m", [(1, 1), (1, 8), (2, 1), (2, 3), (3, 7), (4, 2), (4, 8), (8, 32)])
def test_bubble_matches_the_paper(schedule, p, m):
    timeline, _ = predict(plan([1] * p, m, schedule), model(*[layer(1, 2)] * p), free(p))
    assert timeline.bubble_fraction == approx((p - 1) / (m + p - 1))
    assert timeline.seconds == approx(3 * (m + p - 1))


@pytest.mark.parametrize("schedule", FLUSHED)
def test_no_rank_idles_once_replicas_and_cuts_balance(schedule):
    """Stage 0 costs twice as much and has twice the ranks: after the fill, nobody waits."""
    _, prediction = predict(plan([2, 1], 40, schedule), model(layer(2, 4), layer(1, 2)), free(3))
    assert prediction.bubble_fraction < 0.1


def shared(ready, transfer):
    """When equal messages that are ready at these times have crossed a link that they share evenly."""
    left, ends, now = {}, {}, 0.0
    coming = sorted(range(len(ready)), key=lambda b: (ready[b], b))
    while coming or left:
        step = min(
            [work * len(left) for work in left.values()] + [max(ready[b] - now, 0.0) for b in coming[:1]]
        )
        now += step
        left = {b: work - step / len(left) for b, work in left.items()}
        ends |= {b: now for b, work in left.items() if work < 1e-9}
        left = {b: work for b, work in left.items() if b not in ends}
        while coming and ready[coming[0]] <= now + 1e-9:
            left[coming.pop(0)] = transfer
    return [ends[b] for b in range(len(ready))]


def recurrence(orders, num_microbatches, forward, backward, transfer, latency):
    """When the last rank of a straight pipeline ends; `orders`: one list a stage.

    Work starts when the stage has done what stands before it and its input is there. When that is depends
    on how messages share links, and that on when work ends: begun without sharing, the answers settle.
    """
    sent = {}

    def ends():
        @cache
        def end(s, what, b):
            i = orders[s].index((what, b))
            ready = [end(s, *orders[s][i - 1])] if i else [0.0]
            sender = s - 1 if what == "F" else s + 1
            if 0 <= sender < len(orders):
                ready.append(sent.get((sender, what, b), end(sender, what, b) + transfer) + latency)
            return max(ready) + (forward if what == "F" else backward)[s]

        return {(s, what, b): end(s, what, b) for s, order in enumerate(orders) for what, b in order}

    seen = None
    while seen != (seen := ends()):
        for s in range(len(orders)):
            for what in "FB":
                crossed = shared([seen[s, what, b] for b in range(num_microbatches)], transfer)
                sent |= {(s, what, b): at for b, at in enumerate(crossed)}
    return max(seen.values())


@pytest.mark.parametrize("seed", range(40))
def test_straight_pipelines_match_the_recurrence(seed):
    """Two stages with any transfer; more with latency only, as each port then has one kind of message."""
    draw = random.Random(seed)
    stages, m = draw.choice([2, 2, 3, 4]), draw.randint(1, 9)
    forward, backward = ([draw.randint(1, 20) / 10 for _ in range(stages)] for _ in "FB")
    transfer, latency = (draw.randint(0, 25) / 10 if stages == 2 else 0.0), draw.randint(0, 10) / 10
    straight = plan([1] * stages, m, draw.choice(STRAIGHT))
    costs = [
        StageCost(f, b, output_bytes=transfer, gradient_bytes=transfer) for f, b in zip(forward, backward)
    ]
    ran = programs(straight)
    orders = [
        [(word[0], int(word[1:])) for word in text(ran[rank]).split() if word[0] in "FB"] for rank in ran
    ]
    timeline = simulate(ran, straight, costs, Cluster.flat(stages, 1.0, latency))
    assert timeline.seconds == approx(recurrence(orders, m, forward, backward, transfer, latency))


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


@pytest.mark.parametrize("schedule", FLUSHED)
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
    cluster = Cluster((Level("node", 4, 1e300, 0.0),), node_ranks=4, compute_speeds=(1.0, 1.0, 2 / 3, 0.5))
    assert predict(plan([4], num_microbatches), model(layer(1, 2)), cluster)[0].seconds == approx(seconds)


def test_nodes_do_not_share():
    cluster = Cluster((Level("network", 4, 1e300, 0.0),), node_ranks=2, compute_speeds=(1.0, 0.5))
    timeline, _ = predict(plan([4], 3), model(layer(1, 2)), cluster)
    assert times(timeline, 0, Backward) == [(2, 6)] and times(timeline, 2, Backward) == [(1, 3)]


@pytest.mark.parametrize("speed_of_two, start", [(0.5, 1.25), (1.0, 1.0)])
def test_a_rank_that_waited_waits_on_while_all_processors_are_busy(speed_of_two, start):
    """Stage 1 waits for its first activation, and then stage 0 goes on with its second forward."""
    cluster = Cluster(
        (Level("node", 2, 1e300, 0.0),),
        node_ranks=2,
        compute_speeds=(1.0, speed_of_two),
        wakeup_seconds=0.25,
    )
    timeline, _ = predict(plan([1, 1], 2), model(layer(1, 2), layer(1, 2)), cluster)
    first = next(event for event in timeline.events[1] if isinstance(event.instruction, Forward))
    assert first.start_seconds == approx(start)


@pytest.mark.parametrize(
    "replicas, num_microbatches, told",
    [
        ([577, 521], 2**40, "num_microbatches make"),
        ([2**20, 2**20 - 1], 4, "replicas of neighbouring stages make"),
    ],
)
def test_what_would_never_end_is_refused(replicas, num_microbatches, told):
    with pytest.raises(ValueError, match=f"too large to simulate: .*{told}"):
        predict(plan(replicas, num_microbatches), model(*[layer()] * 2), free(2**21))


def test_a_slow_rank_takes_longer():
    cluster = Cluster((Level("network", 2, 1e300, 0.0),), relative_speed=(1.0, 0.5))
    timeline, _ = predict(plan([2], 2), model(layer(1, 2)), cluster)
    assert times(timeline, 0, Backward) == [(1, 3)] and times(timeline, 1, Backward) == [(2, 6)]


# Links: each message takes 1 s, and 1/4 s of latency


@pytest.mark.parametrize(
    "replicas, forward_seconds, starts",
    [
        ((2, 1), 1.0, {2: [3.25, 3.375]}),  # both are ready at 1 and share the receiver's port
        ((2, 2), 1.0, {2: [2.25], 3: [2.25]}),  # nothing is shared
        ((1, 2), 0.5, {1: [2.25], 2: [2.75]}),  # ready at 0.5 and 1; they share the sender's port till 2
    ],
)
def test_messages_share_a_port(replicas, forward_seconds, starts):
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
    cluster = Cluster((Level("network", 2, 1e300, 0.0, allreduce=figures),))
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


def test_the_weights_half_fills_the_buckets():
    """Both replicas: F 0-1, I 1-2, W 2-4 with a bucket in its middle and one at its end, each of 1 s."""
    cost = StageCost(1.0, 3.0, buckets=(GradientBucket(10, 0.5), GradientBucket(10, 1.0)), weight_seconds=2.0)
    made = plan([2], 2, "zero-bubble")
    timeline = simulate(programs(made), made, [cost], Cluster.flat(2, 10.0, 0.0))
    for rank in (0, 1):
        assert times(timeline, rank, BackwardInput) == [(1, 2)]
        assert times(timeline, rank, BackwardWeight) == [(2, 4)]
        assert times(timeline, rank, AllReduce) == [(4, 5)]


def test_the_gradients_of_each_stage_of_a_rank_are_reduced_once_they_are_final():
    """Stages 0 and 2 on ranks 0 and 1: 0.1's are final at the end of its backward, long before 0's."""
    bucket = (GradientBucket(10, 1.0),)
    costs = [StageCost(1.0, 2.0, update_seconds=0.5, buckets=bucket)] * 4
    made = plan([2, 2], 2, "interleaved-1f1b", chunks=2)
    timeline = simulate(programs(made), made, costs, Cluster.flat(4, 1e300, 0.0))
    slow = simulate(programs(made), made, costs, replace(Cluster.flat(4, 10.0, 0.0)))
    free_end = times(timeline, 0, Backward)[-1].expected[1]
    assert free_end == 12 and times(slow, 0, AllReduce) == [(12, 13)]
    assert times(slow, 0, Step) == [(13, 14)]  # of two stages


def test_messages_between_the_stages_of_two_ranks_do_not_mix():
    """Rank 0 sends microbatch 0 forward from stage 0 and from stage 2, of different sizes."""
    made = plan([1, 1], 1, "interleaved-1f1b", chunks=2)
    costs = [StageCost(1.0, 1.0, output_bytes=10 * i, gradient_bytes=i) for i in (1, 2, 3, 4)]
    timeline = simulate(programs(made), made, costs, Cluster.flat(2, 10.0, 0.0))
    assert timeline.seconds == approx(8 + (1 + 2 + 3) + (0.3 + 0.2 + 0.1))


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_rank_of_several_stages_is_named_with_that_of_its_instruction(synchronous):
    made = plan([1, 1], 1, "interleaved-1f1b", chunks=2)
    bad = {0: parse("F0 sa0 ra0.1"), 1: parse("ra0 F0 rg0")}
    waiting = "rank 0 (stage 2) waits at instruction 2, ra0.1; rank 1 (stage 1) waits at instruction 2, rg0"
    with pytest.raises(Deadlock, match=f": {re.escape(waiting)}$"):
        simulate(bad, made, [StageCost(1.0, 1.0)] * 4, free(2), synchronous=synchronous)


# The prediction


def test_prediction():
    profile = model(layer(1, 2, parameters=10, activation=5, output=3), layer(1, 2, activation=7), samples=4)
    _, prediction = predict(plan([1, 1], 3), profile, free(2))
    assert prediction.minibatch_seconds == approx(12)
    assert prediction.samples_per_second == approx(1)
    assert prediction.bubble_fraction == approx(0.25)
    assert prediction.peak_memory_bytes == (10 * 2 + 2 * (5 + 3), 7 + 3)


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
    costs = [StageCost(1.0, 2.0, output_bytes=20, gradient_bytes=20)] * 2
    cluster = replace(free(2), message_seconds=0.125, message_seconds_per_byte=0.125 / 20)
    timeline = simulate(programs(made), made, costs, cluster)
    assert timeline.seconds == approx(1 + 2 + 1 + 2 + 2 * 2 * 0.25)
    assert str(timeline.events[0][1].instruction) == "sa0"
    assert timeline.events[0][1].seconds == approx(0.25)


def test_gradients_may_weigh_less_than_activations():
    made = plan((1, 1), 1)
    costs = [StageCost(1.0, 2.0, output_bytes=100, gradient_bytes=10), StageCost(1.0, 2.0)]
    assert simulate(programs(made), made, costs, Cluster.flat(2, 10.0, 0.0)).seconds == approx(6 + 10 + 1)


# Contention


def test_ranks_of_a_node_share_its_link():
    """Both replicas send 100 bytes at 1 s to other nodes: over one link of 50 bytes/s, or over two."""
    costs = [StageCost(1.0, 0.0, output_bytes=100), StageCost(0.5, 0.0)]
    made = plan((2, 2), 2, "gpipe")
    for node, arrival in ((2, 1 + 4), (1, 1 + 2)):
        cluster = Cluster((Level("node", node, 100.0, 0.0), Level("network", 4, 100.0, 0.0, 50.0)))
        timeline = simulate(programs(made), made, costs, cluster)
        for rank in (2, 3):
            assert times(timeline, rank, Forward) == [(arrival, arrival + 0.5)]


@pytest.mark.parametrize(
    "burst, forward, arrivals",
    [
        (None, 2, (3, 5, 7)),
        (30, 2, (2.7, 4.7, 6.7)),  # 70 are limited; it is full again after 0.3 s
        (100, 2, (2, 4, 6)),
        (150, 0.5, (0.5, 1, 2)),  # 50 are left, then none, and the third finds 50
        (1e9, 0.5, (0.5, 1, 1.5)),
    ],
)
def test_a_link_that_has_rested_lets_a_burst_pass(burst, forward, arrivals):
    """100 bytes after each forward, over a link of 100 bytes/s."""
    costs = [StageCost(forward, 0.0, output_bytes=100), StageCost(0.0, 0.0)]
    made = plan((1, 1), 3, "gpipe")
    programs_ = {0: parse("F0 sa0 F1 sa1 F2 sa2"), 1: parse("ra0 F0 ra1 F1 ra2 F2")}
    cluster = Cluster((Level("network", 2, 100.0, 0.0, burst_bytes=burst),))
    timeline = simulate(programs_, made, costs, cluster)
    assert times(timeline, 1, Forward) == [(at, at) for at in arrivals]


def test_an_all_reduce_empties_the_bucket():
    """Rank 0 reduces 100 bytes until 3 s, and sends 100 more at 3.5 s: 50 have gathered."""
    costs = [
        StageCost(0.5, 2.0, output_bytes=100, buckets=(GradientBucket(100, 1.0),)),
        StageCost(0.0, 0.0),
    ]
    made = plan((2, 1), 2, "gpipe")
    programs_ = {
        0: parse("B0 all-reduce F0 sa0"),
        1: parse("B1 all-reduce"),
        2: parse("ra0 F0"),
    }
    cluster = Cluster((Level("network", 3, 100.0, 0.0, burst_bytes=200),))
    timeline = simulate(programs_, made, costs, cluster)
    assert times(timeline, 0, AllReduce) == [(2, 3)]
    assert times(timeline, 2, Forward) == [(4, 4)]


def test_an_all_reduce_and_a_message_share_a_port():
    """Stage 1 reduces from 2 s on, 100 bytes a rank, just when rank 1 sends 100 back: both at half speed."""
    costs = [
        StageCost(0.0, 1.0, gradient_bytes=100),
        StageCost(1.0, 1.0, buckets=(GradientBucket(100, 1.0),)),
    ]
    made = plan((1, 2), 2, "gpipe")
    programs_ = {
        0: parse("F0 sa0 F1 sa1 rg0 B0"),
        1: parse("ra0 F0 B0 sg0 all-reduce"),
        2: parse("ra1 F1 B1 all-reduce"),
    }
    timeline = simulate(programs_, made, costs, Cluster.flat(3, 100.0, 0.0))
    assert times(timeline, 0, Backward) == [(4, 5)]
    for rank in (1, 2):
        assert times(timeline, rank, AllReduce) == [(2, 4)]


@pytest.mark.parametrize("overlap, seconds", [(1.0, 14), (0.75, 15), (0.0, 18)])
def test_what_an_all_reduce_takes_of_the_processor_slows_the_backward(overlap, seconds):
    """A first bucket, ready in the middle of a backward of 8 s, is reduced in 4 s; the second, at its end."""
    cost = StageCost(2.0, 8.0, buckets=(GradientBucket(40, 0.5), GradientBucket(40, 1.0)))
    cluster = replace(Cluster.flat(2, 10.0, 0.0), overlap=overlap)
    timeline = simulate(programs(plan([2], 2)), plan([2], 2), [cost], cluster)
    assert timeline.seconds == approx(seconds)


def test_an_all_reduce_costs_nothing_where_a_processor_is_spare():
    cost = StageCost(2.0, 8.0, buckets=(GradientBucket(40, 0.5), GradientBucket(40, 1.0)))
    cluster = replace(
        Cluster.flat(2, 10.0, 0.0), overlap=0.0, node_ranks=2, compute_speeds=(1.0, 1.0, 1.0, 1.0)
    )
    assert simulate(programs(plan([2], 2)), plan([2], 2), [cost], cluster).seconds == approx(14)


def test_simulating_again_gives_the_same():
    cluster = Cluster(
        (Level("node", 4, 100.0, 0.01), Level("network", 8, 20.0, 0.1, 30.0)),
        node_ranks=4,
        compute_speeds=(1.0, 0.9, 0.7, 0.6),
        message_seconds=0.01,
        overlap=0.5,
    )
    profile = model(*[layer(1, 2, parameters=50, output=9)] * 3)
    runs = [predict(plan([3, 4, 1], 12), profile, cluster)[0] for _ in range(2)]
    assert runs[0] == runs[1]


# Asynchronous


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
def test_a_full_pipeline_takes_its_slowest_stage_a_minibatch(stages):
    profile = model(*[layer(1, 2, update=0.25)] * stages, samples=4)
    timeline, prediction = predict(plan([1] * stages, 1, "pipedream"), profile, free(stages))
    assert prediction.minibatch_seconds == approx(3.25)
    assert prediction.samples_per_second == approx(4 / 3.25)
    assert prediction.bubble_fraction == approx(0.0, abs=1e-9)
    assert timeline.bubble_fraction > 0 or stages == 1  # of the whole run, which fills and drains


@pytest.mark.parametrize("seed", range(20))
def test_an_unbalanced_straight_pipeline_takes_its_slowest_stage(seed):
    draw = random.Random(seed)
    layers = [layer(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(draw.randint(2, 6))]
    _, prediction = predict(plan([1] * len(layers), 1, "pipedream"), model(*layers), free(len(layers)))
    slowest = max(each.forward_seconds + each.backward_seconds for each in layers)
    assert prediction.minibatch_seconds == approx(slowest)
    busy = sum(each.forward_seconds + each.backward_seconds for each in layers)
    assert prediction.bubble_fraction == approx(1 - busy / slowest / len(layers), abs=0.02)


def test_replicas_of_a_full_pipeline_update_round_by_round():
    """Data parallelism without a flush: a round of two minibatches takes 3 s and the all-reduce of 1 s."""
    profile = model(layer(1, 2, parameters=10))
    made = plan([2], 1, "pipedream")
    timeline, prediction = predict(made, profile, Cluster.flat(2, 10.0, 0.0))
    assert prediction.minibatch_seconds == approx((3 + 1) / 2)
    for rank in (0, 1):
        assert times(timeline, rank, AllReduce)[:2] == [(3, 4), (7, 8)]


@pytest.mark.parametrize("replicas", [(1, 2, 1), (2, 3), (4, 3, 2), (7, 5, 4), (9, 8, 7)])
def test_the_pace_of_a_full_pipeline_is_that_of_a_long_run(replicas):
    """Also where a whole round of all stages, here 504 minibatches for the last, is too long to simulate."""
    made = plan(replicas, 1, "pipedream")
    profile = model(*[layer(m, 2 * m, parameters=9, output=2) for m in replicas])
    cluster = Cluster.flat(24, 20.0, 0.01)
    whole = 1008 // math.lcm(*replicas) * math.lcm(*replicas)
    timeline = simulate(programs(made, 3 * whole), made, stage_costs(profile, made), cluster)
    returned = {
        event.instruction.microbatch: event.end_seconds
        for rank in made.stages[0].ranks
        for event in timeline.events[rank]
        if isinstance(event.instruction, Backward)
    }
    measured = (returned[2 * whole] - returned[whole]) / whole
    assert predict(made, profile, cluster)[1].minibatch_seconds == approx(measured, rel=0.02)


@pytest.mark.parametrize("replicas", [(1, 1), (1, 2, 1), (2, 3), (3, 2, 1)])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_pace_of_2bw_is_that_of_a_long_run(replicas, size):
    made = plan(replicas, size, "pipedream-2bw")
    profile = model(*[layer(m, 2 * m, parameters=9, output=2) for m in replicas])
    cluster = Cluster.flat(6, 20.0, 0.01)
    whole = 96
    timeline = simulate(programs(made, 3 * whole * size), made, stage_costs(profile, made), cluster)
    ends = {
        event.instruction.microbatch: event.end_seconds
        for rank in made.stages[0].ranks
        for event in timeline.events[rank]
        if isinstance(event.instruction, Backward)
    }
    measured = (ends[2 * whole * size] - ends[whole * size]) / whole
    assert predict(made, profile, cluster)[1].minibatch_seconds == approx(measured, rel=0.02)


def test_a_limit_in_flight_slows_a_full_pipeline_down():
    """One minibatch at a time: all stages, one after the other; half of those it takes: half as fast."""
    profile = model(*[layer(1, 2)] * 8)
    seconds = [
        predict(plan([1] * 8, 1, "pipedream", max_in_flight=most), profile, free(8))[1].minibatch_seconds
        for most in (1, 2, 4, 8, None)
    ]
    assert seconds == approx([24, 12, 6, 3, 3])


def test_no_deadlock_of_asynchronous_programs():
    """Every replica count may meet every other, also where the last round is not full."""
    for replicas in COMBINATIONS:
        made = plan(replicas, 1, "pipedream")
        costs = stage_costs(model(*[layer(parameters=1)] * len(replicas)), made)
        for count in (1, 5, 13):
            timeline = simulate(programs(made, count), made, costs, Cluster.flat(made.num_ranks, 3.0, 0.1))
            assert {
                rank: tuple(event.instruction for event in events) for rank, events in timeline.events.items()
            } == programs(made, count)


# Large plans


@pytest.mark.parametrize("schedule", FLUSHED)
@pytest.mark.parametrize("replicas", [(1, 1, 1, 1), (4, 2, 1), (3, 1), (2, 4, 3), (6,)])
def test_a_long_minibatch_lies_on_a_line_with_two_shorter_ones(monkeypatch, schedule, replicas):
    cluster = Cluster(
        (Level("node", 4, 80.0, 0.01), Level("network", 12, 40.0, 0.1, 60.0)),
        node_ranks=4,
        compute_speeds=(1.0, 0.9, 0.8, 0.7),
        message_seconds=0.02,
        overlap=0.5,
    )
    profile = model(*(layer(m, 1.5 * m, parameters=40, output=8, update=0.3) for m in replicas))
    made = plan(replicas, 240, schedule)
    whole, full = predict(made, profile, cluster)
    monkeypatch.setattr("hybridpipe.planning.simulate.MAX_INSTRUCTIONS", 100)
    part, extended = predict(made, profile, cluster)
    assert sum(map(len, part.events.values())) < sum(map(len, whole.events.values())) / 2
    assert extended.minibatch_seconds == approx(full.minibatch_seconds, rel=0.01)
    assert extended.bubble_fraction == approx(full.bubble_fraction, abs=0.01)


@pytest.mark.parametrize("replicas", [(1, 1, 1, 1), (2, 2)])
@pytest.mark.parametrize("num_microbatches", [240, 243])
def test_a_long_interleaved_minibatch_lies_on_a_line_too(monkeypatch, replicas, num_microbatches):
    profile = model(*[layer(1, 1.5, parameters=40, output=8, update=0.3)] * len(replicas) * 2)
    made = plan(replicas, num_microbatches, "interleaved-1f1b", chunks=2)
    cluster = Cluster.flat(4, 40.0, 0.1)
    whole, full = predict(made, profile, cluster)
    monkeypatch.setattr("hybridpipe.planning.simulate.MAX_INSTRUCTIONS", 100)
    part, extended = predict(made, profile, cluster)
    assert sum(map(len, part.events.values())) < sum(map(len, whole.events.values())) / 2
    assert extended.minibatch_seconds == approx(full.minibatch_seconds, rel=0.01)
    assert extended.bubble_fraction == approx(full.bubble_fraction, abs=0.01)


@pytest.mark.parametrize("size", [1, 10**12])
def test_a_minibatch_of_2bw_too_long_to_simulate_has_the_pace_of_the_formula(monkeypatch, size):
    monkeypatch.setattr("hybridpipe.planning.simulate.MAX_INSTRUCTIONS", 100)
    _, prediction = predict(plan([1] * 8, size, "pipedream-2bw"), model(*[layer(1, 2)] * 8), free(8))
    assert prediction.minibatch_seconds > 0


def test_an_asynchronous_pipeline_too_deep_to_fill_has_the_pace_of_the_formula(monkeypatch):
    monkeypatch.setattr("hybridpipe.planning.simulate.MAX_INSTRUCTIONS", 100)
    _, prediction = predict(plan([1] * 8, 1, "pipedream"), model(*[layer(1, 2)] * 8), free(8))
    assert prediction.minibatch_seconds == approx(3) and prediction.bubble_fraction == approx(0)


def test_a_thousand_ranks_are_simulated_within_a_generous_limit():
    """Seconds; what grows with the square of the ranks would take minutes."""
    began = time.perf_counter()
    cluster = Cluster.flat(1000, 1e9, 1e-5)
    predict(plan([1000], 8000), model(layer(parameters=10**6)), cluster)
    predict(plan([1] * 1000, 8), model(*[layer(output=1000)] * 1000), cluster)
    assert time.perf_counter() - began < 60
