"""ShardedSync: sums gradients over a stage's replicas, of which each keeps the part that it updates.

Knows parameters, their shares and collectives; no schedule. Source: ZeRO (Rajbhandari et al., SC 2020).
Invariant: a replica's part gets the sum that an all-reduce would give its elements; none without a gradient.
"""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from hybridpipe.collectives.protocol import Collectives
from hybridpipe.comm.communicators import WatchedComm
from hybridpipe.optim.gradient_sync import MOST_ELEMENTS, Bucket, BucketSync, filled
from hybridpipe.optim.shares import FlatBucket, ReplicaShares
from hybridpipe.planning.checks import NO_COMPRESSION

MOST_IN_FLIGHT = 2  # buckets under way in a backward where gradients are freed


class TakenBucket(Bucket):
    """A bucket that gives each part its gradient, and frees the others, as soon as the sums are there."""

    def __init__(self, name: str, parameters: list[Tensor], shares: ReplicaShares, halves: bool) -> None:
        super().__init__(name, parameters, halves=halves)
        self._shares = shares

    def finish(self) -> None:
        """Wait for the sums, and move this replica's to its parts."""
        super().finish()
        self._shares.take(self.parameters)


class ScatteredBucket(Bucket):
    """A bucket that a reduce-scatter sums: one row of gradients for each replica, and how many had one.

    Args:
        flat: the bucket's weights; some of its parameters may be frozen.
    """

    what = "reduce-scatter"

    def __init__(
        self, name: str, parameters: list[Tensor], shares: ReplicaShares, flat: FlatBucket, halves: bool
    ) -> None:
        super().__init__(name, parameters)
        self._shares, self._layout = shares, flat.layout
        dtype = parameters[0].dtype
        wide = torch.float32 if dtype == torch.bfloat16 else dtype  # some backends have no sum of bfloat16
        self._dtype = torch.float16 if halves and dtype == torch.float32 else wide
        self._index = {p: i for i, p in enumerate(flat.parameters)}
        self._ranges = flat.ranges

    def start(self, collectives: Collectives) -> None:
        """Start the reduction of the present gradients, which are dropped. Collective over the replicas."""
        layout, share = self._layout, self._layout.share
        size = layout.replicas, share + len(self.parameters)
        rows = torch.zeros(size, dtype=self._dtype, device=self.parameters[0].device)
        for column, p in enumerate(self.parameters, start=share):
            if p.grad is None:
                continue
            rows[:, column] = 1
            dense = p.grad if p.grad.layout == torch.strided else p.grad.to_dense()
            gradient, at = dense.detach().reshape(-1), layout.offsets[self._index[p]]
            for replica, row in enumerate(rows):
                part = layout.part(self._index[p], replica)
                if part:
                    begin = at + part.start - replica * share
                    row[begin : begin + len(part)] = gradient[part.start : part.stop]
            p.grad = None
        self.num_bytes = rows.nbytes
        self.handle = collectives.reduce_scatter(rows, self.name)

    def finish(self) -> None:
        """Wait for this replica's row, and give its gradients to the parts."""
        assert self.handle is not None
        (rows,) = self.handle.wait()
        row, share = rows[0], self._layout.share
        for p, count in zip(self.parameters, row[share:].tolist(), strict=True):
            part = self._ranges[p]
            if count and part:
                # a part that does not begin its parameter begins the share
                begin = 0 if part.start else self._layout.offsets[self._index[p]] % share
                self._shares.add(p, row[begin : begin + len(part)].to(p.dtype))
        self.handle, self.is_reduced = None, True


class ShardedSync(BucketSync):
    """Reductions over the stage's replicas, whose sums go to the parts that a replica updates.

    Sums that are needed whole are reduced by an all-reduce, and only when the gradients are complete: those
    of whole parameters, of complex ones and of those that other stages or several chunks use.
    `ReplicaShares.take` moves them to the parts after the exchange with other stages.

    Args:
        shares: of the stage's parameters.
        scatters: reduce by reduce-scatters.
        frees: reduce after each backward, and free what another replica updates.
        shared: parameters that ranks of other stages hold as well.
        compression, sparse, late: as for `BucketSync`.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        replicas: WatchedComm,
        collectives: Collectives,
        shares: ReplicaShares,
        scatters: bool,
        frees: bool,
        shared: Collection[Tensor] = (),
        compression: str = NO_COMPRESSION,
        sparse: Collection[Tensor] = (),
        late: Collection[Tensor] = (),
    ) -> None:
        self._shares, self._scatters, self._frees = shares, scatters, frees
        self._shared = frozenset(shared)
        super().__init__(parameters, replicas, collectives, compression, sparse, late)

    def renew(self) -> None:
        """Adopt the present requires_grad in buckets and parts. Collective over the replicas."""
        self._shares.renew()
        super().renew()

    def _make_buckets(self, trained: Sequence[Tensor]) -> list[Bucket]:
        if not self._scatters and not self._frees:
            return super()._make_buckets(trained)
        parts = [p for p in trained if self._is_for_parts(p)]
        buckets = self._scattered(parts) if self._scatters else self._taken(parts)
        place = {p: i for i, p in enumerate(trained)}  # the parameter that comes first fills a bucket
        buckets.sort(key=lambda bucket: -min(place[p] for p in bucket.parameters))
        others = super()._make_buckets([p for p in trained if p not in set(parts)])
        for bucket in others:
            bucket.waits = self._frees
        return buckets + others

    def _is_for_parts(self, p: Tensor) -> bool:
        """Return True if only the sums of this replica's elements are needed."""
        small = p.numel() <= MOST_ELEMENTS
        sharded = p in self._shares.ranges and p not in self._late and p not in self._shared
        return sharded and small and not p.is_complex()

    def _scattered(self, parameters: Collection[Tensor]) -> list[Bucket]:
        wanted = set(parameters)
        found: list[Bucket] = []
        for i, flat in enumerate(self._shares.buckets):
            members = [p for p in flat.parameters if p in wanted]
            if members:
                found.append(ScatteredBucket(f"scattered{i}", members, self._shares, flat, self._halves))
        return found

    def _taken(self, parameters: Sequence[Tensor]) -> list[Bucket]:
        buckets = enumerate(filled(parameters))
        return [TakenBucket(f"taken{i}", members, self._shares, self._halves) for i, members in buckets]

    def _full(self, bucket: Bucket) -> None:
        """Start a bucket that a backward has filled, and wait for others if too many are under way.

        All replicas start and wait in one order, so that none waits for a bucket that another cannot start:
        one with a parameter that has no gradient there is started by `finish`.
        """
        if not self._frees:
            super()._full(bucket)
            return
        for each in self._in_turn():
            self._start(each)
            under_way = [other for other in self._buckets if other.handle is not None]
            for oldest in under_way[:-MOST_IN_FLIGHT]:
                self._finish(oldest)
