"""Cuts into pairs of stages from both ends, beside all cuts there are."""

import itertools
import random

import numpy as np
import pytest

from hybridpipe.planning.search import fold
from hybridpipe.planning.search.fold import folded_edges


def slowest(done, speeds, share, edges):
    """The slowest group's time, or that of a group of which a stage would take more than its share."""
    work = np.diff(done[list(edges)])
    pairs = zip(work, work[::-1], speeds, strict=False)
    return max(max(a + b, a / share, b / share) / speed for a, b, speed in pairs)


def test_hardly_any_cuts_are_better():
    """Of 150 chains few have better cuts, and none has cuts that are much better."""
    draw = random.Random(0)
    beaten = 0
    for _ in range(150):
        speeds = [draw.choice((1.0, 1.0, 0.7)) for _ in range(draw.choice((2, 3)))]
        num_layers, share = draw.randint(2 * len(speeds), 11), draw.choice((0.6, 0.75))
        done = np.cumsum([0.0, *(draw.randint(1, 19) / 2 for _ in range(num_layers))])
        inner = itertools.combinations(range(1, num_layers), 2 * len(speeds) - 1)
        best = min(slowest(done, speeds, share, (0, *cuts, num_layers)) for cuts in inner)
        edges = folded_edges(done, speeds, share)
        found = slowest(done, speeds, share, edges)
        assert edges[0] == 0 and edges[-1] == num_layers and len(edges) == 2 * len(speeds) + 1
        assert best * (1 - 1e-9) <= found <= 1.3 * best
        beaten += found > best * (1 + 1e-6)
    assert beaten <= 4


def test_stages_of_one_and_of_two_layers_make_equal_pairs():
    edges = folded_edges(np.arange(25.0), [1.0] * 8, share=0.75)
    assert sorted(np.diff(edges)) == [1] * 8 + [2] * 8
    assert set(np.diff(edges) + np.diff(edges)[::-1]) == {3}


@pytest.mark.parametrize("num_layers", [3, 100])
def test_too_few_or_too_many_layers_have_no_cuts(num_layers, monkeypatch):
    monkeypatch.setattr(fold, "MAX_CELLS", 10_000)
    assert folded_edges(np.arange(num_layers + 1.0), [1.0, 1.0], share=0.6) is None
