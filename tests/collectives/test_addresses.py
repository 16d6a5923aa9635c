"""Hosts reach each other under addresses that are their own."""

import pytest

from hybridpipe.collectives.addresses import address_towards, addresses, those_of_one_host
from hybridpipe.errors import UserError

BRIDGE = "172.17.0.1"  # of containers: the same on every host


def test_an_address_that_several_hosts_have_leads_nowhere():
    hosts = {0: [BRIDGE, "10.0.0.1"], 2: [BRIDGE, "10.0.0.2", "192.168.1.2"], 4: ["10.0.0.3"]}
    assert those_of_one_host(hosts, besides=0) == ["10.0.0.2", "192.168.1.2", "10.0.0.3"]
    assert those_of_one_host(hosts, besides=4) == ["10.0.0.1", "10.0.0.2", "192.168.1.2"]


def test_a_host_reaches_itself_under_the_addresses_that_it_has():
    assert not any(address.startswith("127.") for address in addresses())
    for address in addresses():
        assert address_towards(["127.0.0.1", address]) == address


def test_without_a_route_the_remedy_is_named():
    with pytest.raises(UserError, match="use sync 'mpi'"):
        address_towards(["127.0.0.1"])
