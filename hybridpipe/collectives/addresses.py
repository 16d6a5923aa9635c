"""Addresses: under which address each rank's host is reached by the others, for connections beside MPI's.

Knows interfaces of this host. Invariant: ranks choose from the same list, so all choose one network.
"""

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from ipaddress import IPv4Interface

from hybridpipe.comm.mpi import MPI
from hybridpipe.errors import UserError

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
    mine = list(dict.fromkeys(leaders)).index(leader)
    if found is None:  # the hosts are in several networks, with routes between them
        return address_towards([str(each.ip) for host in hosts[:mine] + hosts[mine + 1 :] for each in host])
    return found[mine]


def address_towards(others: Sequence[str]) -> str:
    """Return this host's address on the route to the first of other addresses that has one.

    Raises:
        UserError: there is no route.
    """
    for other in others:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect((other, 9))  # sends nothing
            mine: str = asking.getsockname()[0]
            if not ipaddress.ip_address(mine).is_loopback:
                return mine
    raise UserError("sync 'torch' finds no address of this host: name its network in GLOO_SOCKET_IFNAME")


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
