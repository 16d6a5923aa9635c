"""Training group: the ranks that train one copy of the model, among groups that exchange weights seldom.

Knows MPI only. Invariant: groups are as large as each other and follow one another in the world, so that the
ranks of a site, which launchers number in a row, are in few groups.
"""

import os
from dataclasses import dataclass

from hybridpipe.comm.mpi import MPI
from hybridpipe.config.options import GroupOptions
from hybridpipe.environment import GROUP_OF_JOB
from hybridpipe.errors import UserError


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """The group that this rank is in.

    Args:
        world: the ranks of this group.
        everyone: the ranks of all groups; `world` itself if there is one.
        index: of the group, from 0.
        options: the number of groups, what they exchange, and when.
        meeting: the address where groups that are jobs of their own exchange; empty for groups of one job.
    """

    world: MPI.Comm
    everyone: MPI.Comm
    index: int = 0
    options: GroupOptions = GroupOptions()
    meeting: str = ""

    @property
    def tells(self) -> bool:
        """True in a group whose figures are taken: the first of a job."""
        return not self.index or bool(self.meeting)

    @property
    def leads(self) -> bool:
        """True on rank 0 of the job, which writes files and prints."""
        return self.everyone.rank == 0

    @property
    def folder_index(self) -> int:
        """The index by which folders differ that groups of one job write to."""
        return 0 if self.meeting else self.index

    @property
    def first_rank(self) -> int:
        """Rank of this group's first rank among all."""
        return self.everyone.rank - self.world.rank

    def share_of(self, name: str, samples: int) -> int:
        """Return the samples of a minibatch that each group trains on.

        Args:
            name: of the number, for the message.

        Raises:
            UserError: the groups do not divide them.
        """
        count = self.options.count
        if samples % count:
            raise UserError(f"{name} must be a multiple of groups.count = {count}, got {samples}")
        return samples // count

    def seed(self, seed: int) -> int:
        """Return a seed for this group's layers, as groups must not draw alike; the first has the user's."""
        return (seed + self.index * _STRIDE + 2**63) % 2**64 - 2**63

    def free(self) -> None:
        """Free the group's own communicator. Collective over the group."""
        if self.world is not self.everyone:
            self.world.Free()


_STRIDE = 0x9E3779B97F4A7C15  # no small multiple of it comes near another seed


def training_group(everyone: MPI.Comm, options: GroupOptions) -> TrainingGroup:
    """Return this rank's group, which is its whole job if `hybridpipe launch --groups` says so. Collective.

    Raises:
        UserError: the groups do not divide the ranks, or are not as many as were launched.
    """
    count = options.count
    if launched := os.environ.get(GROUP_OF_JOB):
        number, of_job, meeting = launched.split(" ")
        if int(of_job) != count:
            raise UserError(f"groups.count must be that of launch --groups, {of_job}, got {count}")
        if options.fragments > 1 or options.delay:
            raise UserError("groups of launch --groups exchange all at once: leave fragments and delay out")
        return TrainingGroup(everyone, everyone, int(number), options, meeting)
    if everyone.size % count:
        raise UserError(f"groups.count must divide the number of ranks, {everyone.size}, got {count}")
    index = everyone.rank // (everyone.size // count)
    return TrainingGroup(everyone if count == 1 else everyone.Split(index), everyone, index, options)
