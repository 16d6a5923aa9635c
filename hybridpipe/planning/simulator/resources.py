"""Resources: the resources of a cluster that computing, messages and all-reduces occupy.

A machine's processors are one resource, with the measured speeds. A link has two directions, each a resource:
every rank has a port at every level, and where a level's bandwidth is shared, so has every unit below it.
Where a level lets bursts pass, each has a token bucket. Not known here: programs and times.
"""

from collections.abc import Sequence
from typing import NamedTuple

from hybridpipe.planning.cluster import ALL_REDUCE, PARTS_SENT, Cluster
from hybridpipe.planning.simulator.fluid_engine import Resource, Shares, even


class Route(NamedTuple):
    """The way of a message: the resources that it occupies until its last byte, and then the latency."""

    resources: tuple[Resource, ...]
    latency_seconds: float
    bursts: tuple["Burst", ...]


class RingRoute(NamedTuple):
    """The way of a collective over some ranks.

    A bucket is a job of `work_per_byte` for each byte at a rate of at most `cap`. Alone it takes
    `Ring.seconds`, except for the bytes that pass at once of `bursts`.
    """

    resources: tuple[Resource, ...]
    wait_seconds: float
    latency_seconds: float
    work_per_byte: float
    cap: float
    bursts: tuple["Burst", ...]


class Burst:
    """A token bucket: the bytes that may pass a link at once. It fills at the link's bandwidth."""

    __slots__ = ("_link", "_num_bytes", "_since", "_then")

    def __init__(self, link: Resource, num_bytes: float) -> None:
        self._link, self._num_bytes = link, num_bytes
        self._then, self._since = num_bytes, 0.0

    def left(self, now: float) -> float:
        """Return the bytes that pass at once; 0 while others are passing."""
        if self._link.num_jobs:
            return 0.0
        return min(self._num_bytes, self._then + (now - self._since) * self._link.shares[1])

    def leave(self, left: float, now: float) -> None:
        """Set the bytes that are left; the bucket fills again from now on."""
        self._then, self._since = left, now


def pass_at_once(bursts: Sequence[Burst], num_bytes: float, now: float) -> float:
    """Return the bytes of a message that pass all links at once, and take them out of the buckets."""
    if not bursts:
        return 0.0
    lefts = [burst.left(now) for burst in bursts]
    passed = min(num_bytes, *lefts)
    for burst, left in zip(bursts, lefts, strict=True):
        burst.leave(left - passed, now)
    return passed


class Machines:
    """The resources of a cluster, created on first use."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._speeds = Shares(cluster.shared_speed)
        self._nodes: dict[int, tuple[Resource]] = {}
        self._shares = {
            (index, shared): even(bandwidth)
            for index, level in enumerate(cluster.levels)
            for shared, bandwidth in ((False, level.bandwidth), (True, level.shared_bandwidth))
            if bandwidth is not None
        }
        self._links: dict[tuple[int, bool, bool, int], Resource] = {}  # level, shared?, outgoing?, number
        self._routes: dict[tuple[int, int], Route] = {}
        self._bursts: dict[Resource, Burst] = {}

    def processors(self, rank: int) -> tuple[Resource]:
        """Return the resource that a rank computes on."""
        node = self.cluster.node(rank)
        if node not in self._nodes:
            self._nodes[node] = (Resource(self._speeds),)
        return self._nodes[node]

    def route(self, sender: int, receiver: int) -> Route:
        """Return the route of a message between two ranks."""
        found = self._routes.get((sender, receiver))
        if found is None:
            index = self.cluster.level_index(sender, receiver)
            links = self._links_of(index, [sender], True) + self._links_of(index, [receiver], False)
            latency = self.cluster.levels[index].latency_seconds
            found = Route(tuple(links), latency, self._bursts_of(index, links))
            self._routes[sender, receiver] = found
        return found

    def ring(self, ranks: Sequence[int], collective: str = ALL_REDUCE) -> RingRoute:
        """Return the route of a collective over two or more ranks, which crosses each link once each way."""
        index = self.cluster.level_index(min(ranks), max(ranks))
        links = self._links_of(index, ranks, True) + self._links_of(index, ranks, False)
        latency, seconds_per_byte, wait = self.cluster.ring(ranks, collective)
        sent_per_byte = 2 * (len(ranks) - 1) / len(ranks) * PARTS_SENT[collective]
        # Where a measured all-reduce is faster than a message, each byte counts as less work.
        cap = min(sent_per_byte / seconds_per_byte, *(link.shares[1] for link in links))
        work, bursts = seconds_per_byte * cap, self._bursts_of(index, links)
        return RingRoute(tuple(links), wait, latency, work, cap, bursts)

    def _bursts_of(self, index: int, links: Sequence[Resource]) -> tuple[Burst, ...]:
        num_bytes = self.cluster.levels[index].burst_bytes
        if num_bytes is None:
            return ()
        return tuple(self._bursts.setdefault(link, Burst(link, num_bytes)) for link in links)

    def _links_of(self, index: int, ranks: Sequence[int], outgoing: bool) -> list[Resource]:
        """Return the ports of the ranks at a level, and where its links are shared those of their units."""
        links = [self._link(index, False, outgoing, rank) for rank in ranks]
        if (index, True) in self._shares:
            units = dict.fromkeys(self.cluster.unit_below(index, rank) for rank in ranks)
            links += [self._link(index, True, outgoing, unit) for unit in units]
        return links

    def _link(self, index: int, shared: bool, outgoing: bool, number: int) -> Resource:
        key = (index, shared, outgoing, number)
        if key not in self._links:
            self._links[key] = Resource(self._shares[index, shared])
        return self._links[key]
