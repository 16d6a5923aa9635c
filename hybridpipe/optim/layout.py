"""Layout: which elements of a bucket of parameters each replica of a stage updates. Pure arithmetic.

Knows numbers of elements; no tensors and no messages. Source: ZeRO (Rajbhandari et al., SC 2020, section 5).
Invariant: each element belongs to one replica, and a part begins at a multiple of UNIT elements of its
parameter, so that a vectorised kernel rounds each element as it does over the whole parameter. Parameters
may be dealt whole.
"""

from collections.abc import Sequence
from itertools import accumulate

UNIT = 16  # elements; torch's CPU kernels divide a tensor at multiples of a cache line or less


def padded(count: int) -> int:
    """Return a number of elements rounded up to a multiple of UNIT."""
    return -(-count // UNIT) * UNIT


class ShardLayout:
    """Parameters one after the other in a flat buffer of as many equal shares as there are replicas.

    Args:
        counts: elements of each parameter.
        held: elements that each replica has of other buckets. If they are given, each parameter lies in one
            share: the largest come first, each goes where this bucket has least, then to who holds least.

    Attributes:
        offsets: of each parameter in the buffer.
        share: elements of a replica's share; shares may be padding in part.
    """

    def __init__(self, counts: Sequence[int], replicas: int, held: Sequence[int] | None = None) -> None:
        self._counts, self.replicas = tuple(counts), replicas
        sizes = [*map(padded, counts)]
        if held is not None:
            here, places = [0] * replicas, dict[int, tuple[int, int]]()
            for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
                owner = min(range(replicas), key=lambda r: (here[r], held[r]))
                places[i] = owner, here[owner]
                here[owner] += sizes[i]
            self.share = max(here)
            self.offsets = tuple(places[i][0] * self.share + places[i][1] for i in range(len(sizes)))
            return
        *offsets, total = accumulate(sizes, initial=0)
        self.offsets = tuple(offsets)
        self.share = padded(-(-total // replicas))

    def held(self, replica: int) -> int:
        """Return the elements of all parameters in a replica's share."""
        return sum(len(self.part(i, replica)) for i in range(len(self._counts)))

    @property
    def size(self) -> int:
        """Elements of the buffer."""
        return self.share * self.replicas

    def part(self, i: int, replica: int) -> range:
        """Return the elements of parameter `i` that lie in a replica's share; perhaps none."""
        start = max(replica * self.share - self.offsets[i], 0)
        return range(start, max(min((replica + 1) * self.share - self.offsets[i], self._counts[i]), start))
