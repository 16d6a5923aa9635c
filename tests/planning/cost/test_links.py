import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.cost import links
from hybridpipe.planning.cost.links import cut_figures, distinct_cut_figures
from hybridpipe.planning.search.placement import dealt


def cut(cluster, ranks, behind, num_microbatches, asynchronous=False):
    """The figures of one cut."""
    figures = cut_figures(cluster, [ranks, behind], np.array([[0], [1]]), num_microbatches, asynchronous)
    return tuple(figures[:3, 0].tolist())


def cut_by_routes(cluster, ranks, behind, num_microbatches, asynchronous):
    """The same by the definition: every route of lcm(m, k) microbatches is followed."""
    m, k = len(ranks), len(behind)
    routes = np.arange(math.lcm(m, k))
    sender, receiver = np.array(ranks)[routes % m], np.array(behind)[routes % k]
    latency, per_byte, busy, together = 0.0, 0.0, 0.0, 0.0
    a_round = m if asynchronous else min(m, num_microbatches)  # leave at once
    within = np.zeros(len(routes), dtype=bool)
    below = 1  # ranks of a unit of the level below
    for level in cluster.levels:
        here = (sender // level.ranks == receiver // level.ranks) & ~within
        if here.any():
            latency = max(latency, level.latency_seconds)
            per_byte = max(per_byte, 1 / level.bandwidth)
            if level.shared_bandwidth is not None:
                busiest = max(int(np.bincount(end[here] // below).max()) for end in (sender, receiver))
                messages = num_microbatches * busiest / len(routes)
                busy = max(busy, max(0.0, messages - (not asynchronous)) / level.shared_bandwidth)
                together = max(together, a_round * busiest / len(routes) / level.shared_bandwidth)
        within |= here
        below = level.ranks
    fewest = min(m, k)
    in_a_row = num_microbatches / fewest if asynchronous else math.ceil(num_microbatches / fewest) - 1
    return latency, max(math.ceil(a_round / k) * per_byte, together), max(busy, in_a_row * per_byte)


@pytest.mark.parametrize(
    "ranks, behind, expected",
    [
        ((0,), (1,), (0.1, 1 / 100, 5 / 100)),  # inside a node: a rank's own port, five after the first
        ((0,), (2,), (0.5, 1 / 10, 5 / 10)),  # the shared link is as wide as it can be used
        ((0, 1), (2, 3), (0.5, 2 / 10, 5 / 10)),  # both ranks' messages over one link; each port sees two
        ((0, 2), (1, 3), (0.1, 1 / 100, 2 / 100)),  # spread alike: nothing crosses
        ((0, 2), (3, 1), (0.5, 1 / 10, 2 / 10)),  # the other way round: half of it each way
        ((0, 1, 2), (3,), (0.5, 3 / 10, 5 / 10)),  # all through one receiver, four of six over the link
    ],
)
def test_cut_figures(ranks, behind, expected):
    """Two nodes of two ranks, 100 bytes/s inside; between them 10, which both ranks of a node share."""
    cluster = Cluster((Level("node", 2, 100.0, 0.1), Level("network", 4, 10.0, 0.5, shared_bandwidth=10.0)))
    assert cut(cluster, ranks, behind, 6) == approx(expected)


def test_a_shared_link_carries_what_all_its_ranks_send():
    narrow = Cluster((Level("node", 4, 100.0, 0.0), Level("network", 8, 10.0, 0.0, shared_bandwidth=2.0)))
    assert cut(narrow, (0, 1, 2, 3), (4, 5, 6, 7), 8)[2] == 7 / 2  # its ports are busy for 1/10 only
    assert cut(narrow, (0, 1), (4,), 1, asynchronous=True)[2] == 1 / 2
    wide = replace(narrow, levels=(narrow.levels[0], replace(narrow.levels[1], shared_bandwidth=1000.0)))
    assert cut(wide, (0, 1, 2, 3), (4, 5, 6, 7), 8)[2] == 1 / 10


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
    figures, row = distinct_cut_figures(cluster, ranks, pairs, 7, asynchronous)
    assert len(np.unique(figures, axis=0)) == len(figures)
    for (a, b), found in zip(pairs.T, figures[row], strict=True):
        assert tuple(found[:3]) == approx(cut_by_routes(cluster, ranks[a], ranks[b], 7, asynchronous))
    each = cut_figures(cluster, ranks, pairs, 7, asynchronous)
    assert (each == figures[row].T).all()
    assert (each[3] <= each[1]).all()  # a message that is alone is the fastest


def test_one_message_is_alone():
    cluster = Cluster.flat(4, 10.0, 0.0)
    pairs = np.array([[0, 2], [1, 1]])
    _, per_byte, _, alone = cut_figures(cluster, [(0,), (1,), (2, 3)], pairs, 6)
    assert per_byte == approx([1 / 10, 2 / 10]) and alone == approx([1 / 10, 1 / 10])
