"""Cut figures: the cost of moving microbatches over cuts, for many pairs of stages at once.

Not known here: layers, and the choice of pairs. Invariant: microbatch b goes from replica b mod m of one
stage to replica b mod k of the next, so routes repeat after lcm(m, k) microbatches.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridpipe.planning.cluster import Cluster

Ints = NDArray[np.intp]
Floats = NDArray[np.float64]

CHUNK = 2**21  # numbers held at once while the routes of many cuts are counted


def cut_figures(
    cluster: Cluster,
    ranks: Sequence[Sequence[int] | Ints],
    pairs: Ints,
    num_microbatches: int,
    asynchronous: bool = False,
) -> Floats:
    """Return the figures of the cut between each pair of stages, shape (4, pairs).

    The rows, in seconds and seconds per byte:

    - the latency of one message, over the slowest of the routes that occur;
    - the time of each of its bytes, over the slowest of them, while the messages of all senders share ports
      and links: replicas end a forward at the same time;
    - the time that each byte of a message adds to the busiest port or shared link in a minibatch. All
      messages count under an asynchronous schedule, all after the first where the schedule flushes;
    - the time of each byte of a message that is alone.

    A shared link carries the microbatches whose route crosses it. A rank's own port carries those that the
    rank handles.

    Args:
        ranks: of each stage, in the order of the replicas.
        pairs: indices into `ranks`, of the senders of activations and of the receivers, shape (2, pairs).
        num_microbatches: of a minibatch.
    """
    return _figures(cluster, _Routes(cluster, ranks), pairs, num_microbatches, asynchronous)


def _figures(
    cluster: Cluster, routes: "_Routes", pairs: Ints, num_microbatches: int, asynchronous: bool
) -> Floats:
    if not pairs.size:
        return np.zeros((4, 0))
    lengths = routes.lengths[pairs]
    fewest, period, a_round = lengths.min(axis=0), np.lcm(*lengths), lengths[0]
    flushed = 0.0 if asynchronous else 1.0
    if not asynchronous:
        a_round = np.minimum(a_round, num_microbatches)
    in_a_row = num_microbatches / fewest if asynchronous else -(-num_microbatches // fewest) - flushed
    figures = np.zeros((4, pairs.shape[1]))
    latency, per_byte, busy, alone = figures
    together = np.zeros(pairs.shape[1])  # seconds per byte of a round on a shared link
    for level, busiest in zip(cluster.levels, routes.busiest(pairs), strict=True):
        occurs = busiest > 0
        np.maximum(latency, occurs * level.latency_seconds, out=latency)
        np.maximum(alone, occurs / level.bandwidth, out=alone)
        if level.shared_bandwidth is not None:
            messages = np.maximum(num_microbatches * busiest / period - flushed, 0.0)
            np.maximum(busy, messages / level.shared_bandwidth, out=busy)
            np.maximum(together, a_round * busiest / period / level.shared_bandwidth, out=together)
    np.maximum(busy, in_a_row * alone, out=busy)
    np.maximum(-(-a_round // lengths[1]) * alone, together, out=per_byte)
    return figures


def distinct_cut_figures(
    cluster: Cluster, ranks: Sequence[Ints], pairs: Ints, num_microbatches: int, asynchronous: bool
) -> tuple[Floats, Ints]:
    """Return the distinct `cut_figures`, shape (distinct, 4), and the row of each pair.

    Pairs whose ranks have the same positions in the units of all levels are counted once.
    """
    if not pairs.size:
        return np.zeros((0, 4)), np.zeros(0, dtype=np.intp)
    routes = _Routes(cluster, ranks)
    relative = routes.units - np.repeat(routes.low, routes.lengths)
    shapes: dict[tuple[bytes, int], int] = {}
    shape = np.array(
        [
            shapes.setdefault((relative[first : first + m].tobytes(), phase), len(shapes))
            for first, m, phase in zip(
                routes.offsets.tolist(),
                routes.lengths.tolist(),
                (routes.low % routes.period).tolist(),
                strict=True,
            )
        ]
    )
    senders, receivers = pairs
    distance = routes.low[receivers] - routes.low[senders]
    distance -= distance.min()
    key = (shape[senders] * len(shapes) + shape[receivers]) * (distance.max() + 1) + distance
    _, example, inverse = np.unique(key, return_index=True, return_inverse=True)
    figures = _figures(cluster, routes, pairs[:, example], num_microbatches, asynchronous)
    distinct, row = np.unique(figures.T, axis=0, return_inverse=True)
    return distinct, row.reshape(-1)[inverse.reshape(-1)]


class _Routes:
    """Counts of the routes between stages, by level of the cluster.

    Microbatches with one remainder modulo g = gcd(m, k) go from every sender with that remainder to every
    receiver with it, each pair once in lcm(m, k) routes. Counting ranks by innermost unit and remainder is
    therefore enough.
    """

    def __init__(self, cluster: Cluster, ranks: Sequence[Sequence[int] | Ints]) -> None:
        innermost = cluster.levels[0].ranks
        self.sizes = [level.ranks // innermost for level in cluster.levels]
        self.period = self.sizes[-2] if len(self.sizes) > 1 else 1
        self.lengths = np.array([len(members) for members in ranks])
        self.offsets = np.cumsum(self.lengths) - self.lengths
        self.units = np.concatenate(ranks) // innermost
        self.low = np.minimum.reduceat(self.units, self.offsets)
        self.high = np.maximum.reduceat(self.units, self.offsets)

    def busiest(self, pairs: Ints) -> Floats:
        """Return the most routes over one unit's link into each level, either way, shape (levels, pairs)."""
        found = np.zeros((len(self.sizes), pairs.shape[1]))
        base = self.low[pairs].min(axis=0) // self.period * self.period
        width = -((base - self.high[pairs].max(axis=0) - 1) // self.period) * self.period
        gcd = np.gcd(*self.lengths[pairs])
        for chunk in _chunks(gcd, width):
            both = self._counts(pairs[:, chunk], gcd[chunk], base[chunk], int(width[chunk].max()))
            other = both[::-1]
            found[0, chunk] = np.where(both > 0, other, 0).max(axis=(0, 2, 3))
            for level in range(1, len(self.sizes)):
                below, unit = self.sizes[level - 1], self.sizes[level]
                if level == len(self.sizes) - 1:
                    unit = both.shape[-1]  # all that the window shows is one unit of the outermost level
                mine, theirs = (x.reshape(*x.shape[:3], -1, below).sum(-1) for x in (both, other))
                per_unit = theirs.reshape(*theirs.shape[:3], -1, unit // below).sum(-1)
                outside = np.repeat(per_unit, unit // below, axis=-1) - theirs
                found[level, chunk] = (mine * outside).sum(axis=2).max(axis=(0, 2))
        return found

    def _counts(self, pairs: Ints, gcd: Ints, base: Ints, width: int) -> Ints:
        """Return the ranks of each remainder and unit, shape (2, pairs, largest gcd, width)."""
        stages, num_remainders = pairs.reshape(-1), int(gcd.max())
        lengths = self.lengths[stages]
        stage = np.arange(len(stages)).repeat(lengths)
        replica = np.arange(len(stage)) - (lengths.cumsum() - lengths).repeat(lengths)
        pair = stage % len(gcd)
        unit = self.units[self.offsets[stages][stage] + replica] - base[pair]
        cells = (stage * num_remainders + replica % gcd[pair]) * width + unit
        counts = np.bincount(cells, minlength=len(stages) * num_remainders * width)
        return counts.reshape(*pairs.shape, num_remainders, width)


def _chunks(gcd: Ints, width: Ints) -> Iterator[Ints]:
    """Yield the pairs in groups of similar gcd and width, few enough for the memory."""
    if gcd.max() * width.max() * len(gcd) <= CHUNK // 64:
        yield np.arange(len(gcd))
        return
    for g in np.unique(gcd).tolist():
        same = np.flatnonzero(gcd == g)
        same = same[np.argsort(width[same], kind="stable")]
        while len(same):
            cells = np.arange(1, len(same) + 1) * width[same] * g
            count = max(1, int(np.searchsorted(cells, CHUNK)))
            yield same[:count]
            same = same[count:]
