"""Every program that is generated keeps the rules, and one that is tampered with does not."""

import itertools
import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpipe.planning.plan import PassTimes, Plan, StageSpec, Variant
from hybridpipe.planning.schedules import generators
from hybridpipe.planning.schedules import validate as module
from hybridpipe.planning.schedules.generators import programs
from hybridpipe.planning.schedules.instructions import (
    AllGather,
    AllReduce,
    Backward,
    BackwardWeight,
    Reduction,
    Step,
)
from hybridpipe.planning.schedules.registry import SCHEDULES, SYNCHRONOUS, TRAITS
from hybridpipe.planning.schedules.validate import InvalidProgram, validate, validate_plan
from tests.planning.helpers import parse, plan


@st.composite
def cases(draw):
    """A plan under any schedule, and for how many microbatches its programs are."""
    schedule = draw(st.sampled_from(SCHEDULES))
    traits = TRAITS[schedule]
    size = 1 if traits.whole_minibatch else draw(st.integers(1, 20))
    count = draw(st.integers(1, size) if schedule in SYNCHRONOUS else st.integers(1, 60))
    if traits.interleaves:
        replicas = [draw(st.integers(1, 4))] * draw(st.integers(2, 5))
        zero = draw(st.integers(0, traits.most_zero))
        chunks = 2 if traits.placement == "v" else draw(st.integers(2, 3))
        each = st.builds(PassTimes, *[st.integers(0, 9)] * 4)
        times = draw(st.lists(each, min_size=chunks * len(replicas), max_size=chunks * len(replicas)))
        options = {"pass_times": times} if traits.takes_pass_times and draw(st.booleans()) else {}
        return plan(replicas, size, schedule, chunks=chunks, zero=zero, **options), count
    replicas = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    options = {}
    if traits.takes_max_in_flight:
        options["max_in_flight"] = draw(st.none() | st.integers(1, 6))
    if traits.splits_backward:
        options["in_flight"] = draw(st.none() | st.integers(1, 12))
        options["weight_lag"] = draw(st.none() | st.integers(0, 12))
    if traits.versions == "stashed":
        options["vertical_sync"] = draw(st.booleans())
    made = plan(replicas, size, schedule, **options)
    limited = made.max_in_flight is not None or made.in_flight is not None
    most = min(traits.most_zero, 1 if limited else 2)
    zeros = [Variant(), *(Variant(zero=zero, scatter=zero == 1) for zero in range(1, most + 1))]
    return made.running([draw(st.sampled_from(zeros)) for _ in replicas]), count


def check(made, count):
    validate_plan(made)
    validate(made, programs(made, count), count, synchronous_sends=made.schedule == "gpipe")


# What is generated


@given(cases())
@settings(deadline=None, derandomize=True, max_examples=300)
def test_what_is_generated_keeps_the_rules(case):
    check(*case)


def grid():
    """Up to three stages of any replicas, each schedule, short and long."""
    interleaved = [schedule for schedule in SCHEDULES if TRAITS[schedule].interleaves]
    few_stages = itertools.chain.from_iterable(
        itertools.product(range(1, 4), repeat=stages) for stages in (1, 2, 3)
    )
    for replicas, schedule in itertools.product(few_stages, sorted({*SCHEDULES} - {*interleaved})):
        traits = TRAITS[schedule]
        if schedule in SYNCHRONOUS:
            sizes, limited = ((1, 1), (3, 2), (5, 5), (8, 8)), (9, 9)
        elif traits.whole_minibatch:
            sizes, limited = ((1, 2), (1, 13)), (1, 14)
        else:
            sizes, limited = ((1, 7), (2, 9), (3, 12), (5, 17)), (3, 14)
        stashes = traits.versions == "stashed"
        for (size, count), synced in itertools.product(sizes, (False, True) if stashes else (False,)):
            yield plan(replicas, size, schedule, vertical_sync=synced), count
        for limit in (1, 2, 3) if traits.takes_max_in_flight else ():
            synced = stashes and limit == 2
            yield plan(replicas, limited[0], schedule, max_in_flight=limit, vertical_sync=synced), limited[1]
        if traits.most_zero == 2:
            yield plan(replicas, limited[0], schedule, zero=2), limited[1]
        for ahead, late in itertools.product((1, 4, 7), (0, 3, 20)) if traits.splits_backward else ():
            yield plan(replicas, 9, schedule, in_flight=ahead, weight_lag=late), 7
    shapes = itertools.product((2, 3, 5), (1, 2, 3), (2, 3), (1, 4, 6, 15), interleaved)
    for groups, replicas, chunks, count, schedule in shapes:
        if TRAITS[schedule].placement == "loop" or chunks == 2:
            yield plan([replicas] * groups, 15, schedule, chunks=chunks), count


def test_a_grid_of_small_plans_keeps_the_rules():
    for case in grid():
        check(*case)


@pytest.mark.parametrize(
    "made, count",
    [
        (plan([1, 3, 1, 2, 3], 2, "pipedream-2bw", max_in_flight=5), 34),
        (plan([1, 4, 1], 1, "pipedream", max_in_flight=2), 20),
        (plan([1, 4, 2, 1], 16, "1f1b", max_in_flight=2), 16),
        (plan([4, 1, 1, 1], 1, "pipedream", max_in_flight=1), 20),
        (plan([4] * 4, 16, "interleaved-1f1b", chunks=2), 13),
    ],
)
def test_what_once_waited_for_ever_or_stashed_too_much(made, count):
    check(made, count)


# What is tampered with


@st.composite
def tampered(draw):
    """A case, and its programs with one instruction left out, doubled or of another microbatch."""
    made, count = draw(cases())
    ran = programs(made, count)
    rank = draw(st.sampled_from(sorted(ran)))
    alone = made.replicas[made.place(rank).stage] == 1  # then there is nothing to reduce
    program = [each for each in ran[rank] if not (alone and isinstance(each, AllReduce))]
    i = draw(st.integers(0, len(program) - 1))
    bad = program.copy()
    what = draw(st.sampled_from(("left out", "doubled", "of another microbatch")))
    if what == "doubled":
        bad.insert(draw(st.integers(0, len(program))), program[i])
    elif what == "left out" or isinstance(program[i], Reduction | Step | AllGather):
        del bad[i]
    else:
        bad[i] = type(program[i])(program[i].microbatch + draw(st.integers(1, 3)), program[i].chunk)
    return made, count, {**ran, rank: tuple(program)}, {**ran, rank: tuple(bad)}


@given(tampered())
@settings(deadline=None, derandomize=True, max_examples=300)
def test_an_instruction_too_few_or_too_many_is_found(case):
    made, count, good, bad = case
    validate(made, good, count)
    with pytest.raises(InvalidProgram):
        validate(made, bad, count)


NEEDED_BY = {("ra", "F"), ("rg", "B"), ("rg", "I"), ("I", "W")} | {
    ("F", "B"), ("F", "I"), ("F", "sa"), ("B", "sg"), ("I", "sg")
}  # fmt: skip


@given(cases(), st.randoms(use_true_random=False))
@settings(deadline=None, derandomize=True, max_examples=200)
def test_what_depends_on_each_other_cannot_be_swapped(case, draw: random.Random):
    """A forward and its backward, a receive and what it is for, a backward and its update."""
    made, count = case
    ran = programs(made, count)
    rank = draw.choice(sorted(ran))
    program = list(ran[rank])
    pairs = list(dependent(program))
    if not pairs:
        return  # a replica without a microbatch
    i, j = draw.choice(pairs)
    program[i], program[j] = program[j], program[i]
    with pytest.raises(InvalidProgram):
        validate(made, {**ran, rank: tuple(program)}, count)


def dependent(program):
    """Where two instructions stand of which the second needs the first."""
    of_microbatch = defaultdict(list)
    backwards = []
    for j, second in enumerate(program):
        if isinstance(second, Step):
            yield from ((i, j) for i in backwards)
        elif not isinstance(second, Reduction | AllGather):
            before = of_microbatch[second.microbatch, second.chunk]
            yield from ((i, j) for i, first in before if (first, second.symbol) in NEEDED_BY)
            before.append((j, second.symbol))
            if isinstance(second, Backward | BackwardWeight):
                backwards.append(j)


# By hand


PAIR = ["F0 sa0 F1 sa1 rg0 B0 rg1 B1 all-reduce step", "ra0 F0 B0 sg0 ra1 F1 B1 sg1 all-reduce step"]


@pytest.mark.parametrize(
    "first, second, told",
    [
        ("F0 sa0 rg0 B0 F1 sa1 rg1 B1", "", "end of the program: there must be 1 updates, got 0"),
        ("F0 sa0 sa1", "", "instruction 2, sa1: F1 must come before it"),
        ("F0 F0", "", "instruction 1, F0: it stands there twice"),
        ("F2", "", "instruction 0, F2: there are 2 microbatches"),
        ("F0.1", "", "instruction 0, F0.1: the rank holds 1 stages"),
        ("ra0", "", "instruction 0, ra0: stage 0 has no neighbour there"),
        ("F0 sa0 B0", "", "instruction 2, B0: rg0 must come before it"),
        ("F0 rg0 B0 I0", "", "instruction 3, I0: the backward must be done either whole or in halves"),
        ("F0 W0", "", "instruction 1, W0: I0 must come before it"),
        ("F0 rg0 B0 step", "", "instruction 3, step: 2 backwards belong to update 0, got 1 before it"),
        (f"{PAIR[0]} step", "", "instruction 10, step: there must be 1 updates"),
        (PAIR[0].replace("sa1 ", ""), "", "end of the program: sa1 is missing"),
        (PAIR[0].replace(" B1", ""), "", "belong to update 0, got 1 before it"),
        (PAIR[0], PAIR[1].replace(" sg0", ""), "rank 1 (stage 1), end of the program: sg0 is missing"),
        (
            PAIR[0].replace(" step", " all-reduce step"),
            "",
            "instruction 9, all-reduce: there must be one all-reduce an update",
        ),
        (
            PAIR[0],
            "ra0 F0 ra1 F1 B1 sg1 B0 sg0 all-reduce step",
            "rank 1 (stage 1), instruction 3, F1: at most 1 microbatches may be stashed, this is one more",
        ),
        (
            "F0 sa0 rg0 F1 sa1 B0 rg1 B1 all-reduce step",
            "ra1 F1 B1 sg1 ra0 F0 B0 sg0 all-reduce step",
            "nothing can advance: rank 0 (stage 0) waits at instruction 2, rg0; "
            "rank 1 (stage 1) waits at instruction 0, ra1",
        ),
    ],
)
def test_the_rank_the_instruction_and_the_rule_are_named(first, second, told):
    with pytest.raises(InvalidProgram) as raised:
        validate(plan([1, 1], 2), {0: parse(first), 1: parse(second or PAIR[1])})
    assert told in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "made, count, rank, good, bad, told",
    [
        # Two replicas: a round each
        (plan([2], 1, "pipedream"), 4, 0, "F0 B0 all-reduce", "F0 B0", "an all-reduce must come before"),
        (plan([2], 1, "pipedream"), 4, 0, "F0 B0", "F2 B2", "it uses version 1, and 0 updates are"),
        (plan([2], 1, "pipedream"), 4, 0, "F0 B0", "F1 B1", "the microbatch belongs to rank 1"),
        (plan([1, 1], 1, "pipedream"), 4, 1, "step ra1 F1 B1", "ra1 F1 step B1", "it uses version 1, "),
        (
            plan([1, 1], 1, "pipedream"),
            4,
            0,
            "F1 sa1 rg0 B0 step",
            "rg0 B0 step F1 sa1",
            "the newest version",
        ),
        # Minibatch 2 of 2BW waits for the update of minibatch 0
        (
            plan([1], 1, "pipedream-2bw"),
            4,
            0,
            "F0 B0 F1 all-reduce step B1 F2 ",
            "F0 B0 F1 B1 F2 all-reduce step ",
            "B1: it belongs to update 1, and 0 updates are before it",
        ),
    ],
)
def test_updates_and_versions(made, count, rank, good, bad, told):
    ran = programs(made, count)
    line = " ".join(map(str, ran[rank]))
    assert good in line
    validate(made, ran, count)
    with pytest.raises(InvalidProgram, match=told):
        validate(made, {**ran, rank: parse(line.replace(good, bad, 1))}, count)


SHARED_OUT = "F0 B0 reduce-scatter F2 B2 reduce-scatter step all-gather"


@pytest.mark.parametrize(
    "bad, told",
    [
        (
            SHARED_OUT.replace("reduce-scatter", "all-reduce"),
            "2, all-reduce: the stage's reduction is reduce-",
        ),
        ("F0 reduce-scatter", "1, reduce-scatter: a backward must come before it"),
        (f"{SHARED_OUT.removesuffix(' step all-gather')} reduce-scatter", "must be 2 reductions an update"),
        ("F0 B0 F2 B2 reduce-scatter step", "3, B2: the gradients before it must be reduced first"),
        ("F0 B0 reduce-scatter all-gather", "3, all-gather: an update of shares must come before it"),
        (f"{SHARED_OUT} all-gather", "all-gather: an update of shares must come before it"),
        (SHARED_OUT.removesuffix(" all-gather"), "the updated weights must be gathered"),
    ],
)
def test_replicas_that_shard_the_update_reduce_after_each_backward(bad, told):
    made = plan([2], 3).running([Variant(zero=2, scatter=True)])
    ran = programs(made)
    assert ran[0] == parse(SHARED_OUT)
    assert ran[1] == parse("F1 B1 reduce-scatter reduce-scatter step all-gather")
    with pytest.raises(InvalidProgram, match=told):
        validate(made, {**ran, 0: parse(bad)})


def test_a_backward_may_wait_for_the_gradients_of_its_round():
    """With one in flight in each, the first stage feeds the second's other replica only after a gradient."""
    made = plan([1, 2], 4)
    hungry = {
        0: parse("F0 sa0 rg0 B0 F1 sa1 rg1 B1 F2 sa2 rg2 B2 F3 sa3 rg3 B3 all-reduce step"),
        1: parse("ra0 F0 B0 sg0 all-reduce ra2 F2 B2 sg2 all-reduce step all-gather"),
        2: parse("ra1 F1 B1 sg1 all-reduce ra3 F3 B3 sg3 all-reduce step all-gather"),
    }
    shared = made.running([Variant(), Variant(zero=2)])
    validate(shared, programs(shared))
    with pytest.raises(
        InvalidProgram, match=r"can advance: rank 0 .* instruction 2, rg0; rank 1 .* 3, all-red"
    ):
        validate(shared, hungry)


def test_1f1b_relies_on_buffered_sends():
    made = plan([1, 1], 2)
    validate(made, programs(made))
    with pytest.raises(InvalidProgram, match=r"waits at instruction 3, sa1; .* waits at instruction 3, sg0$"):
        validate(made, programs(made), synchronous_sends=True)


def test_there_must_be_a_program_for_each_rank():
    with pytest.raises(InvalidProgram, match=r"^programs must be those of the ranks \[0, 1\], got \[0\]$"):
        validate(plan([1, 1], 2), {0: parse(PAIR[0])})


def test_halves_are_as_good_as_a_whole_backward():
    made = plan([1, 1], 2)
    halved = [line.replace("B1", "I1").replace(" all-reduce", " W1 all-reduce") for line in PAIR]
    validate(made, dict(enumerate(map(parse, halved))))


def test_a_plan_whose_programs_break_a_rule_is_refused(monkeypatch):
    """Whoever adds a schedule hears of its fault before training."""
    forwards = generators.GENERATORS["gpipe"]
    without_step = {"gpipe": lambda rank: itertools.islice(forwards(rank), 2 * len(rank.microbatches))}
    monkeypatch.setattr(generators, "GENERATORS", generators.GENERATORS | without_step)
    with pytest.raises(InvalidProgram, match="there must be 1 updates, got 0"):
        validate_plan(plan([1, 1], 4, "gpipe"))


@pytest.mark.parametrize(
    "replicas, num_microbatches, schedule, checked",
    [
        ([1, 1], 8, "1f1b", [8]),
        ([1, 1], 10_000, "1f1b", [2**13 // 12]),  # of each six instructions in two stages
        ([1] * 2000, 10_000, "1f1b", [1]),
        ([1] * 3000, 10_000, "1f1b", []),  # one alone has too many
        ([1, 1, 1], 1, "pipedream", [2 * 3]),  # as many as fill it, twice
        ([2, 1], 1, "pipedream", [2 * 2 * 2]),
        ([1, 1], 3, "pipedream-2bw", [6]),  # whole minibatches
        ([1, 1], 1300, "pipedream-2bw", [1300]),
        ([1, 1], 1400, "pipedream-2bw", []),
    ],
)
def test_a_plan_is_checked_by_a_part_of_its_minibatch(
    replicas, num_microbatches, schedule, checked, monkeypatch
):
    counts = []
    monkeypatch.setattr(module, "programs", lambda plan, count: counts.append(count))
    monkeypatch.setattr(module, "validate", lambda *_: None)
    validate_plan(plan(replicas, num_microbatches, schedule))
    assert counts == checked


def test_shards_run_the_program_of_their_replica():
    made = Plan((StageSpec(0, 1, 2, tensor=2), StageSpec(1, 2)), num_microbatches=4)
    ran = programs(made)
    assert ran[0] == ran[1] != ran[2] == ran[3]
    validate(made, ran)
    with pytest.raises(InvalidProgram, match="rank 1 must run the program of rank 0, whose shard it is"):
        validate(made, ran | {1: ran[1][:-1]})
