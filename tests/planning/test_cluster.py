import re

import pytest

from hybridpipe.planning.cluster import AllReduce, Cluster, Level

NODE, RACK, ALL = Level("node", 2, 100.0, 1.0), Level("rack", 4, 10.0, 2.0), Level("all", 8, 1.0, 3.0)
LEVELS = (NODE, RACK, ALL)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Cluster(()), "levels must hold at least one level, got none"),
        (
            lambda: Cluster((NODE, Level("rack", 5, 1.0, 0.0))),
            "level 'rack' must hold a multiple of the 2 ranks of level 'node', got 5",
        ),
        (lambda: Level("node", 0, 1.0, 0.0), "ranks must be an integer >= 1, got 0"),
        (lambda: Level("node", 1, 0.0, 0.0), "bandwidth must be a finite number > 0, got 0.0"),
        (lambda: Level("node", 1, 1.0, -1.0), "latency_seconds must be a finite number >= 0, got -1.0"),
        (lambda: AllReduce(0.0, 0.0), "allreduce.bandwidth must be a finite number > 0, got 0.0"),
        (
            lambda: Cluster((NODE,), relative_speed=(1.0,)),
            "relative_speed must hold one figure for each of the 2 ranks, got 1",
        ),
        (lambda: Cluster((NODE,), relative_speed=(1.0, 0.0)), "relative_speed must be a finite number > 0"),
        (lambda: Cluster((NODE,), memory_bytes=-1), "memory_bytes must be an integer >= 0, got -1"),
        (lambda: Cluster((NODE,), node_ranks=0), "node_ranks must be an integer >= 1, got 0"),
        (lambda: Cluster((NODE,), compute_slots=0), "compute_slots must be a finite number > 0, got 0"),
        (lambda: Cluster((NODE,), format="x"), "format must be 'hybridpipe-cluster/1', got 'x'"),
        (lambda: Cluster((NODE,)).link(1, 2), "ranks 1 and 2 are not both among the cluster's 2"),
    ],
)
def test_a_mistake_is_named(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    "rank, other, level", [(0, 1, NODE), (1, 2, RACK), (3, 4, ALL), (4, 5, NODE), (7, 0, ALL), (6, 4, RACK)]
)
def test_a_message_crosses_the_innermost_level_that_holds_both(rank, other, level):
    assert Cluster(LEVELS).link(rank, other) == level


@pytest.mark.parametrize("ranks, level", [((5,), NODE), ((1, 0), NODE), ((2, 0, 1), RACK), ((0, 7), ALL)])
def test_a_ring_is_as_slow_as_the_outermost_level_it_crosses(ranks, level):
    assert Cluster(LEVELS).slowest_link(ranks) == level


def test_allreduce_sends_2_m_minus_1_over_m_of_the_data():
    cluster = Cluster(LEVELS)
    assert cluster.allreduce_seconds(300.0, (0,)) == 0
    assert cluster.allreduce_seconds(300.0, (0, 1)) == 1 + 300 / 100
    assert cluster.allreduce_seconds(300.0, (0, 1, 2)) == 2 + 400 / 10
    measured = Cluster(LEVELS, allreduce=AllReduce(50.0, 7.0))
    assert measured.allreduce_seconds(300.0, (0, 1, 2)) == 7 + 400 / 50


def test_processors():
    alone = Cluster.flat(4, 1.0, 0.0)
    assert [alone.node(rank) for rank in range(4)] == [0, 1, 2, 3] and alone.slots == 1
    shared = Cluster((ALL,), node_ranks=4)
    assert [shared.node(rank) for rank in (0, 3, 4, 7)] == [0, 0, 1, 1] and shared.slots == 4
    assert Cluster((ALL,), node_ranks=4, compute_slots=1.5).slots == 1.5
    assert Cluster((NODE,), relative_speed=(1.0, 0.5)).speed(1) == 0.5 and alone.speed(1) == 1
