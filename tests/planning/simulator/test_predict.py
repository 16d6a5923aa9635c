import itertools
import math
import random
import re
import time
from dataclasses import replace
from functools import cache

import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.cost.estimate import estimate
from hybridpipe.planning.cost.formula import StageCost, stage_costs
from hybridpipe.planning.schedules.generators import programs
from hybridpipe.planning.schedules.instructions import (
    AllReduce,
    Backward,
    text,
)
from hybridpipe.planning.simulator.predict import Deadlock, predict, simulate
from tests.planning.helpers import forward_programs, free, layer, model, parse, plan, times

STRAIGHT = ("1f1b", "gpipe")
FLUSHED = (*STRAIGHT, "zero-bubble")
COMBINATIONS = [
    replicas for stages in range(1, 5) for replicas in itertools.product(range(1, 5), repeat=stages)
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
        rank: " ".join(f"{each.instruction}:{each.start_seconds}-{each.end_seconds}" for each in events)
        for rank, events in timeline.events.items()
    }
    assert seen == {
        0: "F0:0.0-1.0 sa0:1.0-1.0 rg0:1.0-14.0 B0:14.0-16.0 all-reduce:16.0-16.0 step:16.0-16.0",
        1: "ra0:0.0-1.5 F0:1.5-5.5 B0:5.5-13.5 sg0:13.5-13.5 all-reduce:13.5-13.5 step:13.5-13.5",
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


PAIR = plan([1, 1], 2)


@pytest.mark.parametrize(
    "lines, waiting",
    [
        pytest.param(
            ["F0 rg0 B0", "ra0 F0 B0 sg0"],
            "rank 0 (stage 0) waits at instruction 1, rg0; rank 1 (stage 1) waits at instruction 0, ra0",
            id="a send is missing",
        ),
        pytest.param(
            ["F0 sa0 rg0 B0 F1 sa1 rg1 B1", "ra1 F1 B1 sg1 ra0 F0 B0 sg0"],
            "rank 0 (stage 0) waits at instruction 2, rg0; rank 1 (stage 1) waits at instruction 0, ra1",
            id="order swapped",
        ),
        pytest.param(
            ["F0 sa0 rg1 B0 rg0 B1", "ra0 F0 B0 sg0"],
            "rank 0 (stage 0) waits at instruction 2, rg1",
            id="only the stuck rank is named",
        ),
    ],
)
def test_a_bad_program_is_reported(lines, waiting):
    costs = stage_costs(model(layer(), layer()), PAIR)
    with pytest.raises(Deadlock, match=f"^nothing can advance: {re.escape(waiting)}$"):
        simulate(dict(enumerate(map(parse, lines))), PAIR, costs, free(2))


def test_a_replica_that_skips_the_all_reduce_is_waited_for():
    made = plan([2], 2)
    bad = {0: parse("F0 B0 all-reduce step"), 1: parse("F1 step")}
    with pytest.raises(Deadlock, match=r": rank 0 \(stage 0\) waits at instruction 2, all-reduce$"):
        simulate(bad, made, stage_costs(model(layer(parameters=1)), made), free(2))


# The prediction


def test_prediction():
    profile = model(layer(1, 2, parameters=10, activation=5, output=3), layer(1, 2, activation=7), samples=4)
    _, prediction = predict(plan([1, 1], 3), profile, free(2))
    assert prediction.minibatch_seconds == approx(12)
    assert prediction.samples_per_second == approx(1)
    assert prediction.bubble_fraction == approx(0.25)
    assert prediction.peak_memory_bytes == (10 * 2 + 2 * (5 + 3) + 4 * 3, 7 + 3 + 4 * 3)


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


def test_a_long_and_a_short_round_that_take_turns_both_count():
    """Rounds of five minibatches, 35.3 and 22.4 s: the pace was taken of seven of them, and 3 % too slow."""
    made = plan([5, 1], 1, "pipedream")
    profile = model(layer(5, 10, parameters=60, output=60), layer(1, 2))
    cluster = Cluster.flat(6, 20.0, 0.01)
    timeline = simulate(programs(made, 100), made, stage_costs(profile, made), cluster)
    ends = [event.end_seconds for event in timeline.events[0] if isinstance(event.instruction, Backward)]
    lasted = [end - begin for begin, end in itertools.pairwise(ends)][4:12]
    assert lasted[0] > 1.2 * lasted[1] and lasted == approx(lasted[:2] * 4)
    seen, prediction = predict(made, profile, cluster)
    assert prediction.minibatch_seconds == approx(sum(lasted[:2]) / 10)
    assert seen.seconds < timeline.seconds, "simulated only until it repeats itself"


def test_what_has_gathered_at_a_link_does_not_make_the_pace():
    """The first messages pass at once, a minibatch in 0.2 s; later ones take a second each."""
    cluster = Cluster((Level("network", 2, 100.0, 0.0, burst_bytes=2000),))
    profile = model(layer(0.1, 0.1, output=100), layer(0.1, 0.1))
    assert predict(plan([1, 1], 1, "pipedream"), profile, cluster)[1].minibatch_seconds > 0.4


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
    monkeypatch.setattr("hybridpipe.planning.simulator.predict.MAX_INSTRUCTIONS", 100)
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
    monkeypatch.setattr("hybridpipe.planning.simulator.predict.MAX_INSTRUCTIONS", 100)
    part, extended = predict(made, profile, cluster)
    assert sum(map(len, part.events.values())) < sum(map(len, whole.events.values())) / 2
    assert extended.minibatch_seconds == approx(full.minibatch_seconds, rel=0.01)
    assert extended.bubble_fraction == approx(full.bubble_fraction, abs=0.01)


@pytest.mark.parametrize("size", [1, 10**12])
def test_a_minibatch_of_2bw_too_long_to_simulate_has_the_pace_of_the_formula(monkeypatch, size):
    monkeypatch.setattr("hybridpipe.planning.simulator.predict.MAX_INSTRUCTIONS", 100)
    _, prediction = predict(plan([1] * 8, size, "pipedream-2bw"), model(*[layer(1, 2)] * 8), free(8))
    assert prediction.minibatch_seconds > 0


def test_an_asynchronous_pipeline_too_deep_to_fill_has_the_pace_of_the_formula(monkeypatch):
    monkeypatch.setattr("hybridpipe.planning.simulator.predict.MAX_INSTRUCTIONS", 100)
    _, prediction = predict(plan([1] * 8, 1, "pipedream"), model(*[layer(1, 2)] * 8), free(8))
    assert prediction.minibatch_seconds == approx(3) and prediction.bubble_fraction == approx(0)


def test_a_thousand_ranks_are_simulated_within_a_generous_limit():
    """Seconds; what grows with the square of the ranks would take minutes."""
    began = time.perf_counter()
    cluster = Cluster.flat(1000, 1e9, 1e-5)
    predict(plan([1000], 8000), model(layer(parameters=10**6)), cluster)
    predict(plan([1] * 1000, 8), model(*[layer(output=1000)] * 1000), cluster)
    assert time.perf_counter() - began < 60
