"""What groups would take, by hand: a plan on a part of the ranks, and an exchange now and then."""

import pytest
from pytest import approx

from hybridpipe.planning.cluster import Cluster, Level
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.search.groups import first_ranks, forecast_groups
from hybridpipe.planning.search.search import search_sizes
from tests.planning.helpers import layer, model

LAYERS = model(*[layer(1, 2, parameters=1000, output=10)] * 4)
HOSTS = Cluster((Level("host", 2, 1e6, 0.0), Level("network", 4, 100.0, 0.5)), memory_bytes=(1, 2, 3, 4))


def test_an_exchange_crosses_the_network_once_in_so_many_minibatches():
    """Two groups send half of the weights twice: 4,000 bytes over two ranks at 100 bytes a second each."""
    cluster = Cluster(HOSTS.levels)
    found = forecast_groups(LAYERS, cluster, 8, PlanRequest(), 2, 10)
    assert found.plan.num_ranks == 2 and found.exchanged_bytes == 4000
    assert found.exchange_seconds == approx(2 * 0.5 + 2000 / 100)
    assert found.minibatch_seconds == approx(found.plan.predicted.minibatch_seconds + 21 / 10)


def test_the_ranks_of_a_host_share_its_link():
    shared = Cluster((HOSTS.levels[0], Level("network", 4, 100.0, 0.5, shared_bandwidth=100.0)))
    found = forecast_groups(LAYERS, shared, 8, PlanRequest(), 2, 1)
    assert found.exchange_seconds == approx(2 * 0.5 + 4000 / 100)


def test_each_rank_has_room_for_the_centre_its_momentum_and_what_travels():
    """They are as large as the weights, of which each of two replicas has all."""
    alone = search_sizes(LAYERS, Cluster(HOSTS.levels[:1]), 4, PlanRequest())[0].plan
    found = forecast_groups(LAYERS, Cluster(HOSTS.levels), 8, PlanRequest(), 2, 1).plan
    assert found.name == alone.name == "2"
    peaks = zip(found.predicted.peak_memory_bytes, alone.predicted.peak_memory_bytes, strict=True)
    assert {ours - before for ours, before in peaks} == {3 * 4000}


def test_the_first_ranks_are_a_cluster():
    assert first_ranks(HOSTS, 2).levels == HOSTS.levels[:1] and first_ranks(HOSTS, 2).memory_bytes == (1, 2)
    assert [level.ranks for level in first_ranks(HOSTS, 1).levels] == [1]


@pytest.mark.parametrize(
    "count, minibatch, told", [(3, 9, "the 4 ranks of the cluster"), (2, 9, "the 9 samples of a minibatch")]
)
def test_groups_that_do_not_divide_are_refused(count, minibatch, told):
    with pytest.raises(ValueError, match=f"groups must divide {told}, got {count}"):
        forecast_groups(LAYERS, Cluster(HOSTS.levels), minibatch, PlanRequest(), count, 1)
