"""Computing: the speed of ranks that compute at once on a machine or a GPU, and of machines among themselves.

Not known here: layers. A GPU counts as a machine whose ranks are those that share it.
Invariant: ranks that do not compute wait for a message, as in training.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

import torch

from hybridpipe.comm.idle import idle_barrier, largest, machine_cores
from hybridpipe.comm.transport import Transport
from hybridpipe.measure.repetitions import COMPUTE_SECONDS, OpenTransport, Work, rate, timed_call
from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost import fit

if TYPE_CHECKING:
    from mpi4py import MPI

# One rank alone is up to 1.3 times as fast in one round as in the next: it depends on where the others poll.
COMPUTING_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Computing:
    """The work that the ranks of a machine do per second.

    Args:
        done: for n ranks of a machine that compute at once, their units of work per second together, for each
            machine. It has an entry for n = 1.
        num_cores: cores that a machine's ranks share.
    """

    done: Mapping[int, tuple[float, ...]]
    num_cores: int

    @property
    def speeds(self) -> tuple[float, ...]:
        """Speed of each of n computing ranks, as in `Cluster.compute_speeds`."""
        throughput = {
            n: median(together / alone for together, alone in zip(by_machine, self.done[1], strict=True))
            for n, by_machine in self.done.items()
        }
        return fit.compute_speeds(throughput, self.num_cores)

    @property
    def relative_speed(self) -> tuple[float, ...] | None:
        """Speed of each rank's machine, as in `Cluster.relative_speed`; None: the machines are alike."""
        machines = fit.relative_speeds(self.done[1])
        per_machine = max(self.done)
        return machines and tuple(speed for speed in machines for _ in range(per_machine))

    @property
    def sharing(self) -> int:
        """Number of ranks that share a machine's processors; 1 where each has its own."""
        num_ranks = len(self.speeds)
        machine = Cluster.flat(num_ranks, bandwidth=1.0, latency_seconds=0.0)
        busy = replace(machine, node_ranks=num_ranks, compute_speeds=self.speeds).is_busy(num_ranks - 1)
        return num_ranks if busy else 1

    @property
    def processors(self) -> float:
        """Work of all ranks of a machine at once, relative to that of one rank alone."""
        return len(self.speeds) * self.speeds[-1]

    def or_more(self, again: "Computing") -> "Computing":
        """Return the larger of the two measurements, entry by entry.

        Other users of a shared machine may take a part of it for seconds: two ranks on two cores have had 0.6
        to 0.8 of a core each in one second and 0.98 in the next. Plans should not depend on that.
        """
        most = {n: tuple(map(max, done, again.done[n])) for n, done in self.done.items()}
        return replace(self, done=most)


def measure_computing(
    world: "MPI.Comm", per_machine: int, work: Work, open_transport: OpenTransport, on_host: bool
) -> Computing:
    """Measure the work that 1, 2, 4, ... and all ranks of a machine do at once. Collective over `world`.

    All machines are measured at the same time. The other ranks wait for a message, as they would for a stage
    that computes, because polling takes processor time as well.

    Args:
        per_machine: ranks on each machine.
        work: computes one unit, and returns when it is done.
        on_host: False if GPUs compute, where no number of cores limits the ranks together.
    """
    counts = fit.doubling(1, per_machine)
    work()
    rounds = COMPUTING_ROUNDS if largest(world, timed_call(work)) < COMPUTE_SECONDS else 1
    firsts = range(0, world.size, per_machine)
    rounds_done: dict[int, list[list[float]]] = {n: [] for n in counts}  # for each round, by machine
    machine = world.Split(world.rank // per_machine, world.rank)
    groups = {n: machine.Split(machine.rank < n, machine.rank) for n in counts}
    num_ranks, num_cores = machine_cores(world)
    with open_transport(machine, num_ranks <= num_cores) as transport:
        for _ in range(rounds):
            for n in counts:
                idle_barrier(world)
                own = _rate_of_first(n, machine, groups[n], transport, work)
                idle_barrier(world)
                rates = world.allgather(own)
                rounds_done[n].append([sum(rates[first : first + per_machine]) for first in firsts])
    for communicator in (*groups.values(), machine):
        communicator.Free()
    done = {n: tuple(map(median, zip(*by_round, strict=True))) for n, by_round in rounds_done.items()}
    return Computing(done, round(largest(world, num_cores)) if on_host else per_machine)


def _rate_of_first(
    count: int, machine: "MPI.Comm", group: "MPI.Comm", transport: Transport, work: Work
) -> float:
    """Return this rank's units of work per second while the first `count` ranks compute; 0: it waited.

    Args:
        group: this rank's part of the machine: the ranks that compute, or those that wait.
    """
    end = torch.zeros(1, dtype=torch.uint8)
    if machine.rank >= count:
        transport.receive(end, 0, 0).wait()
        return 0.0
    own = rate(work)
    all_done = group.Ibarrier()
    while not all_done.Test():
        work()  # an idle rank would leave its processor to the others, which ran 1.1 to 1.25 times as fast
    if machine.rank == 0:
        for sending in [transport.send(end, peer, 0) for peer in range(count, machine.size)]:
            sending.wait()
    return own
