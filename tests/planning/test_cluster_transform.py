import re
from dataclasses import replace

import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster, Collective, Level
from hybridpipe.planning.cluster_transform import (
    NETWORK_LATENCY_SECONDS,
    changed,
    figures,
    parse_bandwidth,
    parse_seconds,
    with_bandwidth,
    with_latency,
    with_ranks,
)
from hybridpipe.planning.plan import Prediction
from tests.planning.helpers import plan

NODE = Level("node", 2, 1e10, 1e-6, allreduce=Collective(5e9, 1e-5))
NETWORK = Level("network", 4, 1e9, 1e-4, 5e8, Collective(4e8, 1e-3))
CLUSTER = Cluster((NODE, NETWORK), memory_bytes=(1, 2, 3, 4), relative_speed=(1.0, 1.0, 0.5, 0.5))


@pytest.mark.parametrize(
    "text, value",
    [
        ("100Gbit", 12.5e9),
        ("1 Mbit/s", 1.25e5),
        ("12.5GB", 12.5e9),
        ("8kB/s", 8e3),
        ("8bit", 1.0),
        ("1.25e9", 1.25e9),
        ("7", 7.0),
    ],
)
def test_bandwidths(text, value):
    assert parse_bandwidth(text) == approx(value)


@pytest.mark.parametrize(
    "text", ["", "fast", "100Gb", "-1GB", "0", "1e999", "nan", "Gbit", "1 2", "10Gbit/h"]
)
def test_other_bandwidths_are_refused(text):
    with pytest.raises(ValueError, match=f"^must be such as 100Gbit.*, got {re.escape(repr(text))}$"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    "text, value", [("5us", 5e-6), ("5 µs", 5e-6), ("0.1ms", 1e-4), ("2s", 2.0), ("1e-5", 1e-5), ("0", 0.0)]
)
def test_seconds(text, value):
    assert parse_seconds(text) == approx(value)


@pytest.mark.parametrize("text", ["", "soon", "-1s", "1h", "1e999"])
def test_other_seconds_are_refused(text):
    with pytest.raises(ValueError, match=r"^must be such as 5us"):
        parse_seconds(text)


def test_another_bandwidth_scales_what_goes_over_the_outermost_level():
    inner, outer = with_bandwidth(CLUSTER, 1e10).levels
    assert inner == NODE
    assert outer == Level("network", 4, 1e10, 1e-4, 5e9, Collective(4e9, 1e-3))


def test_another_latency():
    inner, outer = with_latency(CLUSTER, 5e-5).levels
    assert inner == NODE and outer.latency_seconds == 5e-5
    assert outer.allreduce == Collective(4e8, 5e-4)
    assert with_latency(Cluster.flat(2, 1.0, 0.0), 1.0) == Cluster.flat(2, 1.0, 1.0)


@pytest.mark.parametrize("asked, got", [(8, 8), (7, 8), (4, 4), (3, 4), (1, 2)])
def test_other_ranks_come_in_whole_units(asked, got):
    grown = with_ranks(CLUSTER, asked)
    assert grown.num_ranks == got and grown.levels[0] == NODE
    assert grown.memory_bytes == ((1, 2, 3, 4) * 2)[:got]
    assert grown.relative_speed == ((1.0, 1.0, 0.5, 0.5) * 2)[:got]


def test_one_level_just_gets_the_ranks():
    assert with_ranks(Cluster.flat(4, 1.0, 0.0), 7) == Cluster.flat(7, 1.0, 0.0)


def test_changes_go_together():
    assert changed(CLUSTER, None, None, None) is CLUSTER
    assert changed(Cluster.flat(2, 1.0, 1.0), 2.0, 3.0, 4) == Cluster.flat(4, 2.0, 3.0)


def test_figures_stand_side_by_side():
    before = Prediction(0.5, 1234.0, 0.25, (1_000_000, 2_000_000))
    after = Prediction(0.125, 50.4, 0.0, (3_000_000,))
    made, other = plan([1, 1], 8), plan([16], 1, "pipedream")
    made, other = (
        type(p)(p.stages, p.schedule, p.num_microbatches, predicted=q)
        for p, q in ((made, before), (other, after))
    )
    rows = [
        re.split(r" {2,}", line.strip()) for line in figures({"before": made, "after": other}).splitlines()
    ]
    assert rows == [
        ["before", "after"],
        ["plan", "1-1", "16"],
        ["ranks used", "2", "16"],
        ["microbatches", "8", "1"],
        ["minibatch", "500.00 ms", "125.00 ms"],
        ["samples/s", "1,234", "50"],
        ["bubble", "25%", "0%"],
        ["most memory", "2 MB", "3 MB"],
    ]


MACHINE = replace(Cluster.flat(4, 1.0, 0.0), node_ranks=4, compute_speeds=(1.0, 0.9), memory_bytes=7)


def test_one_machine_is_joined_by_others_over_the_network_that_is_given():
    grown = changed(MACHINE, 1e9, None, 14)
    network = Level("network", 16, 1e9, NETWORK_LATENCY_SECONDS, shared_bandwidth=1e9)
    assert grown == replace(MACHINE, levels=(*MACHINE.levels, network))
    assert changed(MACHINE, 1e9, 1e-6, 14).levels[-1].latency_seconds == 1e-6
    assert changed(MACHINE, 1e9, None, 3) == with_bandwidth(with_ranks(MACHINE, 3), 1e9)
    assert changed(grown, 2e9, None, 32).levels == (
        *MACHINE.levels,
        replace(network, ranks=32, bandwidth=2e9, shared_bandwidth=2e9),
    )


def test_one_machine_grows_no_second_one_without_a_network():
    assert with_ranks(MACHINE, 4) == MACHINE and with_ranks(MACHINE, 3).num_ranks == 3
    with pytest.raises(
        ValueError, match=r"at most 4, got 5: the cluster is one machine; .* give its bandwidth"
    ):
        changed(MACHINE, None, 1e-6, 5)
    two = replace(MACHINE, node_ranks=2)
    assert with_ranks(two, 6).num_ranks == 6
    assert with_ranks(Cluster.flat(1, 1.0, 0.0), 2).num_ranks == 2  # on no one knows what machine
