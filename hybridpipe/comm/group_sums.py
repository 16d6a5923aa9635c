"""Group sums: tensors added up over the groups, by the ranks that have one place in each of them.

Knows MPI and tensors; nothing of rules. Invariant: numbers are added in the order of the groups, so that the
sum is the same on all ranks bit for bit, whichever part of a tensor a rank adds up.
"""

import time

import torch
from torch import Tensor

from hybridpipe.comm.groups import WatchedComm
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.training_group import TrainingGroup

PIECE_ELEMENTS = 2**24  # of a tensor at a time, which bounds the memory for copies
PAUSES_SECONDS = 5e-5, 2e-3  # between two polls, at first and at most: computing goes on meanwhile


class GroupSums:
    """Adds up tensors over all groups.

    Making one is collective over all ranks.

    Attributes:
        ranks: those at this place, counted as the group's own are.
        count: number of groups.
        is_asked: False, as no group of a job comes later.
        bytes_sent: by this rank to other groups so far.
    """

    def __init__(self, group: TrainingGroup) -> None:
        made = group.everyone.Split(group.world.rank, group.index)
        self._peers = WatchedComm(made, group.everyone, group.first_rank)
        self._replicas: MPI.Comm | None = None
        self.ranks, self.count = self._peers.ranks, group.count
        self.is_asked, self.bytes_sent = False, 0

    def divide(self, replicas: MPI.Comm) -> None:
        """Let each of the ranks that have the same tensors send a part of them only. Collective over them."""
        self._replicas = MPI.Intracomm(replicas).Dup()

    def begin(self, takes_part: bool, plan: str) -> None:
        """Begin to add up; there is nothing to agree on, as each place has its ranks."""

    def join(self, step: int) -> Tensor | None:
        """Return None, as all groups have begun with one centre."""
        return None

    def give(self, centre: Tensor) -> None:
        """Refuse, as no group of a job comes later and asks."""
        raise AssertionError("groups of one job have begun with one centre")

    def leave(self) -> None:
        """Leave nobody: the groups of a job stay together."""

    def add_up(self, tensor: Tensor) -> Tensor:
        """Add the other groups' numbers to a tensor's. Collective over the ranks at this place.

        Args:
            tensor: one-dimensional, contiguous and on the CPU; it is changed in place and returned.
        """
        for start in range(0, len(tensor), PIECE_ELEMENTS):
            piece = tensor[start : start + PIECE_ELEMENTS]
            piece.copy_(self._sum(piece))
        return tensor

    def _sum(self, piece: Tensor) -> Tensor:
        count, several, index = self._peers.size, 1, 0
        if self._replicas is not None:
            several, index = self._replicas.size, self._replicas.rank
        share = -(-len(piece) // (count * several))
        padded = piece.new_zeros(several, count, share)
        padded.view(-1)[: len(piece)] = piece
        own, theirs = padded[index], piece.new_empty(count, share)
        _complete(self._peers.Ialltoall(_bytes(own), _bytes(theirs)))
        total = theirs[0].clone()
        for numbers in theirs[1:]:
            total += numbers
        _complete(self._peers.Iallgather(_bytes(total), _bytes(theirs)))
        self.bytes_sent += 2 * (count - 1) * total.nbytes
        if self._replicas is None:
            return theirs.view(-1)[: len(piece)]
        _complete(self._replicas.Iallgather(_bytes(theirs), _bytes(padded)))
        return padded.view(-1)[: len(piece)]

    def free(self) -> None:
        """Free the communicators. Collective over the ranks at this place."""
        self._peers.Free()
        if self._replicas is not None:
            self._replicas.Free()


def _bytes(tensor: Tensor) -> list[object]:
    return [tensor.view(-1).view(torch.uint8).numpy(), MPI.BYTE]


def _complete(request: MPI.Request) -> None:
    """Wait without holding a core, in any thread."""
    pause, longest = PAUSES_SECONDS
    while not request.Test():
        time.sleep(pause)
        pause = min(2 * pause, longest)
