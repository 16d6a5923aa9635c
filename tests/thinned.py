"""Cross products of parameters: the cases that always run, and the rest, which campaigns run (-m campaign).

What is tested is not known here.
Invariant: the cases that always run show every combination of `together` values of different parameters.
"""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def thinned(*parameters: Sequence[Any], together: int = 2) -> list[Any]:
    """Return the product for `pytest.mark.parametrize`; what adds no combination has the mark `campaign`."""
    cases = list(product(*(range(len(values)) for values in parameters)))
    shows = {case: set(combinations(enumerate(case), together)) for case in cases}
    missing, kept = set().union(*shows.values()), set()
    while missing:
        best = max(cases, key=lambda case: len(shows[case] & missing))
        kept.add(best)
        missing -= shows[best]
    return [
        pytest.param(*(values[i] for values, i in zip(parameters, case)), marks=_mark(case in kept))
        for case in cases
    ]


def rare(*values: Any) -> Any:
    """Return a case that only campaigns run."""
    return pytest.param(*values, marks=pytest.mark.campaign)


def _mark(kept: bool) -> list[pytest.MarkDecorator]:
    return [] if kept else [pytest.mark.campaign]
