import pytest

from hybridpipe.report.words import counted, few, ranges, rounded


@pytest.mark.parametrize(
    "numbers, text",
    [([], ""), ([3], "3"), ([8, 1, 0, 2], "0-2,8"), ([*range(0, 20, 2)], "0,2,4,6,8,10,12,..,18")],
)
def test_sets_of_numbers_are_ranges(numbers, text):
    assert ranges(numbers) == text


def test_long_lists_are_cut():
    assert few([*"abcdefgh"], " ") == "a b c d e f g h" and few([*"abcdefghij"], " ") == "a b c d e f g .. j"


@pytest.mark.parametrize("number, text", [(0, "0 ranks"), (1, "1 rank"), (1234, "1,234 ranks")])
def test_things_are_counted(number, text):
    assert counted(number, "rank") == text
    assert counted(2, "minibatch", "minibatches") == "2 minibatches"


@pytest.mark.parametrize(
    "value, text",
    [
        (0.97221, "0.9722"),
        (12.5, "12.5000"),
        (0.0000123456, "1.235e-05"),
        (-0.004, "-0.004"),
        (0.0, "0.0000"),
    ],
)
def test_figures_have_four_decimals_or_digits(value, text):
    assert rounded(value) == text
