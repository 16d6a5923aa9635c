import math
import re
from dataclasses import replace

import pytest

from hybridpipe.planning.checks import MAX_RANKS
from hybridpipe.planning.cluster import Cluster, Collective, Level, Ring

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
        (lambda: Collective(0.0, 0.0), "bandwidth must be a finite number > 0, got 0.0"),
        (
            lambda: Cluster((NODE,), relative_speed=(1.0,)),
            "relative_speed must hold one figure for each of the 2 ranks, got 1",
        ),
        (lambda: Cluster((NODE,), relative_speed=(1.0, 0.0)), "relative_speed must be a finite number > 0"),
        (lambda: Cluster((NODE,), memory_bytes=-1), "memory_bytes must be an integer >= 0, got -1"),
        (lambda: Cluster((NODE,), node_ranks=0), "node_ranks must be an integer >= 1, got 0"),
        (
            lambda: Cluster((NODE,), compute_speeds=()),
            "compute_speeds must hold at least one figure, got none",
        ),
        (
            lambda: Cluster((NODE,), compute_speeds=(1.0, 0)),
            "compute_speeds must be a finite number > 0, got 0",
        ),
        (
            lambda: Cluster((NODE,), memory_bytes=(1,)),
            "memory_bytes must hold one figure for each of the 2 ranks, got 1",
        ),
        (
            lambda: Cluster((NODE,), message_seconds=-1),
            "message_seconds must be a finite number >= 0, got -1",
        ),
        (
            lambda: Cluster((NODE,), message_seconds_per_byte=-1),
            "message_seconds_per_byte must be a finite number >= 0, got -1",
        ),
        (lambda: Cluster((NODE,), overlap=1.5), "overlap must be a finite number <= 1, got 1.5"),
        (
            lambda: Cluster((NODE,), allreduce_factor=0.0),
            "allreduce_factor must be a finite number > 0, got 0.0",
        ),
        (
            lambda: Level("node", 1, 1.0, 0.0, shared_bandwidth=0.0),
            "shared_bandwidth must be a finite number > 0, got 0.0",
        ),
        (
            lambda: Level("node", 1, 1.0, 0.0, burst_bytes=-1.0),
            "burst_bytes must be a finite number > 0, got -1.0",
        ),
        (lambda: Cluster((NODE,), format="x"), "format must be 'hybridpipe-cluster/1', got 'x'"),
        (lambda: Cluster((NODE,)).level_index(1, 2), "ranks 1 and 2 are not both among the cluster's 2"),
    ],
)
def test_a_mistake_is_named(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    "rank, other, level", [(0, 1, NODE), (1, 2, RACK), (3, 4, ALL), (4, 5, NODE), (7, 0, ALL), (6, 4, RACK)]
)
def test_a_message_crosses_the_innermost_level_that_holds_both(rank, other, level):
    assert LEVELS[Cluster(LEVELS).level_index(rank, other)] == level


@pytest.mark.parametrize("ranks, level", [((1, 0), NODE), ((2, 0, 1), RACK), ((0, 7), ALL)])
def test_a_ring_is_as_slow_as_the_outermost_level_it_crosses(ranks, level):
    assert Cluster(LEVELS).ring(ranks).latency_seconds == 2 * (len(ranks) - 1) * level.latency_seconds


def test_allreduce_sends_2_m_minus_1_over_m_of_the_data():
    cluster = Cluster(LEVELS)
    assert cluster.ring((0,)).seconds(300.0) == 0
    assert cluster.ring((0, 1)).seconds(300.0) == 2 * 1 + 300 / 100
    assert cluster.ring((0, 1, 2)).seconds(300.0) == 4 * 2 + 400 / 10


def test_allreduce_is_that_of_the_level_it_crosses():
    measured = replace(RACK, allreduce=Collective(50.0, 7.0))
    cluster = Cluster((NODE, measured, replace(ALL, shared_bandwidth=0.5)))
    assert cluster.ring((0, 1, 2)).seconds(300.0) == 7 + 400 / 50
    assert cluster.ring((0, 1)).seconds(300.0) == 2 * 1 + 300 / 100
    assert cluster.ring((7, 0)) == Ring(2 * 3.0, 1 / 0.5)  # a shared link is crossed once in each direction
    assert cluster.ring((3,)) == Ring(0.0, 0.0)


@pytest.mark.parametrize("index, rank, unit", [(0, 5, 5), (1, 5, 2), (2, 5, 1), (2, 3, 0)])
def test_whose_link_a_rank_shares(index, rank, unit):
    assert Cluster(LEVELS).unit_below(index, rank) == unit


def test_memory():
    assert Cluster(LEVELS).memory(3) == math.inf
    assert Cluster(LEVELS, memory_bytes=5).memory(3) == 5
    assert Cluster(LEVELS, memory_bytes=tuple(range(8))).memory(3) == 3


def test_processors():
    alone = Cluster.flat(4, 1.0, 0.0)
    assert [alone.node(rank) for rank in range(4)] == [0, 1, 2, 3]
    shared = Cluster((ALL,), node_ranks=4)
    assert [shared.node(rank) for rank in (0, 3, 4, 7)] == [0, 0, 1, 1]
    assert Cluster((NODE,), relative_speed=(1.0, 0.5)).speed(1) == 0.5 and alone.speed(1) == 1


@pytest.mark.parametrize(
    "cluster, speeds",
    [
        (Cluster((ALL,)), [1, 1 / 2, 1 / 3, 1 / 4]),
        (Cluster((ALL,), node_ranks=2), [1, 1, 2 / 3, 1 / 2]),
        (Cluster((ALL,), node_ranks=4, compute_speeds=(1.0, 0.6)), [1.0, 0.6, 0.4, 0.3]),
    ],
)
def test_beyond_the_measured_ranks_they_share_what_the_most_had(cluster, speeds):
    assert [cluster.shared_speed(n) for n in (1, 2, 3, 4)] == pytest.approx(speeds)


def test_compression_shortens_an_all_reduce_but_not_its_latency():
    measured = replace(NODE, allreduce=Collective(50.0, 0.5))
    for level in (NODE, measured):
        whole, halved = (Cluster((level,)).compressing(c, "float32").ring((0, 1)) for c in ("none", "fp16"))
        assert whole == Cluster((level,)).compressing("fp16", "float64").ring((0, 1))
        assert halved == Ring(whole.latency_seconds, whole.seconds_per_byte / 2)


def test_a_machine_is_busy_once_another_rank_adds_less_than_half():
    """Together 1, 1.8, 2.16 and 2.4 times one alone."""
    machine = replace(Cluster.flat(4, 1.0, 0.0), node_ranks=4, compute_speeds=(1.0, 0.9, 0.72, 0.6))
    assert [machine.is_busy(n) for n in range(4)] == [False, False, True, True]


def test_a_cluster_has_as_many_ranks_as_a_plan_may_have():
    assert Cluster.flat(MAX_RANKS, 1.0, 0.0).num_ranks == MAX_RANKS
    with pytest.raises(ValueError, match=f"ranks must be an integer <= {MAX_RANKS}, got"):
        Cluster.flat(MAX_RANKS + 1, 1.0, 0.0)


def test_messages_that_a_rank_waits_for_keep_it_from_computing():
    cluster = replace(Cluster.flat(2, 10.0, 0.5), message_seconds=0.25)
    assert cluster.occupied_seconds(20.0, 2) == 0.5
    assert replace(cluster, waits_for_messages=True).occupied_seconds(20.0, 2) == 0.5 + 2 * 0.5 + 2.0


def test_lists_are_taken_as_tuples():
    """Searches keep figures of clusters, which must be hashable."""
    levels = Cluster.flat(4, 1e9, 1e-5).levels
    made = Cluster([*levels], wakeup_seconds=[0.0])
    assert made == Cluster(levels, wakeup_seconds=(0.0,)) and hash(made) == hash(replace(made))
