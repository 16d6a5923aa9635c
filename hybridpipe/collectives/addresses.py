"""Addresses: under which address each rank's host is reached by the others, for connections beside MPI's.

Knows interfaces of this host. Invariant: ranks choose from the same list, so all choose one network.
"""

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from ipaddress import IPv4Interface

from hybridpipe.comm.mpi import MPI

LOOPBACK = "127.0.0.1"
SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B  # netdevice(7)


def own_address(ranks: MPI.Comm) -> str:
    """Return the address under which the other ranks reach this one. Collective over `ranks`."""
    host = ranks.Split_type(MPI.COMM_TYPE_SHARED)
    is_alone, leader = host.size == ranks.size, host.bcast(ranks.rank)
    host.Free()
    if is_alone:
        return LOOPBACK
    of_ranks = ranks.allgather(interfaces())
    leaders = ranks.allgather(leader)
    hosts = [of_ranks[rank] for rank in dict.fromkeys(leaders)]
    found = addresses_in_one_network(hosts)
    if found is None:  # the hosts are in several networks: their names lead to them
        return socket.gethostbyname(socket.gethostname())
    return found[list(dict.fromkeys(leaders)).index(leader)]


def addresses_in_one_network(hosts: Sequence[Sequence[IPv4Interface]]) -> list[str] | None:
    """Return an address of each host in the first host's first network in which each has its own; else None.

    A bridge of containers often has the same address on all hosts.
    """
    for first in hosts[0]:
        found = [next((each for each in host if each.network == first.network), None) for host in hosts]
        addresses = [str(each.ip) for each in found if each is not None]
        if len(set(addresses)) == len(hosts):
            return addresses
    return None


def interfaces() -> list[IPv4Interface]:
    """Return the IPv4 addresses of this host with their networks, without loopback, in the kernel's order."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                address, mask = (
                    socket.inet_ntoa(fcntl.ioctl(asking, code, request)[20:24])
                    for code in (SIOCGIFADDR, SIOCGIFNETMASK)
                )
            except OSError:  # it has none
                continue
            found.append(ipaddress.IPv4Interface(f"{address}/{mask}"))
    return [each for each in found if not each.ip.is_loopback]
