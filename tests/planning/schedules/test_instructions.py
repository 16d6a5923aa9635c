from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpipe.planning.schedules import instructions
from hybridpipe.planning.schedules.instructions import (
    AllGather,
    AllReduce,
    Backward,
    BackwardWeight,
    Forward,
    RankProgram,
    ReduceScatter,
    Step,
    add_communication,
    final_backwards,
    text,
    without_update,
)
from hybridpipe.planning.schedules.validate import OnMicrobatch
from tests.planning.helpers import parse

ON_MICROBATCH = get_args(OnMicrobatch)
INSTRUCTIONS = st.one_of(
    st.builds(AllReduce),
    st.builds(ReduceScatter),
    st.builds(Step),
    st.builds(AllGather),
    *(st.builds(kind, st.integers(0, 9999), st.integers(0, 9)) for kind in ON_MICROBATCH),
)


def test_text():
    program = [kind(3) for kind in ON_MICROBATCH] + [AllReduce(), Step()]
    assert text(program) == "F3 B3 I3 W3 ra3 sa3 rg3 sg3 all-reduce step"
    assert text([Forward(3, 1), BackwardWeight(12, 10)]) == "F3.1 W12.10"


@given(st.lists(INSTRUCTIONS))
def test_text_can_be_read_back(program):
    assert parse(text(program)) == tuple(program)


@pytest.mark.parametrize("word", ["", "F", "F1.2.3", "step1", "X3", "3", "all_reduce", "Fx"])
def test_a_word_that_names_no_instruction_is_refused(word):
    with pytest.raises(ValueError, match="instruction must be such as F3, sa0 or step, got"):
        instructions.parse(word)


def test_kinds_differ_even_on_the_same_microbatch():
    assert len({kind(3) for kind in ON_MICROBATCH}) == len(ON_MICROBATCH)
    assert Forward(3) != Forward(3, 1)
    assert Forward(3) != Backward(3) and AllReduce() != Step() and Forward(3) == Forward(3)


@pytest.mark.parametrize(
    "before, behind, program, expected",
    [
        ([0], [0], "F0 B0 all-reduce step", "F0 B0 all-reduce step"),
        ([0], [1], "F0 B0 all-reduce step", "F0 sa0 rg0 B0 all-reduce step"),
        ([1], [1], "F0 B0 all-reduce step", "ra0 F0 sa0 rg0 B0 sg0 all-reduce step"),
        ([1], [0], "F0 B0 all-reduce step", "ra0 F0 B0 sg0 all-reduce step"),
        ([1], [1], "F0 I0 W0", "ra0 F0 sa0 rg0 I0 sg0 W0"),
        ([0, 1], [1, 1], "F0 F0.1 B0.1 B0", "F0 sa0 ra0.1 F0.1 sa0.1 rg0.1 B0.1 sg0.1 rg0 B0"),
        ([1, 1], [1, 0], "F0 F0.1 B0.1 B0", "ra0 F0 sa0 ra0.1 F0.1 B0.1 sg0.1 rg0 B0 sg0"),
        ([1, 0], [0, 1], "F0 F0.1 B0.1 B0", "ra0 F0 F0.1 sa0.1 rg0.1 B0.1 B0 sg0"),  # the turn of a V
    ],
)
def test_communication_goes_where_a_neighbour_lies_on_another_rank(before, behind, program, expected):
    assert text(add_communication(parse(program), before, behind)) == expected


@pytest.mark.parametrize(
    "program, expected",
    [
        ("F0 B0 F1 B1 all-reduce step", {3}),
        ("F0 B0 all-reduce step B1 all-reduce step", {1, 4}),
        ("F0 F1 I0 I1 W0 W1 all-reduce step", {5}),
        ("B0.1 B1.1 B0 B1 all-reduce step", {1, 3}),
        ("B0 all-reduce B1 all-reduce all-reduce step all-gather", {0, 2}),
        ("B0 reduce-scatter step all-gather", {0}),
        ("all-reduce step B0", set()),  # nothing to reduce; no all-reduce behind
    ],
)
def test_gradients_are_final_in_the_last_backward_of_each_stage(program, expected):
    assert final_backwards(parse(program)) == expected


def test_a_program_is_in_parts_that_end_with_updates():
    stream = RankProgram(parse("F0 B0 all-reduce step F1 B1 all-reduce step F2 B2"))
    assert [part.range for part in stream.parts] == [range(4), range(4, 8), range(8, 10)]
    assert [part.num_minibatches for part in stream.parts] == [1, 1, 0]
    gathered = RankProgram(parse("F0 B0 reduce-scatter step all-gather F1"))
    assert [part.range for part in gathered.parts] == [range(5), range(5, 6)]
    whole = RankProgram(parse("F0 B0 all-reduce step"))
    assert [part.range for part in whole.parts] == [range(4)] and RankProgram(()).parts == ()


@pytest.mark.parametrize("update", ["all-reduce step", "reduce-scatter step all-gather"])
def test_without_an_update_gradients_stay_whole(update):
    assert text(without_update(parse(f"F0 B0 F1 B1 {update}"))) == "F0 B0 F1 B1"
    assert text(without_update(parse(f"F0 B0 all-reduce F1 B1 {update}"))) == "F0 B0 F1 B1"
