import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridpipe.planning.instructions import (
    AllReduce,
    Backward,
    Forward,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    Step,
    add_communication,
    parse,
    text,
)

ON_MICROBATCH = (Forward, Backward, ReceiveActivation, SendActivation, ReceiveGradient, SendGradient)
INSTRUCTIONS = st.one_of(
    st.builds(AllReduce),
    st.builds(Step),
    *(st.builds(kind, st.integers(0, 9999)) for kind in ON_MICROBATCH),
)


def test_text():
    program = [kind(3) for kind in ON_MICROBATCH] + [AllReduce(), Step()]
    assert text(program) == "F3 B3 ra3 sa3 rg3 sg3 all-reduce step"


@given(st.lists(INSTRUCTIONS))
def test_text_is_a_file_format(program):
    assert parse(text(program)) == tuple(program)


def test_kinds_differ_even_on_the_same_microbatch():
    assert len({kind(3) for kind in ON_MICROBATCH}) == len(ON_MICROBATCH)
    assert Forward(3) != Backward(3) and AllReduce() != Step() and Forward(3) == Forward(3)


@pytest.mark.parametrize("word", ["X3", "F", "F-1", "F1.5", "f3", "Step", "all-reduce3", "ra"])
def test_an_unknown_word_is_named_with_those_allowed(word):
    message = (
        f"unknown instruction '{word}'; allowed: F<n>, B<n>, ra<n>, sa<n>, rg<n>, sg<n>, all-reduce, step"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse(f"F0 {word} B0")


@pytest.mark.parametrize(
    "stage, num_stages, expected",
    [
        (0, 1, "F0 B0 all-reduce step"),
        (0, 3, "F0 sa0 rg0 B0 all-reduce step"),
        (1, 3, "ra0 F0 sa0 rg0 B0 sg0 all-reduce step"),
        (2, 3, "ra0 F0 B0 sg0 all-reduce step"),
    ],
)
def test_communication_goes_where_there_is_a_neighbour(stage, num_stages, expected):
    assert text(add_communication(parse("F0 B0 all-reduce step"), stage, num_stages)) == expected
