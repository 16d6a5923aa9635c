"""All-reduce: a backend's seconds by size, overlap with computing, and the cost of its idle thread.

Not known here: stages and plans. Invariant: as in `repetitions`.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count, islice
from statistics import mean, median
from typing import TYPE_CHECKING

import torch

from hybridpipe.collectives.backends import open_collectives
from hybridpipe.collectives.horovod import CYCLE_TIME
from hybridpipe.collectives.protocol import Collectives
from hybridpipe.comm.communicators import WatchedComm
from hybridpipe.comm.mpi_transport import MpiTransport
from hybridpipe.device import Lanes
from hybridpipe.measure.computing import Computing
from hybridpipe.measure.links import HOST, Link
from hybridpipe.measure.repetitions import (
    GROW_SECONDS,
    MAX_REPEATS,
    SIZES_BYTES,
    Timed,
    Unit,
    by_size,
    computation,
    default_work,
    in_group,
    repeated,
    timed_call,
)
from hybridpipe.planning.cluster import Collective
from hybridpipe.planning.cost import fit
from hybridpipe.planning.cost.formula import BUCKET_BYTES

if TYPE_CHECKING:
    from mpi4py import MPI

CLEARLY = 0.95  # of the default backend's seconds: measurements of one differ by as much
QUICK_CYCLE_MILLISECONDS = 1.0  # Horovod 0.28's default
NUM_TENSORS = 4  # of a bucket: backends join small ones
BESIDE_SECONDS = 0.1  # for the all-reduces beside computing
BESIDE_ROUNDS = 7  # of these at least: three rounds of 60 ms gave an overlap anywhere from 0 to 1
BEFORE_SECONDS, BEFORE_ROUNDS = 0.05, 10  # computing before an all-reduce: many time slices of the kernel
SHARE_SECONDS, SHARE_ROUNDS = 0.03, 10  # several rounds, because other processes disturb some of them
GOLDEN = (5**0.5 - 1) / 2
LEAST_BYTES = 2**19  # of a bucket; smaller ones show the latency only, and their slope is noise
# Within a machine the latency of a millisecond, which varies by half, hides the time of up to 8 MiB: a line
# through them gave 1.6 to 10 GB/s, where these sizes give 4 to 5.
LARGE_BYTES = (2**24, 2**25, 2**26)


def fastest_backend(
    world: "MPI.Comm", unit: Unit, backends: Sequence[str], gradient_bytes: int, lanes: Lanes
) -> str:
    """Return the backend that sums a model's gradients fastest over the first unit of a level. Collective.

    Args:
        backends: the default first, which stays where none is clearly faster.
        gradient_bytes: size of the model's gradients; at most the last of SIZES_BYTES is summed.
    """
    if len(backends) == 1:
        return backends[0]
    num_bytes = max(BUCKET_BYTES, min(gradient_bytes, SIZES_BYTES[-1]))
    timed = partial(_buckets_seconds, num_bytes=num_bytes, lanes=lanes)
    ranks = range(unit.ranks)
    seconds = {each: in_group(world, ranks, partial(timed, backend=each)) for each in backends}
    return clearly_fastest(seconds)


def clearly_fastest(seconds: Mapping[str, float]) -> str:
    """Return the name with the fewest seconds; the first one where none is clearly faster."""
    default, best = next(iter(seconds)), min(seconds, key=lambda name: seconds[name])
    return best if seconds[best] < CLEARLY * seconds[default] else default


def _buckets_seconds(group: "MPI.Comm", num_bytes: int, lanes: Lanes, backend: str) -> float:
    """Return the seconds of all-reduces of buckets that are started together, as at the end of a backward."""
    buckets = [torch.zeros(BUCKET_BYTES // 4, device=lanes.device) for _ in range(num_bytes // BUCKET_BYTES)]

    def reduce() -> None:
        for handle in [collectives.all_reduce([each], f"bucket{i}") for i, each in enumerate(buckets)]:
            handle.wait()
        lanes.synchronize()

    with _collectives(group, lanes, backend) as collectives:
        return repeated(group, num_bytes, reduce).seconds


def measure_allreduce(
    world: "MPI.Comm",
    unit: Unit,
    link: Link,
    gradient_bytes: int,
    computing: Computing,
    lanes: Lanes,
    backend: str,
) -> tuple[Collective, float, float]:
    """Measure a backend's all-reduce over the first unit of a level. Collective over `world`.

    Args:
        link: the level's link, already measured.
        gradient_bytes: size of the model's gradients. Sizes up to it, or to the last of SIZES_BYTES, are
            timed; then those of LARGE_BYTES below twice it, until one takes long. Where a link lets bursts
            pass, the largest is at least two bursts, because time is no line in the bytes then: over
            100 Mbit/s 4 MiB took 1.6 times as long as 512 KiB promised.
        computing: the speed of a machine's ranks.
        lanes: of the device that holds gradients and computes.
        backend: one of BACKENDS.

    Returns:
        The all-reduce's figures; its overlap with computing, in [0, 1]; and the speed of ranks beside the
        backend's idle thread, relative to that without it.
    """
    sent = 2 * (unit.ranks - 1) / unit.ranks  # by each rank, of the whole; no ring is faster than its links
    burst = link.burst_bytes or 0.0
    rest = burst * link.message.seconds_per_byte  # until the link lets a burst pass again
    burst_size = int(burst / sent)  # of an all-reduce
    most = max(min(gradient_bytes, SIZES_BYTES[-1]), LEAST_BYTES, 2 * burst_size)
    larger = [num_bytes for num_bytes in LARGE_BYTES if most < num_bytes < 2 * gradient_bytes]
    sharing = computing.sharing
    reduce = partial(
        _reduce,
        rest_seconds=rest,
        most_bytes=most,
        larger=larger,
        sharing=sharing,
        lanes=lanes,
        backend=backend,
    )
    timed, beside, waited, speed = in_group(world, range(unit.ranks), reduce)
    limited = fit.beyond(timed, burst_size)
    (_, least), (num_bytes, seconds) = limited[0], limited[-1]
    slope = (seconds - least) / num_bytes
    line = fit.fit_line(limited, max(slope, sent * link.message.seconds_per_byte))

    steps = 2 * (unit.ranks - 1) * link.message.start_seconds  # a ring has this latency at least
    cycle = world.bcast(cycle_milliseconds(backend))
    quick = min(1e-3 * min(cycle, QUICK_CYCLE_MILLISECONDS) / 2, max(0.0, line.start_seconds - steps))
    latency = line.start_seconds - quick
    if waited:
        of_last = median(min(of_round) for of_round in zip(*waited, strict=True))
        wait = max(0.0, of_last - latency)
        wait += fit.unevenness(waited, computing.sharing, computing.processors)
    else:
        wait = quick + 1e-3 * max(0.0, cycle - QUICK_CYCLE_MILLISECONDS) / 2
    figures = Collective(sent / line.seconds_per_byte, latency, line.error, wait)
    alone, reducing, both = beside
    busy = reducing - quick  # waiting for Horovod's cycle takes no processor time
    return figures, fit.overlap(alone, busy, both) if busy > 0 else 1.0, speed


def _reduce(
    group: "MPI.Comm",
    rest_seconds: float,
    most_bytes: int,
    larger: Sequence[int],
    sharing: int,
    lanes: Lanes,
    backend: str,
) -> tuple[list[Timed], list[float], list[list[float]], float]:
    pauses = _pauses(rest_seconds)
    pause = pausing(rest_seconds)
    with quick_collectives(group, lanes, backend) as collectives:
        prepare = partial(_prepared, collectives, lanes)
        timed = by_size(group, [n for n in SIZES_BYTES if n < most_bytes], prepare, pause)
        for num_bytes in (most_bytes, *larger):
            timed.append(repeated(group, num_bytes, prepare(num_bytes), pause))
            if timed[-1].seconds > GROW_SECONDS:
                break
        chosen = max(
            (each for each in timed if each.seconds < BESIDE_SECONDS and each.num_bytes <= most_bytes),
            default=timed[0],
        )
        start = _starter(collectives, lanes, chosen.num_bytes)
        beside = _beside_computing(group, start, chosen.seconds, pauses, lanes)
    polls = lanes.on_host and backend == "horovod"  # the other backends' threads sleep
    without = _processor_share(group) if polls else 1.0
    with _collectives(group, lanes, backend) as collectives:
        speed = min(1.0, _processor_share(group) / without) if polls else 1.0
        smallest = _prepared(collectives, lanes, SIZES_BYTES[0])
        waited = _waits_after_computing(group, smallest, lanes) if sharing > 1 else []
    return timed, beside, waited, speed


def _pauses(rest_seconds: float) -> Iterator[float]:
    """Return seconds to pause before each collective.

    Without pauses each would wait for the cycle after the one before it, however short it is. So the pauses
    are spread evenly over the cycle. A link that lets bursts pass rests in each pause as well.
    """
    return (rest_seconds + GOLDEN * i % 1 * 1e-3 * QUICK_CYCLE_MILLISECONDS for i in count())


def pausing(rest_seconds: float) -> Callable[[], None]:
    """Return a function that pauses before a collective, as `_pauses`."""
    pauses = _pauses(rest_seconds)
    return lambda: time.sleep(next(pauses))


def cycle_milliseconds(backend: str) -> float:
    """Return the cycle of Horovod's thread: the time between two looks for work. Other backends have none."""
    return float(os.environ.get(CYCLE_TIME) or QUICK_CYCLE_MILLISECONDS) if backend == "horovod" else 0.0


@contextmanager
def _collectives(
    group: "MPI.Comm",
    lanes: Lanes,
    backend: str,
    transport: MpiTransport | None = None,
    quick: bool = False,
) -> Iterator[Collectives]:
    """Open a backend among the ranks of `group`.

    Args:
        quick: shorten a longer cycle to QUICK_CYCLE_MILLISECONDS. An all-reduce takes 1 to 10 ms within a
            machine. The ranks' cycles begin at different times, and waits of up to two would hide that.
    """
    told = os.environ.get(CYCLE_TIME)
    if quick and cycle_milliseconds(backend) > QUICK_CYCLE_MILLISECONDS:
        os.environ[CYCLE_TIME] = str(QUICK_CYCLE_MILLISECONDS)
    try:
        collectives = open_collectives(backend, WatchedComm(group, group), transport, lanes.device)
    finally:
        if told is not None:
            os.environ[CYCLE_TIME] = told
    yield collectives
    collectives.close()


def quick_collectives(
    group: "MPI.Comm", lanes: Lanes, backend: str, transport: MpiTransport | None = None
) -> AbstractContextManager[Collectives]:
    """Open a backend among the ranks of `group`, Horovod with a short cycle.

    Args:
        transport: as for `open_collectives`.
    """
    return _collectives(group, lanes, backend, transport, quick=True)


def _starter(collectives: Collectives, lanes: Lanes, num_bytes: int) -> Callable[[], Callable[[], object]]:
    """Return a function that begins an all-reduce and returns a function that waits for its end."""
    length = num_bytes // 4 // NUM_TENSORS
    tensors = [torch.zeros(length, device=lanes.device) for _ in range(NUM_TENSORS)]

    def begin() -> Callable[[], object]:
        work = collectives.all_reduce(tensors, f"probe{num_bytes}")

        def finish() -> None:
            work.wait()
            lanes.synchronize()

        return finish

    return begin


def _prepared(collectives: Collectives, lanes: Lanes, num_bytes: int) -> Callable[[], object]:
    """Return a whole all-reduce as one function."""
    begin = _starter(collectives, lanes, num_bytes)
    return lambda: begin()()


def _processor_share(group: "MPI.Comm") -> float:
    """Return each rank's share of a processor while all ranks compute.

    The share is steadier than the work done, which changes with the machine's speed. Within a minute the
    work gave 0.93 to 0.995 for the ranks beside Horovod's thread, and the share 0.98 to 0.99.
    """
    work, shares = default_work(HOST), []
    for _ in range(SHARE_ROUNDS):
        group.Barrier()
        began, spent = time.perf_counter(), time.thread_time()
        while (elapsed := time.perf_counter() - began) < SHARE_SECONDS:
            work()
        shares.append(mean(group.allgather((time.thread_time() - spent) / elapsed)))
    return float(median(shares))


def _beside_computing(
    group: "MPI.Comm",
    begin: Callable[[], Callable[[], object]],
    seconds: float,
    pauses: Iterator[float],
    lanes: Lanes,
) -> list[float]:
    """Return the seconds of a computation on all ranks, of a shorter all-reduce, and of both at once."""
    compute = computation(group, 2 * seconds, lanes)

    def both() -> None:
        finish = begin()
        compute()
        finish()

    begin()()
    actions = (compute, lambda: begin()(), both)
    taken: list[list[float]] = [[] for _ in actions]
    rounds = min(MAX_REPEATS, max(BESIDE_ROUNDS, int(BESIDE_SECONDS / seconds)))
    for pause_seconds in islice(pauses, rounds):
        for action, of_action in zip(actions, taken, strict=True):
            group.Barrier()
            time.sleep(pause_seconds)
            of_action.append(mean(group.allgather(timed_call(action))))
    return [median(of_action) for of_action in taken]


def _waits_after_computing(
    group: "MPI.Comm", reduce: Callable[[], object], lanes: Lanes
) -> list[list[float]]:
    """Return the seconds that each rank spends, in each round, in an all-reduce right after computing.

    Ranks that share processors arrive at different times; the last one waits for Horovod's cycle only.
    """
    compute = computation(group, BEFORE_SECONDS, lanes)
    reduce()  # Horovod negotiates a name in the first call
    taken = []
    for _ in range(BEFORE_ROUNDS):
        compute()
        taken.append(timed_call(reduce))
    gathered: list[list[float]] = group.allgather(taken)
    return gathered
