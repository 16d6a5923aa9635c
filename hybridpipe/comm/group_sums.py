"""Group sums: tensors added up over the groups, by the ranks that have one place in each of them.

Knows MPI and tensors; nothing of rules. Invariant: numbers are added in the order of the groups, so that the
sum is the same on all ranks bit for bit, whichever part of a tensor a rank adds up.
"""

import time

import torch
from torch import Tensor

from hybridpipe.comm.communicators import WatchedComm
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.training_group import TrainingGroup

PIECE_ELEMENTS = 2**22  # of a tensor at a time, which bounds the memory for copies
PAUSES_SECONDS = 5e-5, 2e-3  # between two polls, at first and at most: computing goes on meanwhile


class SumsOverGroups:
    """Base of what adds up tensors over the groups that are there; `_sum` is its own in each.

    Attributes:
        ranks: those that add up together, counted as the group's own are; none that are other jobs'.
        count: number of groups in the last sum.
        is_asked: groups have come that need this rank's centre (`give`); never within a job.
        bytes_sent: by this rank to other groups so far.
    """

    is_asked = False

    def __init__(self, count: int, ranks: tuple[int, ...] = ()) -> None:
        self.count, self.ranks, self.bytes_sent = count, ranks, 0
        self._replicas: MPI.Intracomm | None = None

    def divide(self, replicas: MPI.Comm) -> None:
        """Let each of the ranks that have the same tensors send a part of them only. Collective over them."""
        self._replicas = MPI.Intracomm(replicas).Dup()

    def add_up(self, tensor: Tensor) -> Tensor:
        """Add the other groups' numbers to a tensor's. Collective over the ranks at this place.

        Args:
            tensor: one-dimensional, contiguous, on the CPU, of float32 or float64; it is changed in place and
                returned.
        """
        if self._replicas is None:
            self._sum(tensor)
            return tensor
        share = -(-len(tensor) // self._replicas.size)
        padded = tensor.new_zeros(self._replicas.size, share)
        padded.view(-1)[: len(tensor)] = tensor
        own = padded[self._replicas.rank]
        self._sum(own)
        complete(self._replicas.Iallgather(MPI.IN_PLACE, buffer(padded)))
        return tensor.copy_(padded.view(-1)[: len(tensor)])

    def _sum(self, tensor: Tensor) -> None:
        """Add the other groups' numbers to what this rank sends, in place."""
        raise NotImplementedError

    def join(self, step: int, plan: str, takes_part: bool) -> Tensor | None:
        """Come to the other groups; return their centre, flat, or None if this rank has it. Collective.

        Args:
            step: minibatches trained on: where no group is there yet, all take the centre of the furthest.
            plan: the same text in all groups.
            takes_part: False on a rank that has no centre.
        """
        return None  # groups of one job have begun together

    def give(self, centre: Tensor) -> None:
        """Send this rank's centre, flat, for groups that come."""

    def leave(self) -> None:
        """Say that this rank's training has ended."""

    def free(self) -> None:
        """Leave, and free the communicators. Collective over the ranks at this place."""
        self.leave()
        if self._replicas is not None:
            self._replicas.Free()


class GroupSums(SumsOverGroups):
    """Adds up tensors over all groups of a job. Making one is collective over all ranks."""

    def __init__(self, group: TrainingGroup) -> None:
        made = group.everyone.Split(group.world.rank, group.index)
        self._peers = WatchedComm(made, group.everyone, group.first_rank)
        super().__init__(group.options.count, self._peers.ranks)

    def free(self) -> None:
        """Free the communicators. Collective over the ranks at this place."""
        super().free()
        self._peers.Free()

    def _sum(self, tensor: Tensor) -> None:
        for at in range(0, len(tensor), PIECE_ELEMENTS):
            self._sum_piece(tensor[at : at + PIECE_ELEMENTS])

    def _sum_piece(self, piece: Tensor) -> None:
        """Add up an equal part of each group, then gather the parts."""
        share = -(-len(piece) // self.count)
        own = piece.new_zeros(self.count, share)
        own.view(-1)[: len(piece)] = piece
        theirs = torch.empty_like(own)
        complete(self._peers.Ialltoall(buffer(own), buffer(theirs)))
        total = theirs[0].clone()
        for numbers in theirs[1:]:
            total += numbers
        complete(self._peers.Iallgather(buffer(total), buffer(theirs)))
        self.bytes_sent += 2 * (self.count - 1) * total.nbytes
        piece.copy_(theirs.view(-1)[: len(piece)])


def content(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, which share its memory."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def buffer(tensor: Tensor) -> list[object]:
    """Return a contiguous tensor on the CPU for MPI, which reads or writes its memory."""
    return [content(tensor), MPI.BYTE]


def complete(request: MPI.Request) -> None:
    """Wait without holding a core, in any thread."""
    pause, longest = PAUSES_SECONDS
    while not request.Test():
        time.sleep(pause)
        pause = min(2 * pause, longest)
