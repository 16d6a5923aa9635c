"""The table of mutants names what is there: a module that was renamed had no mutants any more."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = tomllib.loads((ROOT / "tests/campaigns/mutants.toml").read_text())


def bare(text: str) -> str:
    return re.sub(r"\s+#.*|\s", "", text)


@pytest.mark.parametrize("row", TABLE["row"], ids=lambda row: row["modules"])
def test_modules_have_their_tests(row):
    assert all(list(ROOT.glob(pattern)) for pattern in (row["modules"], *row["tests"])), row


def test_programs_that_are_the_same_begin_with_a_line_of_today():
    gone = {
        each["was"]
        for each in TABLE["equivalent"]
        if bare(each["was"]) not in map(bare, (ROOT / each["module"]).read_text().splitlines())
    }
    assert gone == set()
