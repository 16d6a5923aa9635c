from dataclasses import replace

import pytest

from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.cost.formula import compute_share
from hybridpipe.planning.search.placement import (
    active_ranks,
    along,
    coarse,
    dealt,
    every_placement,
    every_stage,
    lines,
    near,
    renumbered,
    shares,
    slot_graph,
)

NODES = Cluster((Level("node", 4, 100.0, 0.1), Level("network", 12, 10.0, 0.5)))


@pytest.mark.parametrize(
    "ranks, expected",
    [
        ([0, 1, 2, 3], (0, 1, 2, 3)),
        ([5, 4, 1, 0], (0, 4, 1, 5)),
        ([1, 2, 3, 6, 11], (1, 6, 11, 2, 3)),
    ],
)
def test_ranks_are_dealt_over_the_nodes(ranks, expected):
    assert dealt(NODES, ranks) == expected


def test_stages_spread_alike_meet_within_nodes():
    behind = dealt(NODES, [2, 3, 6, 7])
    assert {NODES.level_index(a, b) for a, b in zip(dealt(NODES, [0, 1, 4, 5]), behind, strict=True)} == {0}


def test_lines_are_packed_dealt_in_groups_and_sorted():
    packed, dealt_over_all, *groups = lines(NODES, range(12))
    assert packed == tuple(range(12))
    assert dealt_over_all == (0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11)
    assert groups == [(0, 4, 1, 5, 2, 6, 3, 7, 8, 9, 10, 11)]
    fast_last = replace(Cluster.flat(3, 1.0, 0.0), relative_speed=(1.0, 0.5, 2.0))
    assert lines(fast_last, range(3)) == [(0, 1, 2), (1, 0, 2), (2, 0, 1)]
    assert lines(Cluster.flat(16, 1.0, 0.0), [3, 5, 4]) == [(3, 4, 5)]


@pytest.mark.parametrize(
    "cluster", [Cluster.flat(3, 1.0, 0.0), Cluster((Level("a", 1, 1, 0), Level("b", 3, 1, 0)))]
)
def test_every_placement_is_there_once_up_to_symmetry(cluster):
    """Seven on three equal ranks, as compositions of 1, 2 and 3; all disjoint subsets on unequal ones."""
    layout = every_placement(cluster, range(3), 3)

    def placements(slot):
        mine = frozenset(layout.ranks[slot].tolist())
        if len(layout.left[slot]) == len(mine):
            yield (mine,)
        for behind in layout.behind[slot]:
            yield from ((mine, *rest) for rest in placements(behind))

    found = [stages for slot in layout.starts for stages in placements(slot)]
    assert len(found) == len(set(found)) == (7 if len(cluster.levels) == 1 else 25)
    for stages in found:
        assert sum(map(len, stages)) == len(frozenset().union(*stages))


def test_too_many_placements_are_left_to_lines():
    assert every_placement(NODES, range(12), 12) is None
    assert every_stage(12, 12) is not None and every_stage(1024, 1024) is None
    assert len(every_stage(1024, 1)) == 1024


def test_on_a_line_the_next_stage_stands_behind_or_begins_a_node():
    layout = along(NODES, range(12), every_stage(12, 12), 12)
    follows = {(slot, (int(layout.ranks[b].min()))) for slot in layout.starts for b in layout.behind[slot]}
    one_to_two = next(s for s in layout.starts if set(layout.ranks[s].tolist()) == {1, 2})
    assert {start for slot, start in follows if slot == one_to_two} == {3, 4}
    for slot in layout.starts:
        for behind in layout.behind[slot]:
            assert behind < slot and not set(layout.ranks[behind].tolist()) & set(layout.ranks[slot].tolist())


def test_long_lines_keep_some_stages():
    machine = Cluster((Level("node", 8, 1.0, 0.0), Level("network", 1024, 1.0, 0.0)))
    kept = set(coarse(machine, 1024, 1250, 1024))
    assert len(kept) < 5000
    assert {(0, 1024), (0, 1023), (1023, 1024), (0, 512), (512, 1024), (0, 8), (1016, 1024), (5, 6)} <= kept
    close = near([(0, 1000), (1000, 1024)], 1024)
    assert {(0, 1000), (0, 1001), (0, 996), (1001, 1024), (0, 1024)} <= set(close)
    assert all(0 <= a < b <= 1024 for a, b in close)


def test_renumbering_takes_the_first_of_equal_ranks():
    assert renumbered(NODES, range(12), [(2, 3), (7, 5), (1,)]) == ((0, 1), (4, 5), (2,))
    fast_last = replace(NODES, relative_speed=(1.0,) * 3 + (2.0,) + (1.0,) * 8)
    assert renumbered(fast_last, range(12), [(2, 3)]) == ((0, 3),)


def test_speeds_follow_the_number_of_ranks_on_a_machine():
    cluster = Cluster((Level("all", 4, 1.0, 0.0),), node_ranks=2, compute_speeds=(1.0, 0.6))
    layout = every_placement(cluster, range(4), 4)
    found = {}
    for share, starts in shares(layout, cluster, range(4)):
        for slot in starts:
            found[layout.left[slot]] = {rank: share[rank] for rank in layout.left[slot]}
    assert all(share == compute_share(cluster, left) for left, share in found.items())
    assert len(found) == 8  # of each machine none, one or two, but not none of both
    assert active_ranks(cluster, range(4)) == [(0, 1, 2, 3), (0, 2)]
    assert active_ranks(NODES, range(12)) == [tuple(range(12))]


@pytest.mark.parametrize(
    "held_a_rank, expected",
    [(0.0, {1}), (1.0, {1, 2, 3}), (2.0, {1, 2, 3, 5}), (None, {1, 2, 3})],
)
def test_microbatches_in_flight(held_a_rank, expected):
    """Up to three ranks: a straight pipeline of three stages holds three, 1-2 holds three at its front."""
    cluster = Cluster.flat(3, 1.0, 0.0)
    layout = every_placement(cluster, range(3), 3)
    share = dict.fromkeys(range(3), 1.0)
    graph = slot_graph(
        layout,
        cluster,
        share,
        layout.starts,
        num_microbatches=8,
        schedule="1f1b",
        max_in_flight=8,
        held_a_rank=held_a_rank,
    )
    assert {kind.in_flight for kind in graph.kinds} == expected
    for slot in range(len(graph.slot)):
        assert all(graph.behind[graph.first[slot] : graph.first[slot + 1]] < slot)


def test_lines_of_four_nodes_deal_over_all_three_and_two():
    nodes = Cluster((Level("node", 2, 100.0, 0.1), Level("network", 8, 10.0, 0.5)))
    found = lines(nodes, range(8))
    assert found == [
        (0, 1, 2, 3, 4, 5, 6, 7),
        (0, 2, 4, 6, 1, 3, 5, 7),
        (0, 2, 4, 1, 3, 5, 6, 7),
        (0, 2, 1, 3, 4, 6, 5, 7),
    ]
    assert lines(nodes, range(8), replicated=False) == found[:1]


def test_every_stage_is_looked_at_up_to_a_number_of_pairs():
    """A line of 150 ranks and stages of up to 20 have 150 * 20^2 / 2 pairs of a stage and one behind it."""
    found = every_stage(150, 20)
    assert len(found) == 150 * 20 - 19 * 20 // 2 and max(stop for _, stop in found) == 150
    assert every_stage(151, 20) is None


def test_long_lines_keep_rows_of_stages_as_small_as_the_layers_allow():
    machine = Cluster.flat(64, 1.0, 0.0)
    four = coarse(machine, 64, 16, 4)  # 16 layers: stages of four ranks, at least
    assert {(36, 40), (40, 44)} <= set(four) and (42, 44) not in four
    assert (42, 44) in coarse(machine, 64, 32, 4)
    assert (36, 44) not in four and (40, 48) in coarse(machine, 64, 16, 8)
