"""Replication: how the replicas of a stage sum gradients, and which parameters each of them updates.

Knows a plan, stages and a communicator; no schedule.
Invariant: all replicas of a stage make the same, in the same order.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from hybridpipe.collectives.backends import open_collectives
from hybridpipe.comm.communicators import WatchedComm
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.mpi_transport import MpiTransport
from hybridpipe.comm.status import rank_status
from hybridpipe.health import failure
from hybridpipe.model.held_part import axis_of
from hybridpipe.optim.gradient_sync import BucketSync, GradientSync
from hybridpipe.optim.sharded_sync import ShardedSync
from hybridpipe.optim.shares import ReplicaShares, axes_of
from hybridpipe.optim.update import UpdateRule
from hybridpipe.planning.plan import Place, Plan
from hybridpipe.stage.stage import Stage
from hybridpipe.stage.statistics import RunningStatistics
from hybridpipe.stage.weights import sparse_parameters


class Replication(NamedTuple):
    """The tie between a rank and the other replicas of its stage.

    Args:
        parameters: of all stages that the rank holds.
        sync: None if the stage has one replica.
        shares: None if each replica updates all parameters.
        place: of the rank.
    """

    parameters: Sequence[Tensor]
    sync: GradientSync | None
    shares: ReplicaShares | None
    place: Place

    @property
    def parts(self) -> Mapping[Tensor, Tensor]:
        """The tensor that this rank updates for each parameter of which it updates anything."""
        return {p: p for p in self.parameters} if self.shares is None else self.shares.parts

    def uncounted(self, elsewhere: Collection[Tensor]) -> list[Tensor]:
        """Return what this rank updates and another one counts, so that each element counts once.

        Args:
            elsewhere: parameters that another stage counts.
        """
        others = (part for p, part in self.parts.items() if not self.place.is_first(axes_of(p, self.shares)))
        return [*others, *(self.parts[p] for p in elsewhere if p in self.parts)]


def replication(
    plan: Plan,
    place: Place,
    stages: Sequence[Stage],
    replicas: WatchedComm,
    transport: MpiTransport,
    rule: UpdateRule,
    shared: Collection[Tensor],
) -> Replication:
    """Tie the rank at `place` to the other replicas of its stage. Collective over them.

    Args:
        plan: its `sync` is a backend that all replicas can use.
        stages: those that the rank holds.
        shared: parameters that ranks of other stages hold as well.
    """
    uses = Counter(p for stage in stages for p in stage.module.parameters())
    parameters = list(uses)
    if replicas.size == 1:
        return Replication(parameters, None, None, place)
    assert plan.sync is not None
    with rank_status.waiting(f"start of {plan.sync}", replicas.ranks):
        collectives = open_collectives(plan.sync, replicas, transport, stages[0].device)
    sparse = set().union(*(sparse_parameters(stage.module) for stage in stages))
    late = [p for p, count in uses.items() if count > 1]
    zero, scatters = plan.zero_of(place.stage), plan.scatters(place.stage)
    alike = [p for p in parameters if axis_of(p) != "replica"]
    if not zero:
        sync = BucketSync(alike, replicas, collectives, rule.compression, sparse, late)
        return Replication(parameters, sync, None, place)
    frees = zero == 2
    with failure.guard():  # the user's factory may fail on this rank alone
        whole = rule.needs_whole(parameters)
    shares = ReplicaShares(
        parameters, replicas.rank, replicas.ranks, collectives.all_gather, sparse, whole, frees
    )
    sync = ShardedSync(
        alike, replicas, collectives, shares, scatters, frees, shared, rule.compression, sparse, late
    )
    return Replication(parameters, sync, shares, place)


def average_statistics(statistics: RunningStatistics, replicas: MPI.Comm) -> None:
    """Average running statistics over replicas. Collective over them."""

    def sum_all(tensor: Tensor) -> Tensor:
        total = tensor.clone()
        replicas.Allreduce(MPI.IN_PLACE, total.numpy(), op=MPI.SUM)
        return total

    def from_first(tensor: Tensor) -> Tensor:
        sent = tensor.clone()
        replicas.Bcast(sent.numpy(), 0)
        return sent

    statistics.agree(sum_all, from_first)
