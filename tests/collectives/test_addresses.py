"""Hosts are reached in a network that all of them are in."""

from ipaddress import IPv4Interface

import pytest

from hybridpipe.collectives.addresses import address_towards, addresses_in_one_network, interfaces
from hybridpipe.errors import UserError

BRIDGE = "172.17.0.1/16"  # of containers: the same on every host


@pytest.mark.parametrize(
    "hosts, expected",
    [
        ([["10.0.0.1/24"], ["10.0.0.2/24"]], ["10.0.0.1", "10.0.0.2"]),
        ([[BRIDGE, "10.0.0.1/24"], ["10.0.0.2/24", BRIDGE]], ["10.0.0.1", "10.0.0.2"]),
        ([["192.168.1.4/24", "10.0.0.1/24"], ["10.0.0.2/24"]], ["10.0.0.1", "10.0.0.2"]),
        ([["10.0.0.1/24"], ["10.0.1.1/24"]], None),
        ([[], ["10.0.0.2/24"]], None),
    ],
)
def test_the_first_network_of_all_hosts_is_taken(hosts, expected):
    found = addresses_in_one_network([[*map(IPv4Interface, host)] for host in hosts])
    assert found == expected


def test_this_hosts_interfaces_leave_loopback_out():
    assert not any(each.ip.is_loopback for each in interfaces())


def test_without_a_route_the_remedy_is_named():
    with pytest.raises(UserError, match="GLOO_SOCKET_IFNAME"):
        address_towards(["127.0.0.1"])
