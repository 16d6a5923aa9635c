"""Groups' communicators, and the centre that this rank keeps of its parameters.

Knows one rank's parts; no step. Invariant: ranks at one place of all groups have the same parameters, in the
same order.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from hybridpipe.comm.communicators import Communicators, WatchedComm
from hybridpipe.comm.group_meeting import MeetingSums
from hybridpipe.comm.group_sums import GroupSums
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.training_group import TrainingGroup
from hybridpipe.engine.consistency import plan_text
from hybridpipe.engine.executor import Executor
from hybridpipe.engine.replication import Replication
from hybridpipe.model.held_part import axis_of
from hybridpipe.optim.centre import Centre
from hybridpipe.optim.shares import ReplicaShares
from hybridpipe.optim.update import Update
from hybridpipe.planning.plan import Plan


class BetweenGroups:
    """The communicators over all groups. Making one is collective over all ranks.

    Args:
        own: the communicators of its group.

    Attributes:
        everyone: the ranks of all groups.
        replicas: those that hold the same stages, in all groups; None on a rank that holds none.
    """

    def __init__(self, group: TrainingGroup, own: Communicators) -> None:
        self._group, self._of_stage = group, own.along.get("replica")
        self.everyone, self.replicas = own.control, self._of_stage
        self._sums: GroupSums | MeetingSums = MeetingSums(group) if group.meeting else GroupSums(group)
        self._centre: Centre | None = None
        self._has_joined = False
        self._made = () if group.meeting else self._of_all()

    def _of_all(self) -> tuple[MPI.Comm, ...]:
        """Make the communicators over all groups of the job."""
        group = self._group
        self.everyone = WatchedComm(group.everyone.Dup(), group.everyone, group.first_rank)
        color = MPI.UNDEFINED if self._of_stage is None else min(self._of_stage.ranks)
        made = group.everyone.Split(color)
        if self._of_stage is None:
            return (self.everyone,)
        self.replicas = WatchedComm(made, group.everyone, group.first_rank)
        return self.everyone, self.replicas

    def centre(self, update: Update, tie: Replication, shared: Iterable[Tensor]) -> Centre | None:
        """Make the centre of what this rank updates; None without an optimizer. Collective over the stage.

        Args:
            shared: parameters that ranks of other stages hold as well.
        """
        if update.optimizer is None:
            return None
        parameters = [p for each in update.optimizer.param_groups for p in each["params"]]
        is_alike = tie.shares is None and not any(axis_of(p) == "replica" for p in parameters)
        if is_alike and self._of_stage is not None and self._of_stage.size > 1:
            self._sums.divide(self._of_stage)
        held_twice = [tie.parts[p] for p in shared if p in tie.parts]
        self._centre = Centre(parameters, self._group.options, self._sums, held_twice)
        return self._centre

    def join(self, step: int, plan: Plan, shares: ReplicaShares | None) -> None:
        """Come to the other groups before the first minibatch; later calls do nothing. Collective.

        Args:
            step: minibatches trained on.
        """
        if self._has_joined:
            return
        self._has_joined = True
        if self._centre is not None:
            self._centre.begin()
        trains = f"plan {plan_text(replace(plan, sync=None))}, {self._group.options}"
        given = self._sums.join(step, trains, self._centre is not None)
        if self._centre is not None:
            self._centre.take(given)
            if shares is not None:
                shares.gather()

    def reset(self) -> None:
        """Take the present weights, the same in all groups, as the centre; come to the others once more."""
        if self._centre is not None:
            self._centre.reset()
        self.come_again()

    def come_again(self) -> None:
        """Come to the other groups before the next minibatch, as other weights were loaded."""
        self._sums.leave()
        self._has_joined = False

    def close(self) -> None:
        """Wait for what travels, and free the communicators. Collective over all ranks."""
        if self._centre is not None:
            self._centre.close()
        self._sums.free()
        for each in self._made:
            each.Free()


@contextmanager
def with_centre(executor: Executor) -> Iterator[None]:
    """Let a rank's layers have the weights in common with other groups inside this context. Collective.

    An error may be this rank's alone: then no other one is waited for.
    """
    centre, shares = executor.centre, executor.shares
    if centre is None:
        yield
        return
    with centre.in_place():
        if shares is not None:
            shares.gather()
        yield
    if shares is not None:
        shares.gather()
