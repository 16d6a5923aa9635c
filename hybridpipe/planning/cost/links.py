"""Routes: what the cuts between many pairs of slots cost on a cluster, all of them at once.

Lives here: counting which links the microbatches of a cut take. Not known here: which slots there are
(`placement`), which are chosen (`partition`). Invariant: the figures are those of `cost.cut_figures`.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridpipe.planning.cluster import Cluster

Ints = NDArray[np.intp]
Floats = NDArray[np.float64]

CHUNK = 2**21  # numbers held at once while the routes of many cuts are counted


def cut_figures_of(
    cluster: Cluster, ranks: Sequence[Ints], pairs: Ints, num_microbatches: int, asynchronous: bool
) -> tuple[Floats, Ints]:
    """`cost.cut_figures` for many pairs of slots at once: the distinct ones, and which one is each pair's.

    A row `(latency, per byte, busy)` for each distinct one.

    Microbatches with one remainder modulo g = gcd(m, k) go from every sender with that remainder to every
    receiver with it, each pair once in lcm(m, k) routes: counting ranks by unit and remainder is enough.
    Pairs that lie alike in the units of all levels have the same figures and are counted once.
    """
    if not pairs.size:
        return np.zeros((0, 3)), np.zeros(0, dtype=np.intp)
    length = np.array([len(members) for members in ranks])
    offset = np.cumsum(length) - length
    units = np.concatenate(ranks) // cluster.levels[0].ranks
    period = cluster.levels[-2].ranks // cluster.levels[0].ranks if len(cluster.levels) > 1 else 1
    low, high = np.minimum.reduceat(units, offset), np.maximum.reduceat(units, offset)
    shapes: dict[tuple[bytes, int], int] = {}
    relative = units - np.repeat(low, length)
    shape = np.array(
        [
            shapes.setdefault((relative[first : first + m].tobytes(), phase), len(shapes))
            for first, m, phase in zip(offset.tolist(), length.tolist(), (low % period).tolist(), strict=True)
        ]
    )
    senders, receivers = pairs
    distance = low[receivers] - low[senders]
    distance -= distance.min()
    key = (shape[senders] * len(shapes) + shape[receivers]) * (distance.max() + 1) + distance
    _, example, inverse = np.unique(key, return_index=True, return_inverse=True)
    base = np.minimum(low[senders], low[receivers])[example] // period * period
    width = np.maximum(high[senders], high[receivers])[example] - base + 1
    width = -(-width // period) * period
    routes = _Routes(cluster, units, length, offset, senders[example], receivers[example], base, width)
    lcm = np.lcm(length[senders[example]], length[receivers[example]])
    fewest = np.minimum(length[senders[example]], length[receivers[example]])
    in_a_row = num_microbatches / fewest if asynchronous else -(-num_microbatches // fewest) - 1.0
    figures = np.zeros((3, len(example)))
    busy = np.zeros(len(example))
    for level, busiest in zip(cluster.levels, routes.busiest(), strict=True):
        occurs = busiest > 0
        figures[0] = np.maximum(figures[0], occurs * level.latency_seconds)
        figures[1] = np.maximum(figures[1], occurs / level.bandwidth)
        if level.shared_bandwidth is not None:
            messages = num_microbatches * busiest / lcm - (not asynchronous) * 1.0
            busy = np.maximum(busy, np.maximum(messages, 0.0) / level.shared_bandwidth)
    figures[2] = np.maximum(busy, in_a_row * figures[1])
    distinct, row = np.unique(figures.T, axis=0, return_inverse=True)
    return distinct, row.reshape(-1)[inverse.reshape(-1)]


class _Routes:
    """Counts of routes between the ranks of pairs of slots, by level of the cluster."""

    def __init__(
        self,
        cluster: Cluster,
        units: Ints,
        length: Ints,
        offset: Ints,
        senders: Ints,
        receivers: Ints,
        base: Ints,
        width: Ints,
    ) -> None:
        self.sizes = [level.ranks // cluster.levels[0].ranks for level in cluster.levels]
        self.sizes[-1] = 0  # whatever the window shows is one unit of the outermost level
        self.units, self.length, self.offset = units, length, offset
        self.senders, self.receivers, self.base, self.width = senders, receivers, base, width

    def busiest(self) -> Floats:
        """`[level, pair]`: the most routes over the link of one unit into the level, either way."""
        found = np.zeros((len(self.sizes), len(self.senders)))
        for g, width, chunk in self._chunks():
            outgoing = self._by_remainder(self.senders[chunk], g, width, self.base[chunk])
            incoming = self._by_remainder(self.receivers[chunk], g, width, self.base[chunk])
            both = np.stack([outgoing, incoming])
            other = both[::-1]
            found[0, chunk] = np.where(both > 0, other, 0).max(axis=(0, 2, 3))
            for level in range(1, len(self.sizes)):
                below, unit = self.sizes[level - 1], self.sizes[level] or width
                mine, theirs = (x.reshape(*x.shape[:3], unit and -1, below).sum(-1) for x in (both, other))
                per_unit = theirs.reshape(*theirs.shape[:3], -1, unit // below).sum(-1)
                outside = np.repeat(per_unit, unit // below, axis=-1) - theirs
                found[level, chunk] = (mine * outside).sum(axis=2).max(axis=(0, 2))
        return found

    def _chunks(self) -> Iterator[tuple[int, int, Ints]]:
        """Pairs with the same g, narrow windows first, few enough for the memory."""
        gcd = np.gcd(self.length[self.senders], self.length[self.receivers])
        for g in np.unique(gcd).tolist():
            same = np.flatnonzero(gcd == g)
            same = same[np.argsort(self.width[same], kind="stable")]
            while len(same):
                cells = np.arange(1, len(same) + 1) * self.width[same] * g
                count = max(1, int(np.searchsorted(cells, CHUNK)))
                yield g, int(self.width[same[count - 1]]), same[:count]
                same = same[count:]

    def _by_remainder(self, slots: Ints, g: int, width: int, base: Ints) -> Ints:
        """`[pair, remainder, unit]`: how many of the slot's replicas are there."""
        length = self.length[slots]
        pair = np.repeat(np.arange(len(slots)), length)
        replica = np.arange(len(pair)) - np.repeat(np.cumsum(length) - length, length)
        unit = self.units[self.offset[slots][pair] + replica] - base[pair]
        cells = (pair * g + replica % g) * width + unit
        return np.bincount(cells, minlength=len(slots) * g * width).reshape(len(slots), g, width)
