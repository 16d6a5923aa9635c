"""Repetitions of measurements on some ranks, and a computation that stands for training.

Not known here: the quantity measured. Invariant: all ranks that take part do equally many repetitions, and
the others sleep.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from statistics import mean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hybridpipe.comm.idle import idle_barrier
from hybridpipe.comm.transport import Transport
from hybridpipe.device import Lanes

if TYPE_CHECKING:
    from mpi4py import MPI

Work = Callable[[], object]
OpenTransport = Callable[..., AbstractContextManager[Transport]]  # `MpiTransport`, as training has it

# Small sizes show the latency. Large ones, up to the gradients of large layers, show where time is lost. No
# size follows one that took GROW_SECONDS, so none takes over 0.15 s; 100 Mbit/s links stop at 512 KiB.
SIZES_BYTES = (64, 2**11, 2**15, 2**17, 2**19, 2**20, 2**21, 2**22, 2**23)
GROW_SECONDS = 0.04
# A size is repeated for SIZE_SECONDS, within these limits.
SIZE_SECONDS, MIN_REPEATS, MAX_REPEATS = 0.05, 3, 25
COMPUTE_SECONDS = 0.1  # a time slice of the kernel is a few milliseconds
ROUNDS = 3  # of compared measurements, which take turns because the machines' speed drifts


class Unit(NamedTuple):
    """The first unit of a level: `ranks` ranks, in units of the level below, of `inner` ranks each."""

    name: str
    inner: int
    ranks: int


class Timed(NamedTuple):
    """The seconds that one message or all-reduce of `num_bytes` takes."""

    num_bytes: int
    seconds: float


def by_size(
    group: "MPI.Comm",
    sizes_bytes: Sequence[int],
    prepare: Callable[[int], Work],
    before: Work = lambda: None,
) -> list[Timed]:
    """Time `prepare(num_bytes)()` for growing sizes. Collective over `group`.

    Args:
        sizes_bytes: tried in this order, at least two of them, until one takes more than GROW_SECONDS.
        before: runs before each repetition; its time does not count.
    """
    timed: list[Timed] = []
    for num_bytes in sizes_bytes:
        timed.append(repeated(group, num_bytes, prepare(num_bytes), before))
        if len(timed) > 1 and timed[-1].seconds > GROW_SECONDS:  # a line needs two points
            break
    return timed


def repeated(group: "MPI.Comm", num_bytes: int, action: Work, before: Work = lambda: None) -> Timed:
    """Return the median of some repetitions, averaged over the ranks. Collective over `group`."""
    action()  # the first call gets memory from the kernel, and Horovod negotiates a name in it
    first = timed_call(action)
    repeats = int(SIZE_SECONDS / mean(group.allgather(first)))
    taken = []
    for _ in range(min(MAX_REPEATS, max(MIN_REPEATS, repeats))):
        before()
        taken.append(timed_call(action))
    return Timed(num_bytes, mean(group.allgather(median(taken))))


def timed_call(action: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def in_group(world: "MPI.Comm", ranks: Sequence[int], measure: Callable[["MPI.Comm"], Any]) -> Any:
    """Call `measure` with a communicator of `ranks`, while the other ranks sleep. Collective over `world`.

    Returns:
        The value that the first of `ranks` measured, on every rank.
    """
    from hybridpipe.comm.mpi import MPI

    group = world.Split(0 if world.rank in ranks else MPI.UNDEFINED, world.rank)
    found = None
    if group != MPI.COMM_NULL:
        found = measure(group)
        group.Free()
    idle_barrier(world)
    return world.bcast(found)


def rate(work: Work) -> float:
    """Return the units of work done per second, measured for COMPUTE_SECONDS or one unit."""
    done, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < COMPUTE_SECONDS:
        work()
        done += 1
    return done / elapsed


def default_work(lanes: Lanes) -> Work:
    """Return a unit of work of about a millisecond, half of it in the cache and half of it through memory.

    Training does both.
    """
    side, length = (192, 2**19) if lanes.on_host else (4096, 2**27)
    matrix, vector = (torch.ones(shape, device=lanes.device) for shape in ((side, side), (length,)))
    product, total = torch.empty_like(matrix), torch.empty_like(vector)

    def work() -> None:
        torch.mm(matrix, matrix, out=product)
        torch.add(vector, vector, out=total)
        lanes.synchronize()

    return work


def computation(group: "MPI.Comm", seconds: float, lanes: Lanes) -> Callable[[], None]:
    """Return work that takes about `seconds` while all ranks of `group` do it. Collective."""
    work = default_work(lanes)
    work()
    group.Barrier()
    units = max(1, round(seconds * mean(group.allgather(rate(work)))))

    def compute() -> None:
        for _ in range(units):
            work()

    return compute
