"""Neighbouring replicas that normalise together run every pass together; one without a microbatch joins."""

from itertools import product

import pytest

from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.schedules.generators import programs, until_backward
from hybridpipe.planning.schedules.instructions import text
from hybridpipe.planning.schedules.validate import InvalidProgram, validate, validate_plan
from tests.planning import helpers
from tests.planning.helpers import forward_programs
from tests.thinned import thinned


def plan(replicas, together, num_microbatches, schedule="1f1b", zero=0, **options) -> Plan:
    """One layer a stage; `together` is each stage's `sync_batchnorm`."""
    stages = (
        StageSpec(s, s + 1, count, zero=zero, sync_batchnorm=k)
        for s, (count, k) in enumerate(zip(replicas, together, strict=True))
    )
    return Plan(tuple(stages), schedule, num_microbatches, **options)


def texts(made: Plan, count: int | None = None) -> list[str]:
    return [text(program) for program in programs(made, count).values()]


def test_only_neighbours_of_a_microbatch_join():
    """Of 6 replicas in pairs, five microbatches leave one without, beside the pair that has none at all."""
    assert texts(plan([6], [2], 11), 5) == [
        "F0 B0 all-reduce step",
        "F1 B1 all-reduce step",
        "F2 B2 all-reduce step",
        "F3 B3 all-reduce step",
        "F4 B4 all-reduce step",
        "jf5 jb5 all-reduce step",
    ]
    assert texts(plan([6], [2], 11), 3)[2:] == [
        "F2 B2 all-reduce step",
        "jf3 jb3 all-reduce step",
        "all-reduce step",
        "all-reduce step",
    ]


def test_a_cut_carries_nothing_for_a_join():
    assert texts(plan([1, 2], [1, 2], 3)) == [
        "F0 sa0 F1 sa1 F2 sa2 rg0 B0 rg1 B1 rg2 B2 all-reduce step",
        "ra0 F0 B0 sg0 ra2 F2 B2 sg2 all-reduce step",
        "ra1 F1 B1 sg1 jf3 jb3 all-reduce step",
    ]


def test_in_an_evaluation_the_same_replica_joins():
    ran = forward_programs(plan([4], [2], 5), 5)
    assert list(map(text, ran.values())) == ["F0 F4", "F1 jf5", "F2", "F3"]


@pytest.mark.parametrize(
    "replicas, together, wanted, expected",
    [
        ([1, 2], [1, 2], 1, (2, 1)),
        ([1, 4], [1, 2], 1, (2, 1)),  # two must pass, not the whole round
        ([1, 4], [1, 4], 1, (4, 1)),
        ([1, 4], [1, 1], 1, (1, 1)),
        ([2, 4, 2], [2, 2, 1], 1, (2, 1, 1)),
        ([1, 1, 4], [1, 1, 2], 1, (2, 2, 1)),
    ],
)
def test_as_many_pass_as_run_together_whatever_is_wanted(replicas, together, wanted, expected):
    made = plan(replicas, together, 16, "zero-bubble", in_flight=wanted)
    assert until_backward(made, 16) == expected
    validate(made, programs(made))


REPLICAS = ([2], [4], [6], [1, 2], [2, 1], [1, 4], [4, 2], [3, 4], [2, 4, 3], [1, 1, 6], [4, 1, 2], [6, 4, 1])
LIMITS = [{"in_flight": held, "weight_lag": lag} for held in (1, 2, 3, 7) for lag in (None, 5)]
ORDERS = [("1f1b", {}), ("gpipe", {}), *(("zero-bubble", limits) for limits in ({}, *LIMITS))]
SIZES = ((1, 1), (2, 1), (3, 2), (5, 3), (8, 5), (13, 12))  # of full minibatches and of short ones


def divisors(count: int) -> list[int]:
    return [k for k in range(1, count + 1) if count % k == 0]


@pytest.mark.parametrize("replicas, order, zero", thinned(REPLICAS, ORDERS, (0, 1)))
def test_all_programs_keep_the_rules(replicas, order, zero):
    schedule, options = order
    for together, (size, short) in product(product(*map(divisors, replicas)), SIZES):
        made = plan(replicas, together, size, schedule, zero, **options)
        validate_plan(made)
        validate(made, programs(made, short), short, synchronous_sends=schedule == "gpipe")


FOUR = plan([4], [2], 8, "gpipe")


@pytest.mark.parametrize(
    "rank, good, bad, told",
    [
        (
            3,
            "F3 F7 B3 B7",
            "F3 B3 F7 B7",
            "rank 3 (stage 0): its passes must be those of rank 2, with which it runs together: the backward "
            "of round 0 stands where the forward of round 1 should",
        ),
        (
            1,
            " B5",
            "",
            "rank 1 (stage 0): its passes must be those of rank 0, with which it runs together: nothing "
            "stands where the backward of round 1 should",
        ),
    ],
)
def test_passes_in_another_order_than_the_first_of_the_group(rank, good, bad, told):
    ran = programs(FOUR)
    line = text(ran[rank])
    assert line.count(good) == 1
    with pytest.raises(InvalidProgram) as raised:
        validate(FOUR, {**ran, rank: helpers.parse(line.replace(good, bad))})
    assert str(raised.value) == told


def test_groups_of_a_stage_need_not_have_one_order():
    ran = programs(FOUR)
    for rank in (2, 3):
        m = rank + 4
        ran[rank] = helpers.parse(f"F{rank} B{rank} F{m} B{m} all-reduce step")
    validate(FOUR, ran)
