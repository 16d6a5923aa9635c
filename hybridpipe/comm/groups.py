"""Groups: the communicators of a plan, each a private duplicate, so that no traffic mixes.

Every function takes its communicator as an argument; none uses MPI.COMM_WORLD.
Invariant: a blocking call of a `WatchedComm` is entered in `status`, where the watchdog finds it.
"""

import os
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.status import rank_status
from hybridpipe.environment import cores
from hybridpipe.planning.plan import Place, Plan


class Communicators(NamedTuple):
    """The communicators of one rank.

    Args:
        control: all ranks, for losses, plans and state.
        peers: all ranks, for activations and gradients between stages.
        replicas: the ranks of one stage, ordered by rank, so that Horovod's ring visits each host once; None
            on an unused rank.
        used: the ranks that the plan uses; None on the others.
    """

    control: "WatchedComm"
    peers: MPI.Comm
    replicas: "WatchedComm | None"
    used: "WatchedComm | None"

    def free(self) -> None:
        """Free the communicators. Collective."""
        for communicator in self:
            if communicator is not None:
                communicator.Free()


class WatchedComm(MPI.Intracomm):
    """A communicator whose blocking calls are entered in this rank's status while they last."""

    ranks: tuple[int, ...]  # its members' ranks in the world

    def __new__(cls, communicator: MPI.Comm, world: MPI.Comm) -> "WatchedComm":
        """Make another handle of a communicator."""
        made = super().__new__(cls, communicator)
        mine, everybody = communicator.Get_group(), world.Get_group()
        made.ranks = tuple(MPI.Group.Translate_ranks(mine, None, everybody))
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


for _name in ("Barrier", "Bcast", "bcast", "Allreduce", "allreduce", "gather", "allgather", "Send", "Recv"):
    setattr(WatchedComm, _name, _watched(_name))


def communicators(world: MPI.Comm, plan: Plan) -> Communicators:
    """Make the communicators of a plan. Collective over `world`."""
    with rank_status.waiting("making communicators", range(world.size)):
        return _split(world, plan)


def _split(world: MPI.Comm, plan: Plan) -> Communicators:
    place = plan.place(world.rank)
    at = Place(MPI.UNDEFINED, 0) if place is None else place
    replicas = world.Split(color=at.stage, key=world.rank)
    used = world.Split(color=MPI.UNDEFINED if place is None else 0, key=world.rank)
    control = WatchedComm(world.Dup(), world)
    if place is None:
        return Communicators(control, world.Dup(), None, None)
    return Communicators(control, world.Dup(), WatchedComm(replicas, world), WatchedComm(used, world))


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
