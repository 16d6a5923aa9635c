"""Replicas that split experts run every pass together, and one without a microbatch joins."""

from itertools import product

import pytest

from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.schedules import validate as module
from hybridpipe.planning.schedules.generators import programs, until_backward
from hybridpipe.planning.schedules.instructions import JoinBackward, JoinForward, add_joins, parse, text
from hybridpipe.planning.schedules.validate import InvalidProgram, validate, validate_plan
from tests.planning import helpers
from tests.planning.helpers import forward_programs
from tests.thinned import thinned


def plan(replicas, num_microbatches, schedule="1f1b", split=None, zero=0, **options) -> Plan:
    """One layer a stage; `split` are the stages that split experts, by default all."""
    stages = (
        StageSpec(s, s + 1, count, zero=zero, experts=split is None or s in split)
        for s, count in enumerate(replicas)
    )
    return Plan(tuple(stages), schedule, num_microbatches, **options)


def texts(made: Plan, count: int | None = None) -> list[str]:
    return [text(program) for program in programs(made, count).values()]


# What is generated


@pytest.mark.parametrize(
    "schedule, expected",
    [
        (
            "1f1b",
            [
                "F0 sa0 F1 sa1 F2 sa2 rg0 B0 rg1 B1 rg2 B2 all-reduce step",
                "ra0 F0 B0 sg0 ra2 F2 B2 sg2 all-reduce step",
                "ra1 F1 B1 sg1 jf3 jb3 all-reduce step",
            ],
        ),
        (
            "gpipe",
            [
                "F0 sa0 F1 sa1 F2 sa2 rg0 B0 rg1 B1 rg2 B2 all-reduce step",
                "ra0 F0 ra2 F2 B0 sg0 B2 sg2 all-reduce step",
                "ra1 F1 jf3 B1 sg1 jb3 all-reduce step",
            ],
        ),
        (
            "zero-bubble",
            [
                "F0 sa0 F1 sa1 F2 sa2 rg0 I0 W0 rg1 I1 W1 rg2 I2 W2 all-reduce step",
                "ra0 F0 I0 sg0 ra2 F2 I2 sg2 W0 W2 all-reduce step",
                "ra1 F1 I1 sg1 jf3 jb3 W1 all-reduce step",
            ],
        ),
    ],
)
def test_a_replica_joins_where_it_has_no_microbatch_left(schedule, expected):
    assert texts(plan([1, 2], 3, schedule)) == expected


def test_without_split_experts_none_joins():
    assert texts(plan([1, 2], 3, split=()))[2] == "ra1 F1 B1 sg1 all-reduce step"


def test_replicas_that_join_shard_the_update_too():
    assert texts(plan([1, 2], 3, zero=1))[1:] == [
        "ra0 F0 B0 sg0 ra2 F2 B2 sg2 all-reduce step all-gather",
        "ra1 F1 B1 sg1 jf3 jb3 all-reduce step all-gather",
    ]


def test_all_but_one_join_a_minibatch_of_one_microbatch():
    assert texts(plan([3], 9), 1) == ["F0 B0 all-reduce step"] + [
        f"jf{replica} jb{replica} all-reduce step" for replica in (1, 2)
    ]


def test_neither_side_of_a_cut_sends_for_a_join():
    """Only the second stage joins, so the first sends three microbatches, and receives as many gradients."""
    assert texts(plan([2, 2], 3)) == [
        "F0 sa0 F2 sa2 rg0 B0 rg2 B2 all-reduce step",
        "F1 sa1 jf3 rg1 B1 jb3 all-reduce step",
        "ra0 F0 B0 sg0 ra2 F2 B2 sg2 all-reduce step",
        "ra1 F1 B1 sg1 jf3 jb3 all-reduce step",
    ]


@pytest.mark.parametrize(
    "made, expected",
    [
        (plan([1, 2], 3), ["F0 sa0 F1 sa1 F2 sa2", "ra0 F0 ra2 F2", "ra1 F1 jf3"]),
        (plan([1, 2], 3, split=()), ["F0 sa0 F1 sa1 F2 sa2", "ra0 F0 ra2 F2", "ra1 F1"]),
        (plan([2, 3], 1, "gpipe"), ["F0 sa0", "jf1", "ra0 F0", "jf1", "jf2"]),
    ],
)
def test_in_an_evaluation_they_join_forwards_only(made, expected):
    assert list(map(text, forward_programs(made, made.num_microbatches).values())) == expected


def test_a_join_stands_for_both_halves_of_a_backward():
    program = helpers.parse("F1 F3.2 I1 I3.2 W1 W3.2 all-reduce step")
    assert text(add_joins(program, 3)) == "F1 jf3.2 I1 jb3.2 W1 all-reduce step"


def test_a_join_can_be_read_back():
    assert (parse("jf3"), parse("jb12.1")) == (JoinForward(3), JoinBackward(12, 1))
    assert JoinForward(3) != JoinBackward(3)


@pytest.mark.parametrize(
    "replicas, split, wanted, expected",
    [
        ([1, 1, 1, 1], (), 1, (1, 1, 1, 1)),
        ([1, 2], (1,), 1, (2, 1)),  # a whole round must pass
        ([1, 4], (1,), 2, (4, 1)),
        ([1, 1, 4], (2,), 1, (4, 4, 1)),
        ([2, 4, 3], (1,), 1, (2, 1, 1)),
        ([2, 4, 3], (2,), 1, (2, 1, 1)),
        ([1, 2], (1,), 7, (7, 1)),
    ],
)
def test_a_whole_round_passes_whatever_is_wanted(replicas, split, wanted, expected):
    made = plan(replicas, 16, "zero-bubble", split, in_flight=wanted)
    assert until_backward(made, 16) == expected
    validate(made, programs(made))


REPLICAS = ([2], [4], [1, 2], [2, 2], [3, 2], [1, 2, 1], [2, 4, 3], [1, 1, 4], [4, 1, 2])
LIMITS = [{"in_flight": held, "weight_lag": lag} for held in (1, 2, 3, 7) for lag in (None, 5)]
ORDERS = [("1f1b", {}), ("gpipe", {}), *(("zero-bubble", limits) for limits in ({}, *LIMITS))]
SIZES = ((1, 1), (2, 1), (3, 2), (5, 3), (8, 5), (13, 12))  # of full minibatches and of short ones


def splits(replicas):
    """Any stages with replicas, but not none."""
    for chosen in product((False, True), repeat=len(replicas)):
        split = [s for s, is_chosen in enumerate(chosen) if is_chosen]
        if split and all(replicas[s] > 1 for s in split):
            yield split


@pytest.mark.parametrize("replicas, order, zero", thinned(REPLICAS, ORDERS, (0, 1)))
def test_all_programs_keep_the_rules(replicas, order, zero):
    schedule, options = order
    for split, (size, short) in product(splits(replicas), SIZES):
        made = plan(replicas, size, schedule, split, zero, **options)
        validate_plan(made)
        validate(made, programs(made, short), short, synchronous_sends=schedule == "gpipe")


@pytest.mark.parametrize("replicas", REPLICAS, ids=str)
def test_evaluations_run_together_and_end(replicas):
    for split, count in product(splits(replicas), (1, 2, 3, 5, 8, 13)):
        made = plan(replicas, count, split=split)
        ran = forward_programs(made, count)
        module._check_together(made, ran)
        module._check_progress(made, ran, synchronous=False)


@pytest.mark.parametrize("replicas", REPLICAS, ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
def test_a_join_has_the_number_that_its_replica_would_have_next(schedule, replicas):
    for count in range(1, 10):
        made = plan(replicas, count, schedule)
        for rank, program in programs(made).items():
            stage, replica, _ = made.place(rank)
            rounds = -(-count // replicas[stage])
            next_ones = set(range(replica, rounds * replicas[stage], replicas[stage])) - set(range(count))
            for kind in (JoinForward, JoinBackward):
                joined = [each.microbatch for each in program if isinstance(each, kind)]
                assert joined == sorted(next_ones if replicas[stage] > 1 else ())


# What is tampered with


FOUR = plan([2], 4, "gpipe")
THREE = plan([1, 2], 3)
TOGETHER = "its passes must be those of rank {}, with which it runs together: {} stands where {} should"


def rejection(made: Plan, rank: int, good: str, bad: str) -> str:
    """What is wrong with the programs where a part of one is replaced, and nothing before."""
    ran = programs(made)
    line = text(ran[rank])
    assert line.count(good) == 1
    validate(made, ran)
    with pytest.raises(InvalidProgram) as raised:
        validate(made, {**ran, rank: helpers.parse(line.replace(good, bad))})
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    "made, rank, good, bad, first, stands, should",
    [
        (FOUR, 1, "F1 F3 B1 B3", "F1 B1 F3 B3", 0, "the backward of round 0", "the forward of round 1"),
        (FOUR, 1, "F1 F3 B1 B3", "F3 F1 B1 B3", 0, "the forward of round 1", "the forward of round 0"),
        (FOUR, 1, "B1 B3", "B3 B1", 0, "the backward of round 1", "the backward of round 0"),
        (FOUR, 0, "F0 F2", "F2 F0", 0, "the forward of round 0", "the forward of round 1"),
        (FOUR, 1, " B3", "", 0, "nothing", "the backward of round 1"),
        (THREE, 2, " jf3 jb3", "", 1, "nothing", "the forward of round 1"),
        (THREE, 2, " jb3", "", 1, "nothing", "the backward of round 1"),
        (THREE, 2, "jf3 jb3", "jb3 jf3", 1, "the backward of round 1", "the forward of round 1"),
        (THREE, 2, "jb3", "jb3 jf5 jb5", 1, "the forward of round 2", "nothing"),
        (THREE, 1, "ra2 F2 B2 sg2 ", "", 1, "the forward of round 1", "nothing"),
        (
            plan([1, 2], 3, "zero-bubble"),
            1,
            "I0 sg0 ra2 F2",
            "ra2 F2 I0 sg0",
            1,
            "the backward of round 0",
            "the forward of round 1",
        ),
    ],
)
def test_passes_in_another_order_than_the_first_replicas(made, rank, good, bad, first, stands, should):
    told = rejection(made, rank, good, bad)
    assert told.endswith(TOGETHER.format(first, stands, should))


def test_weights_halves_exchange_nothing_and_may_be_in_another_order():
    made = plan([1, 2], 3, "zero-bubble")
    ran = programs(made)
    late = text(ran[2]).replace("I1 sg1 jf3 jb3 W1", "I1 sg1 W1 jf3 jb3")
    validate(made, {**ran, 2: helpers.parse(late)})


@pytest.mark.parametrize(
    "made, rank, good, bad, told",
    [
        (
            plan([1, 2], 3, split=()),
            2,
            "B1 sg1",
            "B1 sg1 jf3 jb3",
            "rank 2 (stage 1), instruction 4, jf3: the stage's replicas do not run together",
        ),
        (
            THREE,
            0,
            "F0 sa0",
            "F0 sa0 jf3 jb3",
            "rank 0 (stage 0), instruction 2, jf3: the stage's replicas do not run together",
        ),
        (
            FOUR,
            1,
            "F1 F3 B1 B3",
            "F1 jf3 B1 jb3",
            "rank 1 (stage 0), instruction 1, jf3: the microbatch has a pass of its own",
        ),
        (
            THREE,
            2,
            "ra1 F1 B1 sg1",
            "jf1 jb1",
            "rank 2 (stage 1), instruction 0, jf1: the microbatch has a pass of its own",
        ),
        (
            plan([4], 5),
            3,
            "jf7 jb7",
            "jf6 jb6",
            "rank 3 (stage 0), instruction 2, jf6: the microbatch would belong to another rank",
        ),
    ],
)
def test_joins_that_stand_for_nothing(made, rank, good, bad, told):
    assert rejection(made, rank, good, bad) == told


def test_with_too_few_in_flight_before_them_no_replica_can_begin():
    """The first stage waits for a gradient, and the second's replicas wait for a whole round."""
    made = plan([1, 2], 4)
    hungry = {
        0: helpers.parse("F0 sa0 rg0 B0 F1 sa1 rg1 B1 F2 sa2 rg2 B2 F3 sa3 rg3 B3 all-reduce step"),
        1: helpers.parse("ra0 F0 B0 sg0 ra2 F2 B2 sg2 all-reduce step"),
        2: helpers.parse("ra1 F1 B1 sg1 ra3 F3 B3 sg3 all-reduce step"),
    }
    whole = plan([1, 2], 4, split=())
    validate(whole, hungry)
    with pytest.raises(InvalidProgram) as raised:
        validate(made, hungry)
    assert str(raised.value) == (
        "nothing can advance: rank 0 (stage 0) waits at instruction 2, rg0; rank 1 (stage 1) waits at "
        "instruction 1, F0; rank 2 (stage 1) waits at instruction 0, ra1"
    )
