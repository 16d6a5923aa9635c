"""Computing: how fast the ranks of a machine are when several compute, and machines beside each other."""

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from hybridpipe.planning import fit
from hybridpipe.probe.repetitions import COMPUTE_SECONDS, ROUNDS, Work, rate, timed_call
from hybridpipe.together import idle_barrier, largest

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True, slots=True)
class Computing:
    speeds: tuple[float, ...]
    relative_speed: tuple[float, ...] | None


def measure_computing(world: "MPI.Comm", per_machine: int, work: Work) -> Computing:
    """How much work 1, 2, 4, ... and all ranks of a machine do at once; every machine at the same time."""
    counts = sorted({*(2**i for i in range(per_machine.bit_length())), per_machine})
    work()
    rounds = ROUNDS if largest(world, timed_call(work)[0]) < COMPUTE_SECONDS else 1
    firsts = range(0, world.size, per_machine)
    done: dict[int, list[list[float]]] = {n: [] for n in counts}  # by machine, for each round
    for _ in range(rounds):
        for n in counts:
            idle_barrier(world)
            own = rate(work) if world.rank % per_machine < n else 0.0
            idle_barrier(world)
            rates = world.allgather(own)
            done[n].append([sum(rates[first : first + per_machine]) for first in firsts])
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
    return Computing(fit.compute_speeds(throughput), relative)
