"""What ranks share while a plan is simulated: processors, ports, links, the all-reduce's ring."""

import re
from dataclasses import replace

import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster, Collective, Level
from hybridpipe.planning.cost.formula import BUCKET_BYTES, GradientBucket, StageCost
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.schedules.generators import programs
from hybridpipe.planning.schedules.instructions import (
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Step,
)
from hybridpipe.planning.simulator.predict import Deadlock, predict, simulate
from tests.planning.helpers import free, layer, model, parse, plan, times

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


@pytest.mark.parametrize(
    "schedule, count",
    [("1f1b", 6), ("1f1b", 2), ("zero-bubble", 6), ("pipedream", 1)],  # 2: a replica has no microbatch
)
def test_a_processor_of_ones_own_is_as_a_shared_one_that_nobody_else_uses(schedule, count, monkeypatch):
    layers = [layer(1, 3, parameters=300, output=20), layer(2, 5, parameters=100, output=10), layer(1, 2)]
    hybrid = plan([3, 2, 1], count, schedule)
    private, _ = predict(hybrid, model(*layers), Cluster.flat(6, 50.0, 0.1))
    assert Cluster.flat(6, 50.0, 0.1).are_processors_private
    monkeypatch.setattr(Cluster, "are_processors_private", False)
    shared, _ = predict(hybrid, model(*layers), Cluster.flat(6, 50.0, 0.1))
    for rank, events in shared.events.items():
        for event, other in zip(events, private.events[rank], strict=True):
            assert event.instruction == other.instruction
            assert event[1:] == approx(other[1:])


@pytest.mark.parametrize(
    "shared",
    [{"node_ranks": 2}, {"overlap": 0.5}, {"compute_speeds": (0.9,)}],
    ids=lambda shared: next(iter(shared)),
)
def test_what_makes_a_processor_not_ones_own(shared):
    assert not replace(Cluster.flat(4, 50.0, 0.1), **shared).are_processors_private


def test_nodes_do_not_share():
    cluster = Cluster((Level("network", 4, 1e300, 0.0),), node_ranks=2, compute_speeds=(1.0, 0.5))
    timeline, _ = predict(plan([4], 3), model(layer(1, 2)), cluster)
    assert times(timeline, 0, Backward) == [(2, 6)] and times(timeline, 2, Backward) == [(1, 3)]


@pytest.mark.parametrize(
    "speed_of_two, wakeup_seconds, start",
    [(0.5, (9.0, 0.25), 1.5), (0.5, (0.25,), 1.5), (0.5, (9.0, 0.0), 1.0), (1.0, (9.0, 0.25), 1.0)],
)
def test_to_go_on_after_waiting_takes_processor_time(speed_of_two, wakeup_seconds, start):
    """Stage 1 waits for its first activation, and then stage 0 goes on with its second: two compute.

    Where they have a processor each, none is lost.
    """
    cluster = Cluster(
        (Level("node", 2, 1e300, 0.0),),
        node_ranks=2,
        compute_speeds=(1.0, speed_of_two),
        wakeup_seconds=wakeup_seconds,
    )
    timeline, _ = predict(plan([1, 1], 2), model(layer(1, 2), layer(1, 2)), cluster)
    first = next(event for event in timeline.events[1] if isinstance(event.instruction, Forward))
    assert first.start_seconds == approx(start)


@pytest.mark.parametrize(
    "replicas, num_microbatches, told",
    [
        ([577, 521], 2**40, "num_microbatches make"),
        ([2**19, 2**19 - 1], 4, "replicas of neighbouring stages make"),
    ],
)
def test_what_would_never_end_is_refused(replicas, num_microbatches, told):
    with pytest.raises(ValueError, match=f"too large to simulate: .*{told}"):
        predict(plan(replicas, num_microbatches), model(*[layer()] * 2), free(2**20))


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
    figures = Collective(BUCKET_BYTES / bucket_seconds, latency_seconds=0.0)
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


def test_the_first_all_reduce_waits_for_a_cycle_and_what_stands_behind_it_does_not():
    """Both replicas: F 0-1, B 1-5 with a bucket of a second every second from 2 on; a cycle may come late."""
    buckets = tuple(GradientBucket(10, share) for share in (0.25, 0.5, 0.75, 1.0))
    cost = StageCost(1.0, 4.0, buckets=buckets)
    made = plan([2], 2)

    def ends(wait):
        figures = Collective(10.0, 0.0, wait_seconds=wait)
        timeline = simulate(
            programs(made), made, [cost], Cluster((Level("node", 2, 10.0, 0.0, None, figures),))
        )
        return [e.end_seconds for e in timeline.events[0] if isinstance(e.instruction, AllReduce)]

    assert ends(0.0) == [approx(6)], "a bucket at a time, each while the next fills"
    assert ends(2.0) == [approx(8)], "all 2 s later, and no later"
    assert ends(0.5) == [approx(6.5)]


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


def test_a_rank_of_several_stages_is_named_with_that_of_its_instruction():
    made = plan([1, 1], 1, "interleaved-1f1b", chunks=2)
    bad = {0: parse("F0 sa0 ra0.1"), 1: parse("ra0 F0 rg0")}
    waiting = "rank 0 (stage 2) waits at instruction 2, ra0.1; rank 1 (stage 1) waits at instruction 2, rg0"
    with pytest.raises(Deadlock, match=f": {re.escape(waiting)}$"):
        simulate(bad, made, [StageCost(1.0, 1.0)] * 4, free(2))


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


@pytest.mark.parametrize(
    "burst, reduced, arrived",
    [
        (50, 2.5, 3.5),  # 50 are limited, and 50 of the message
        (100, 2, 3),
        (120, 2, 2.8),  # 20 are left, and 50 more gather
        (1e9, 2, 2.5),
    ],
)
def test_what_has_gathered_in_rest_passes_an_all_reduce_at_once_too(burst, reduced, arrived):
    """Ranks 0 and 1 reduce 100 bytes, which each sends, at 2 s; half a second later rank 0 sends 100 more.

    For want of it a plan with small all-reduces was predicted 40 % too slow over 100 Mbit/s.
    """
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
    cluster = Cluster((Level("network", 3, 100.0, 0.0, burst_bytes=burst),))
    timeline = simulate(programs_, made, costs, cluster)
    assert times(timeline, 0, AllReduce) == [(2, reduced)]
    assert times(timeline, 2, Forward) == [(approx(arrived), approx(arrived))]


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


def test_an_all_reduce_after_all_computing_takes_what_was_measured():
    """The processor time that it takes was measured on processors that the ranks share, as they do now: both
    ranks compute for 20 s on one, and four seconds of all-reduce do not become eight."""
    cost = StageCost(2.0, 8.0, buckets=(GradientBucket(40, 1.0),))
    cluster = replace(Cluster.flat(2, 10.0, 0.0), overlap=0.0, node_ranks=2, compute_speeds=(1.0, 0.5))
    assert simulate(programs(plan([2], 2)), plan([2], 2), [cost], cluster).seconds == approx(24)


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


def test_a_slow_replica_fills_its_buckets_late():
    """At half the speed both buckets are full at 4 and at 16 instead of 2 and 8, and each takes a second."""
    layers = layer(0, 4, parameters=BUCKET_BYTES), layer(0, 2, parameters=BUCKET_BYTES)
    figures = Collective(BUCKET_BYTES, latency_seconds=0.0)
    slow = Cluster((Level("network", 2, 1e300, 0.0, allreduce=figures),), relative_speed=(1.0, 0.5))
    timeline, _ = predict(Plan.data_parallel(2, 2, 2), model(*layers), slow)
    assert times(timeline, 0, AllReduce) == [(6, 13)]
    assert times(timeline, 1, AllReduce) == [(12, 13)]
