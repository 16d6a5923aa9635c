from dataclasses import replace

import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster, Collective, Level
from hybridpipe.planning.simulator.fluid_engine import Engine
from hybridpipe.planning.simulator.resources import Machines, pass_at_once

NODES = Cluster(
    (Level("node", 2, 100.0, 0.25), Level("rack", 4, 20.0, 0.5, 10.0), Level("network", 8, 5.0, 1.0)),
    node_ranks=2,
    compute_speeds=(1.0, 0.8),
)


def seconds_of(*routes) -> list[float]:
    """How long 100 bytes take on each route, all at once; latency left out."""
    engine, ends = Engine(), [0.0] * len(routes)
    for i, (sender, receiver, machines) in enumerate(routes):
        engine.start(
            100, machines.route(sender, receiver).resources, lambda i: ends.__setitem__(i, engine.now), i
        )
    engine.run()
    return ends


@pytest.mark.parametrize(
    "pairs, seconds",
    [
        ([(0, 1)], [1.0]),
        ([(0, 1), (1, 0)], [1.0, 1.0]),  # both directions at once
        ([(0, 2)], [10.0]),  # its share of the node's link is less than its port
        ([(0, 2), (1, 3)], [20.0, 20.0]),  # two ranks of a node share its link
        ([(0, 2), (3, 1)], [10.0, 10.0]),  # in opposite directions they do not
        ([(0, 2), (0, 1)], [10.0, 1.0]),  # another level
        ([(0, 4), (1, 4)], [40.0, 40.0]),  # the receiver's port
        ([(0, 4), (0, 5)], [40.0, 40.0]),  # the sender's port
        ([(0, 4), (1, 5)], [20.0, 20.0]),  # nothing is shared at that level
        ([(0, 4), (4, 6)], [20.0, 10.0]),
    ],
)
def test_messages_share_links(pairs, seconds):
    machines = Machines(NODES)
    assert seconds_of(*((*pair, machines) for pair in pairs)) == approx(seconds)


def test_a_route_knows_its_latency():
    machines = Machines(NODES)
    assert [machines.route(0, peer).latency_seconds for peer in (1, 2, 4)] == [0.25, 0.5, 1.0]


def test_processors_belong_to_a_machine():
    machines = Machines(NODES)
    assert machines.processors(0) is machines.processors(1) is not machines.processors(2)
    assert [machines.processors(0)[0].shares[n] for n in (1, 2, 4)] == approx([1.0, 0.8, 0.4])


@pytest.mark.parametrize("ranks", [(0, 1), (0, 2), (0, 1, 2), (1, 2, 3), tuple(range(8)), (6, 1)])
@pytest.mark.parametrize("bandwidth", [None, 3.0, 1000.0])  # of the all-reduce, as measured
def test_a_ring_alone_takes_what_the_cluster_says(ranks, bandwidth):
    figures = bandwidth and Collective(bandwidth, 0.125)
    cluster = replace(NODES, levels=tuple(replace(level, allreduce=figures) for level in NODES.levels))
    ring, engine = Machines(cluster).ring(ranks), Engine()
    engine.start(1000 * ring.work_per_byte, ring.resources, lambda _: None, None, ring.cap)
    engine.run()
    assert engine.now + ring.latency_seconds == approx(cluster.ring(ranks).seconds(1000))


def test_a_ring_crosses_each_link_once_each_way():
    assert len(Machines(NODES).ring((0, 1, 2)).resources) == 2 * (3 + 2)  # three ports, two nodes
    assert len(Machines(NODES).ring(tuple(range(8))).resources) == 2 * 8  # no shared links up there
    assert len({*Machines(NODES).ring((0, 1, 2)).resources}) == 2 * (3 + 2)


@pytest.mark.parametrize("m", [2, 3, 4])
@pytest.mark.parametrize("bandwidth, cap", [(40.0, 40.0), (100.0, 100.0), (200.0, 100.0)])
def test_a_slow_all_reduce_leaves_room_for_messages(m, bandwidth, cap):
    """2 (m - 1) / m bytes go over each link for a byte of the sum, no faster than was measured of either."""
    level = Level("all", 4, 100.0, 0.0, allreduce=Collective(bandwidth, 0.0))
    ring = Machines(Cluster((level,))).ring(range(m))
    assert ring.cap == approx(cap)
    assert ring.work_per_byte == approx(2 * (m - 1) / m * cap / bandwidth)


def test_a_bucket_of_tokens_fills_while_its_link_rests():
    machines = Machines(Cluster((Level("all", 2, 100.0, 0.0, burst_bytes=50.0),)))
    bursts = machines.route(0, 1).bursts
    assert len(bursts) == 2  # of the sender's port and of the receiver's
    assert pass_at_once(bursts, 80.0, now=0.0) == 50.0
    assert pass_at_once(bursts, 80.0, now=0.25) == 25.0
    assert pass_at_once(bursts, 10.0, now=1.25) == 10.0
    assert pass_at_once(bursts, 80.0, now=1.3) == approx(45.0)
    assert pass_at_once(bursts, 80.0, now=9.0) == 50.0  # no more than it holds
    bursts[0].leave(0.0, now=9.0)
    machines.route(0, 1).resources[0].num_jobs = 1
    assert pass_at_once(bursts, 80.0, now=20.0) == 0.0  # others are passing
    assert pass_at_once((), 80.0, now=20.0) == 0.0
