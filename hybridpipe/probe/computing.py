"""Computing: how fast the ranks of a machine are when several compute, and machines beside each other."""

from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

import torch

from hybridpipe.planning import fit
from hybridpipe.planning.cluster import Cluster
from hybridpipe.probe.repetitions import COMPUTE_SECONDS, Work, rate, timed_call
from hybridpipe.runtime.transport import Transport
from hybridpipe.together import idle_barrier, largest, machine_cores

if TYPE_CHECKING:
    from mpi4py import MPI

# By where those that wait are polling, one rank alone is up to 1.3 times as fast in one as in the next.
COMPUTING_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Computing:
    speeds: tuple[float, ...]
    relative_speed: tuple[float, ...] | None

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


def measure_computing(world: "MPI.Comm", per_machine: int, work: Work) -> Computing:
    """How much work 1, 2, 4, ... and all ranks of a machine do at once; every machine at the same time.

    The others wait for a message, as they would for a stage that computes: looking whether it is there takes
    processor time, too.
    """
    from hybridpipe.runtime.mpi_transport import MpiTransport

    counts = fit.doubling(1, per_machine)
    work()
    rounds = COMPUTING_ROUNDS if largest(world, timed_call(work)) < COMPUTE_SECONDS else 1
    firsts = range(0, world.size, per_machine)
    done: dict[int, list[list[float]]] = {n: [] for n in counts}  # by machine, for each round
    machine = world.Split(world.rank // per_machine, world.rank)
    groups = {n: machine.Split(machine.rank < n, machine.rank) for n in counts}
    num_ranks, num_cores = machine_cores(world)
    with MpiTransport(machine, num_ranks <= num_cores) as transport:
        for _ in range(rounds):
            for n in counts:
                idle_barrier(world)
                own = _rate_of_first(n, machine, groups[n], transport, work)
                idle_barrier(world)
                rates = world.allgather(own)
                done[n].append([sum(rates[first : first + per_machine]) for first in firsts])
    for communicator in (*groups.values(), machine):
        communicator.Free()
    throughput = {
        n: median(
            all_of_it / alone
            for together, by_one in zip(done[n], done[1], strict=True)
            for all_of_it, alone in zip(together, by_one, strict=True)
        )
        for n in counts
    }
    machines = fit.relative_speeds([median(rates) for rates in zip(*done[1], strict=True)])
    relative = machines and tuple(machines[rank // per_machine] for rank in range(world.size))
    return Computing(fit.compute_speeds(throughput, round(largest(world, num_cores))), relative)


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
