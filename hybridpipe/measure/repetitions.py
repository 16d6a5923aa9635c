"""Repetitions: how what is measured is repeated, on which ranks, and what they compute meanwhile.

Invariant: all ranks that take part do equally many repetitions, and the others sleep.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from statistics import mean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hybridpipe.comm.idle import idle_barrier
from hybridpipe.comm.transport import Transport

if TYPE_CHECKING:
    from mpi4py import MPI

Work = Callable[[], object]
OpenTransport = Callable[..., AbstractContextManager[Transport]]  # `MpiTransport`, as training has it

# Small ones for the latency, and more up to what large layers all-reduce, as time is lost there. None follows
# one that took GROW_SECONDS, so none takes more than 0.15 s: over 100 Mbit/s messages stop at 512 KiB.
SIZES_BYTES = (64, 2**11, 2**15, 2**17, 2**19, 2**20, 2**21, 2**22, 2**23)
GROW_SECONDS = 0.04
# A size is repeated for so long, within these numbers.
SIZE_SECONDS, MIN_REPEATS, MAX_REPEATS = 0.05, 3, 25
COMPUTE_SECONDS = 0.1  # a time slice of the kernel is a few milliseconds
ROUNDS = 3  # of what is compared, taken in turn, as the machines' speed drifts


class Unit(NamedTuple):
    """The first unit of a level: `ranks` ranks, in units of the level below of `inner` ranks each."""

    name: str
    inner: int
    ranks: int


class Timed(NamedTuple):
    num_bytes: int
    seconds: float


def by_size(
    group: "MPI.Comm",
    sizes_bytes: Sequence[int],
    prepare: Callable[[int], Work],
    before: Work = lambda: None,
) -> list[Timed]:
    """The time of `prepare(num_bytes)()`, in which all ranks of `group` take part, for growing sizes.

    Args:
        sizes_bytes: as far as time permits, at least two.
        before: runs before each repetition, and does not count.
    """
    timed: list[Timed] = []
    for num_bytes in sizes_bytes:
        timed.append(repeated(group, num_bytes, prepare(num_bytes), before))
        if len(timed) > 1 and timed[-1].seconds > GROW_SECONDS:  # a line wants two
            break
    return timed


def repeated(group: "MPI.Comm", num_bytes: int, action: Work, before: Work = lambda: None) -> Timed:
    """The median of some repetitions, and of that the mean over the ranks."""
    action()  # fresh memory, and Horovod's first negotiation of a name
    first = timed_call(action)
    repeats = int(SIZE_SECONDS / mean(group.allgather(first)))
    taken = []
    for _ in range(min(MAX_REPEATS, max(MIN_REPEATS, repeats))):
        before()
        taken.append(timed_call(action))
    return Timed(num_bytes, mean(group.allgather(median(taken))))


def timed_call(action: Callable[[], object]) -> float:
    """Seconds of a call."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def in_group(world: "MPI.Comm", ranks: Sequence[int], measure: Callable[["MPI.Comm"], Any]) -> Any:
    """What `measure` finds on the first of `ranks`, given their communicator, while the others sleep."""
    from hybridpipe.comm.mpi import MPI

    group = world.Split(0 if world.rank in ranks else MPI.UNDEFINED, world.rank)
    found = None
    if group != MPI.COMM_NULL:
        found = measure(group)
        group.Free()
    idle_barrier(world)
    return world.bcast(found)


def rate(work: Work) -> float:
    """Units of work a second, for COMPUTE_SECONDS or one unit."""
    done, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < COMPUTE_SECONDS:
        work()
        done += 1
    return done / elapsed


def default_work() -> Work:
    """About a millisecond, half of it in the cache and half of it through memory, as training is of both."""
    matrix, vector = torch.ones(192, 192), torch.ones(2**19)
    product, total = torch.empty_like(matrix), torch.empty_like(vector)

    def work() -> None:
        torch.mm(matrix, matrix, out=product)
        torch.add(vector, vector, out=total)

    return work


def computation(group: "MPI.Comm", seconds: float) -> Callable[[], None]:
    """Work that takes about so long while all ranks do it. Collective."""
    work = default_work()
    work()
    group.Barrier()
    units = max(1, round(seconds * mean(group.allgather(rate(work)))))

    def compute() -> None:
        for _ in range(units):
            work()

    return compute
