"""Addresses: under which address a rank's host is reached by the others, for connections beside MPI's.

Knows interfaces and routes of this host. Invariant: an address that several hosts have leads to none of them.
"""

import contextlib
import fcntl
import socket
import struct
from collections import Counter
from collections.abc import Mapping, Sequence

from hybridpipe.comm.mpi import MPI
from hybridpipe.errors import UserError

LOOPBACK = "127."
SIOCGIFADDR = 0x8915  # netdevice(7)


def own_address(ranks: MPI.Comm) -> str:
    """Return the address under which the other ranks reach this one. Collective over `ranks`.

    Raises:
        UserError: there is no route to another host.
    """
    host = ranks.Split_type(MPI.COMM_TYPE_SHARED)
    leader = host.bcast(ranks.rank)
    host.Free()
    hosts = dict(ranks.allgather((leader, addresses())))
    if len(hosts) == 1:
        return "127.0.0.1"
    return address_towards(those_of_one_host(hosts, besides=leader))


def those_of_one_host(hosts: Mapping[int, Sequence[str]], besides: int) -> list[str]:
    """Return the addresses that only one host has, which is not `besides`.

    A bridge of containers often has the same address on all hosts.
    """
    hosts_with = Counter(address for of_host in hosts.values() for address in set(of_host))
    others = (address for host, of_host in hosts.items() if host != besides for address in of_host)
    return [address for address in others if hosts_with[address] == 1]


def address_towards(others: Sequence[str]) -> str:
    """Return this host's address on the route to the first of other addresses to which there is one.

    Raises:
        UserError: there is none.
    """
    for other in others:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect((other, 9))  # sends nothing
            mine: str = asking.getsockname()[0]
            if not mine.startswith(LOOPBACK):
                return mine
    raise UserError("sync 'torch' finds no route between the hosts: use sync 'mpi'")


def addresses() -> list[str]:
    """Return the IPv4 addresses of this host without loopback, in the kernel's order."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith(LOOPBACK)]
