"""Computing: how fast the ranks of a machine are when several compute, and machines beside each other."""

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

# By where those that wait are polling, one rank alone is up to 1.3 times as fast in one as in the next.
COMPUTING_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Computing:
    """What the ranks of a machine get done.

    done: by n, of n of them that compute at once, units of work a second together, on each machine; holds 1.
    num_cores: of a machine's ranks together.
    """

    done: Mapping[int, tuple[float, ...]]
    num_cores: int

    @property
    def speeds(self) -> tuple[float, ...]:
        """As `Cluster.compute_speeds`."""
        throughput = {
            n: median(together / alone for together, alone in zip(by_machine, self.done[1], strict=True))
            for n, by_machine in self.done.items()
        }
        return fit.compute_speeds(throughput, self.num_cores)

    @property
    def relative_speed(self) -> tuple[float, ...] | None:
        """As `Cluster.relative_speed`."""
        machines = fit.relative_speeds(self.done[1])
        per_machine = max(self.done)
        return machines and tuple(speed for speed in machines for _ in range(per_machine))

    @property
    def sharing(self) -> int:
        """How many ranks of a machine share its processors; 1 where each has its own."""
        num_ranks = len(self.speeds)
        machine = Cluster.flat(num_ranks, bandwidth=1.0, latency_seconds=0.0)
        busy = replace(machine, node_ranks=num_ranks, compute_speeds=self.speeds).is_busy(num_ranks - 1)
        return num_ranks if busy else 1

    @property
    def processors(self) -> float:
        """What all ranks of a machine do at once, relative to one that computes alone."""
        return len(self.speeds) * self.speeds[-1]

    def or_more(self, again: "Computing") -> "Computing":
        """The most that was done in either.

        What others take of a shared machine, for seconds, is not the ranks' to share: two on two cores have
        seemed to have 0.6 to 0.8 of a core each for a second, and 0.98 the next.
        """
        most = {n: tuple(map(max, done, again.done[n])) for n, done in self.done.items()}
        return replace(self, done=most)


def measure_computing(
    world: "MPI.Comm", per_machine: int, work: Work, open_transport: OpenTransport
) -> Computing:
    """How much work 1, 2, 4, ... and all ranks of a machine do at once; every machine at the same time.

    The others wait for a message, as they would for a stage that computes: looking whether it is there takes
    processor time, too.
    """
    counts = fit.doubling(1, per_machine)
    work()
    rounds = COMPUTING_ROUNDS if largest(world, timed_call(work)) < COMPUTE_SECONDS else 1
    firsts = range(0, world.size, per_machine)
    rounds_done: dict[int, list[list[float]]] = {n: [] for n in counts}  # by machine, for each round
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
    return Computing(done, round(largest(world, num_cores)))


def _rate_of_first(
    count: int, machine: "MPI.Comm", group: "MPI.Comm", transport: Transport, work: Work
) -> float:
    """Units of work a second while so many ranks, `group`, compute; 0 for those who wait until they have."""
    end = torch.zeros(1, dtype=torch.uint8)
    if machine.rank >= count:
        transport.receive(end, 0, 0).wait()
        return 0.0
    own = rate(work)
    all_done = group.Ibarrier()
    while not all_done.Test():
        work()  # who is done goes on, or the others had its processor: 1.1 to 1.25 times as fast
    if machine.rank == 0:
        for sending in [transport.send(end, peer, 0) for peer in range(count, machine.size)]:
            sending.wait()
    return own
