"""Communicators of a plan, each a private duplicate, so that no traffic mixes.

Every function takes its communicator as an argument; none uses MPI.COMM_WORLD.
Invariant: a blocking call of a `WatchedComm` is entered in `status`, where the watchdog finds it.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple

from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.status import rank_status
from hybridpipe.environment import cores
from hybridpipe.planning.plan import Place, Plan

AXES = ("replica",)  # of `Place`, along which ranks compute together; stages send point to point


class Communicators(NamedTuple):
    """The communicators of one rank.

    Args:
        control: all ranks, for losses, plans and state.
        peers: all ranks, for activations and gradients between stages.
        used: the ranks that the plan uses; None on the others.
        along: by the name of an axis of `Place`, the ranks whose places differ in it only, ordered by rank,
            so that Horovod's ring visits each host once; empty on an unused rank.
        split: by the name of an axis, the ranks along it once more that run every pass together, in the order
            of their numbers, for what they exchange in it: tokens of experts or sums of BatchNorm among
            replicas, sums among shards. Axes along which none do in the plan are missing.
    """

    control: "WatchedComm"
    peers: MPI.Comm
    used: "WatchedComm | None"
    along: Mapping[str, "WatchedComm"]
    split: Mapping[str, "WatchedComm"]

    def free(self) -> None:
        """Free the communicators. Collective."""
        of_some = (self.used, *self.along.values(), *self.split.values())
        for communicator in (self.control, self.peers, *of_some):
            if communicator is not None:
                communicator.Free()


class WatchedComm(MPI.Intracomm):
    """A communicator whose blocking calls are entered in this rank's status while they last."""

    ranks: tuple[int, ...]  # its members' ranks in the world

    def __new__(cls, communicator: MPI.Comm, world: MPI.Comm, first: int = 0) -> "WatchedComm":
        """Make another handle of a communicator.

        Args:
            first: the rank in `world` from which its members are counted.
        """
        made = super().__new__(cls, communicator)
        mine, everybody = communicator.Get_group(), world.Get_group()
        made.ranks = tuple(rank - first for rank in MPI.Group.Translate_ranks(mine, None, everybody))
        mine.Free()
        everybody.Free()
        return made


def _watched(name: str) -> Callable[..., Any]:
    blocking = getattr(MPI.Intracomm, name)

    @wraps(blocking)
    def call(self: WatchedComm, *arguments: Any, **options: Any) -> Any:
        with rank_status.waiting(name, self.ranks):
            return blocking(self, *arguments, **options)

    return call


_NAMES = "Barrier Bcast bcast Allreduce allreduce gather allgather alltoall Send Recv"
for _name in _NAMES.split():
    setattr(WatchedComm, _name, _watched(_name))


def communicators(world: MPI.Comm, plan: Plan) -> Communicators:
    """Make the communicators of a plan. Collective over `world`."""
    with rank_status.waiting("making communicators", range(world.size)):
        return _split(world, plan)


def _split(world: MPI.Comm, plan: Plan) -> Communicators:
    places = [plan.place(rank) for rank in range(world.size)]

    def differing_in(*axes: str, by_place: bool = False) -> WatchedComm | None:
        """Return the ranks whose places differ in these axes at most; None on an unused rank.

        Args:
            by_place: they are ordered by place, not by rank, and replicas are those that run together.
        """
        rest = [place and _without(plan, place, axes, by_place) for place in places]
        own, place = rest[world.rank], places[world.rank]
        key = getattr(place, axes[0]) if by_place and place is not None else world.rank
        made = world.Split(color=MPI.UNDEFINED if own is None else rest.index(own), key=key)
        return None if own is None else WatchedComm(made, world)

    def present(made: Mapping[str, WatchedComm | None]) -> dict[str, WatchedComm]:
        return {axis: each for axis, each in made.items() if each is not None}

    together = max(map(plan.together, range(plan.num_stages)))
    splits = {"replica": together > 1, "shard": plan.splits_tensors}
    return Communicators(
        control=WatchedComm(world.Dup(), world),
        peers=world.Dup(),
        used=differing_in(*Place._fields),
        along=present({axis: differing_in(axis) for axis in AXES}),
        split=present({axis: differing_in(axis, by_place=True) for axis, does in splits.items() if does}),
    )


def _without(plan: Plan, place: Place, axes: Sequence[str], together: bool) -> Place:
    """Return what places that differ in these axes have in common.

    Args:
        together: replicas that do not run every pass together differ also otherwise.
    """
    rest = place._replace(**dict.fromkeys(axes, 0))
    if together and "replica" in axes:
        return rest._replace(replica=place.replica // plan.together(place.stage))
    return rest


class Host(NamedTuple):
    """This rank's index among the ranks of its host, their number, and their number of cores together."""

    local_rank: int
    local_size: int
    num_cores: int


def this_host(world: MPI.Comm) -> Host:
    """Describe this rank's host. Collective over `world`."""
    ranks = world.Split_type(MPI.COMM_TYPE_SHARED)
    num_cores = len(frozenset().union(*ranks.allgather(cores())))  # ranks may be bound to different cores
    host = Host(ranks.rank, ranks.size, num_cores)
    ranks.Free()
    return host


def barrier_with_timeout(world: MPI.Comm, seconds: float) -> None:
    """Wait until all ranks of `world` have called this, at most `seconds`, since a lost rank never does."""
    barrier = world.Ibarrier()
    end = time.monotonic() + seconds
    while not barrier.Test() and time.monotonic() < end:
        time.sleep(1e-3)


def default_num_threads(host: Host) -> int | None:
    """Return the number of compute threads for a rank; None if OMP_NUM_THREADS sets it."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, min(len(cores()), host.num_cores // host.local_size))
