import itertools
import random

import numpy as np
import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.cost import links
from hybridpipe.planning.cost.formula import cut_figures
from hybridpipe.planning.cost.links import cut_figures_of
from hybridpipe.planning.search.placement import dealt


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("asynchronous", [False, True])
def test_counted_routes_are_those_of_the_definition(seed, asynchronous, monkeypatch):
    draw = random.Random(seed)
    monkeypatch.setattr(links, "CHUNK", 500)
    sizes = [[12], [4, 12], [2, 4, 24], [1, 3, 6, 24]][seed % 4]
    levels = [
        Level(str(n), n, draw.choice([1.0, 2.0, 4.0]), draw.random(), draw.choice([None, 0.3, 3.0]))
        for n in sizes
    ]
    cluster = Cluster(tuple(levels))
    ranks = [np.array(dealt(cluster, draw.sample(range(sizes[-1]), draw.randint(1, 8)))) for _ in range(25)]
    pairs = np.array(list(itertools.permutations(range(25), 2))).T
    disjoint = [not set(ranks[a].tolist()) & set(ranks[b].tolist()) for a, b in pairs.T]
    pairs = pairs[:, disjoint]
    figures, row = cut_figures_of(cluster, ranks, pairs, 7, asynchronous)
    assert len(np.unique(figures, axis=0)) == len(figures)
    for (a, b), found in zip(pairs.T, figures[row], strict=True):
        assert tuple(found) == approx(
            cut_figures(cluster, ranks[a].tolist(), ranks[b].tolist(), 7, asynchronous)
        )
