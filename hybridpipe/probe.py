"""Probe: measures the machines under mpirun, in a few seconds, and returns a `Cluster`.

Measured as the runtime uses them: messages through its own transport, alone and several at once; Horovod's
all-reduce by size, and how much of one a computing rank gets for nothing; how fast the ranks of a machine
compute when several do. What the figures are made of from the timings is in `hybridpipe.planning.fit`.
Invariant: what is measured on some ranks leaves the others asleep (`hybridpipe.together`), and all that take
part do equally many repetitions.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hybridpipe.planning import fit
from hybridpipe.planning.cluster import AllReduce, Cluster, Level
from hybridpipe.planning.cost import BUCKET_BYTES
from hybridpipe.runtime.gradients import horovod
from hybridpipe.runtime.transport import Pending, Transport
from hybridpipe.together import idle_barrier, largest, machine_leaders

if TYPE_CHECKING:
    from mpi4py import MPI

Work = Callable[[], object]
_MEMORY = Path("/proc/meminfo")

# Small ones for the latency, and more up to a bucket of gradients, as time is lost with those. None follows
# one that took GROW_SECONDS, so none takes more than 0.15 s: over 100 Mbit/s messages stop at 512 KiB. But a
# whole bucket is all-reduced in any case. Over 100 Mbit/s 4 MiB took 1.6 times as long as 512 KiB promised:
# where both directions are full, what a rank sends and what acknowledges the received stand in one queue.
SIZES_BYTES = (64, 2**11, 2**15, 2**17, 2**19, 2**20, 2**21, 2**22, BUCKET_BYTES)
GROW_SECONDS = 0.04
# A size is repeated for so long, within these numbers.
SIZE_SECONDS, MIN_REPEATS, MAX_REPEATS = 0.05, 3, 25
STREAM_SECONDS = 0.06  # of the messages that one pair, or several at once, send one after another
MAX_STREAMED = 16
WAITING_SECONDS = 0.03
REST_SECONDS = 0.06  # over 100 Mbit/s 750 KB could have passed meanwhile
LIMITED_SECONDS = 1e-3
WAKING_BYTES, WAKINGS, BETWEEN_SECONDS = 2**17, 40, 6e-3  # messages among computing, as in a pipeline
COMPUTE_SECONDS = 0.1  # a time slice of the kernel is a few milliseconds
ROUNDS = 3  # of what is compared, taken in turn, as the machines' speed drifts
NUM_TENSORS = 4  # of a bucket: Horovod fuses them


def probe(world: "MPI.Comm", work: Work | None = None) -> Cluster:
    """Measure the machines behind `world`. Collective; the same cluster on every rank.

    Args:
        work: computes one unit of what the ranks will compute, for how they hamper each other; by default a
            product of matrices, which stays in the cache, and a sum, which does not.

    Raises:
        ValueError: the ranks are not placed host by host in equal numbers.
    """
    if world.size == 1:
        return Cluster.flat(1, bandwidth=1e10, latency_seconds=0.0)  # no link to measure, and none to use
    per_host = _ranks_per_host(world)
    per_machine = _equal_units(machine_leaders(world)) or per_host
    units = [("host", 1, per_host), ("network", per_host, world.size)]
    levels = [_Unit(*unit) for unit in units if unit[1] < unit[2]]
    computing = _computing(world, per_machine, work or _default_work())
    links = [_link(world, unit) for unit in levels]
    reduced, overlap, replicated_speed = zip(*map(partial(_allreduce, world), levels, links), strict=True)
    return Cluster(
        levels=tuple(
            Level(
                unit.name,
                unit.ranks,
                bandwidth=1 / link.message.seconds_per_byte,
                latency_seconds=link.message.start_seconds,
                shared_bandwidth=link.shared_bandwidth,
                allreduce=allreduce,
                burst_bytes=link.burst_bytes,
                fit_error=link.message.error,
            )
            for unit, link, allreduce in zip(levels, links, reduced, strict=True)
        ),
        memory_bytes=_memory_bytes(world, per_machine),
        relative_speed=computing.relative_speed,
        node_ranks=per_machine,
        compute_speeds=computing.speeds,
        message_seconds=max(link.handling_seconds for link in links),
        message_seconds_per_byte=max(link.handling_seconds_per_byte for link in links),
        wakeup_seconds=_wakeup_seconds(world, per_machine, computing.speeds, links[0].message),
        replicated_speed=replicated_speed[-1],
        overlap=overlap[-1],
    )


class _Unit(NamedTuple):
    """The first unit of a level: `ranks` ranks, in units of the level below of `inner` ranks each."""

    name: str
    inner: int
    ranks: int


def _ranks_per_host(world: "MPI.Comm") -> int:
    from hybridpipe.runtime.mpi import MPI

    host = world.Split_type(MPI.COMM_TYPE_SHARED)
    leaders = world.allgather(host.bcast(world.rank))
    host.Free()
    size = _equal_units(leaders)
    if size is None:
        raise ValueError(
            "probe needs the ranks host by host in equal numbers (mpirun --map-by slot, "
            f"srun --distribution=block), got ranks whose hosts begin at ranks {leaders}"
        )
    return size


def _equal_units(leaders: Sequence[int]) -> int | None:
    """The size of the units that `leaders`, each rank's first peer, describe; None if they are not alike."""
    size = leaders.count(leaders[0])
    return size if list(leaders) == [rank - rank % size for rank in range(len(leaders))] else None


# ---- Repetitions --------------------------------------------------------------------------------


class _Timed(NamedTuple):
    num_bytes: int
    seconds: float
    processor_seconds: float  # of the thread that waits


def _by_size(group: "MPI.Comm", prepare: Callable[[int], Callable[[], object]]) -> list[_Timed]:
    """The time of `prepare(num_bytes)()`, in which all ranks of `group` take part, for growing sizes."""
    timed: list[_Timed] = []
    for num_bytes in SIZES_BYTES:
        timed.append(_repeated(group, num_bytes, prepare(num_bytes)))
        if len(timed) > 1 and timed[-1].seconds > GROW_SECONDS:  # a line wants two
            break
    return timed


def _repeated(group: "MPI.Comm", num_bytes: int, action: Work) -> _Timed:
    """The median of some repetitions, and of that the mean over the ranks."""
    action()  # fresh memory, and Horovod's first negotiation of a name
    first, _ = _time(action)
    repeats = int(SIZE_SECONDS / mean(group.allgather(first)))
    taken = [_time(action) for _ in range(min(MAX_REPEATS, max(MIN_REPEATS, repeats)))]
    seconds, processor = (median(values) for values in zip(*taken, strict=True))
    gathered = group.allgather((seconds, processor))
    return _Timed(num_bytes, *(mean(values) for values in zip(*gathered, strict=True)))


def _time(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds and processor seconds of a call."""
    began, processor_began = time.perf_counter(), time.thread_time()
    action()
    return time.perf_counter() - began, time.thread_time() - processor_began


# ---- Memory -------------------------------------------------------------------------------------


def _memory_bytes(world: "MPI.Comm", per_machine: int) -> int | None:
    """What a rank may use: what its GPU has left, or its share of what the machine has; None if unknown."""
    if torch.cuda.is_available():
        left = torch.cuda.mem_get_info()[0]
    else:
        told = re.search(r"MemAvailable: *(\d+) kB", _MEMORY.read_text()) if _MEMORY.is_file() else None
        left = int(told[1]) * 1024 // per_machine if told else 0
    least: int = min(world.allgather(left))
    return least or None


# ---- Messages -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Link:
    message: fit.Line
    handling_seconds: float  # processor time at either end
    handling_seconds_per_byte: float
    shared_bandwidth: float | None
    burst_bytes: float | None


def _link(world: "MPI.Comm", unit: _Unit) -> _Link:
    """Messages between the first ranks of two units of the level below, then between all their ranks.

    A network that limits a rate lets some hundred KiB pass at once, and a ping-pong gives it pauses; so the
    bandwidth is at most what a stream sustains.
    """
    timed, waiting = _in_group(world, (0, unit.inner), _ping_pong)
    timings = [(each.num_bytes, each.seconds) for each in timed]
    both_units = range(2 * unit.inner)
    streamed = fit.fit_line(timings).seconds_per_byte
    one = _in_group(world, both_units, partial(_stream, num_pairs=1, seconds_per_byte=streamed))
    message = fit.fit_line(timings, 1 / one)
    shared = None
    if unit.inner > 1:  # else it is the port of one rank
        slower = unit.inner * message.seconds_per_byte
        together = _in_group(
            world, both_units, partial(_stream, num_pairs=unit.inner, seconds_per_byte=slower)
        )
        shared = fit.shared_bandwidth(one, together, unit.inner)
    small, large = timed[0], timed[-1]
    # what goes into looking whether a slow message is there is not the message's
    looking = waiting * (large.seconds - small.seconds)
    copying = large.processor_seconds - small.processor_seconds - looking
    rested = _in_group(world, (0, unit.inner), partial(_rested, message=message))
    burst = fit.burst_bytes(rested, message)
    return _Link(message, small.processor_seconds, max(0.0, copying) / large.num_bytes, shared, burst)


def _ping_pong(group: "MPI.Comm") -> tuple[list[_Timed], float]:
    """One way, by size: half of there and back; and the share of a processor that waiting takes."""
    from hybridpipe.runtime.mpi_transport import MpiTransport

    with MpiTransport(group) as transport:
        prepare = partial(_there_and_back, group, transport)
        timed = [_Timed(n, seconds / 2, cpu / 2) for n, seconds, cpu in _by_size(group, prepare)]
        _, late = _time(prepare(SIZES_BYTES[0], WAITING_SECONDS))
        waiting = max(0.0, late - 2 * timed[0].processor_seconds) / WAITING_SECONDS
        return timed, waiting


def _rested(group: "MPI.Comm", message: fit.Line) -> list[tuple[int, float]]:
    """Messages over a link that has rested, by size, until one is limited: (bytes, seconds one way)."""
    from hybridpipe.runtime.mpi_transport import MpiTransport

    timed: list[tuple[int, float]] = []
    with MpiTransport(group) as transport:
        for num_bytes in SIZES_BYTES:
            limited_seconds = num_bytes * message.seconds_per_byte
            if limited_seconds < LIMITED_SECONDS and num_bytes < SIZES_BYTES[-1]:
                continue  # too short to be told apart
            action = _there_and_back(group, transport, num_bytes, REST_SECONDS)
            taken = median(_time(action)[0] for _ in range(MIN_REPEATS))
            timed.append((num_bytes, mean(group.allgather(taken)) / 2 - REST_SECONDS))
            if timed[-1][1] > message.start_seconds + 0.5 * limited_seconds:
                break
    return timed


def _there_and_back(
    group: "MPI.Comm", transport: Transport, num_bytes: int, pause_seconds: float = 0.0
) -> Callable[[], None]:
    """Between two ranks, each of which pauses before it sends."""
    peer = 1 - group.rank
    sent, received = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))

    def there_and_back() -> None:
        receiving = transport.receive(received, peer, 0)
        if group.rank > peer:
            receiving.wait()
        time.sleep(pause_seconds)
        sending = transport.send(sent, peer, 0)
        receiving.wait()
        sending.wait()

    return there_and_back


def _stream(group: "MPI.Comm", num_pairs: int, seconds_per_byte: float) -> float:
    """Bytes per second that `num_pairs` ranks of the first half of the group send to those of the second.

    Args:
        seconds_per_byte: of each of them, about; decides how much is sent.
    """
    from hybridpipe.runtime.mpi_transport import MpiTransport

    half = group.size // 2
    num_bytes = STREAM_SECONDS / seconds_per_byte
    count = min(MAX_STREAMED, math.ceil(num_bytes / SIZES_BYTES[-1]))
    buffers = [
        torch.zeros(min(SIZES_BYTES[-1], math.ceil(num_bytes / count)), dtype=torch.uint8)
        for _ in range(count)
    ]
    taken = []
    with MpiTransport(group) as transport:
        for _ in range(1 + ROUNDS):
            group.Barrier()
            began = time.perf_counter()
            pending: list[Pending] = []
            if group.rank < num_pairs:
                pending = [transport.send(buffer, group.rank + half, 0) for buffer in buffers]
            elif half <= group.rank < half + num_pairs:
                pending = [transport.receive(buffer, group.rank - half, 0) for buffer in buffers]
            for each in pending:
                each.wait()
            taken.append(largest(group, time.perf_counter() - began))
    return num_pairs * sum(buffer.nbytes for buffer in buffers) / median(taken[1:])


def _in_group(world: "MPI.Comm", ranks: Sequence[int], measure: Callable[["MPI.Comm"], Any]) -> Any:
    """What `measure` finds on the first of `ranks`, given their communicator, while the others sleep."""
    from hybridpipe.runtime.mpi import MPI

    group = world.Split(0 if world.rank in ranks else MPI.UNDEFINED, world.rank)
    found = None
    if group != MPI.COMM_NULL:
        found = measure(group)
        group.Free()
    idle_barrier(world)
    return world.bcast(found)


def _wakeup_seconds(world: "MPI.Comm", per_machine: int, speeds: tuple[float, ...], alone: fit.Line) -> float:
    """How much longer than alone a message takes to a rank that waits while the rest of its machine computes.

    In a ping-pong both sides wait most of the time, and the kernel gives the processor at once to who has
    used so little; a rank that computes between its messages waits for its turn.
    """
    cluster = Cluster.flat(per_machine, bandwidth=1.0, latency_seconds=0.0)
    if not replace(cluster, node_ranks=per_machine, compute_speeds=speeds).is_busy(per_machine - 1):
        return 0.0  # a processor for each
    late = _in_group(world, range(per_machine), _lateness)
    return max(0.0, float(late) - alone.start_seconds - WAKING_BYTES * alone.seconds_per_byte)


def _lateness(group: "MPI.Comm") -> float:
    """Mean seconds from the sending of a message to its arrival, of two ranks by turns, the others computing.

    One machine has one clock.
    """
    from hybridpipe.runtime.mpi_transport import MpiTransport

    work, late = _default_work(), []
    if group.rank > 1:
        others = group.Ibarrier()
        while not others.Test():
            work()
    else:
        peer = 1 - group.rank
        message = torch.zeros(WAKING_BYTES // 8, dtype=torch.float64)
        with MpiTransport(group) as transport:
            for turn in range(WAKINGS):
                if turn % 2 == group.rank:
                    _compute(work, BETWEEN_SECONDS)
                    message[0] = time.perf_counter()
                    sending = transport.send(message.view(torch.uint8), peer, 0)
                    _compute(work, BETWEEN_SECONDS)
                    sending.wait()
                else:
                    transport.receive(message.view(torch.uint8), peer, 0).wait()
                    late.append(time.perf_counter() - float(message[0]))
        idle_barrier(group)
    gathered: list[list[float]] = group.allgather(late)
    return mean(each for of_rank in gathered for each in of_rank)


def _compute(work: Work, seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        work()


# ---- All-reduce ---------------------------------------------------------------------------------


def _allreduce(world: "MPI.Comm", unit: _Unit, link: _Link) -> tuple[AllReduce, float, float]:
    """Horovod's own, as the gradients use it, over the first unit of a level; its overlap there; and how fast
    ranks compute while it has nothing to do, relative to those without it.
    """
    timed, overlap, speed = _in_group(world, range(unit.ranks), _reduce)
    sent = 2 * (unit.ranks - 1) / unit.ranks  # by each rank, of the whole; no ring is faster than its links
    small, bucket = timed[0], timed[-1]  # of large ones, most are as long as a bucket
    slope = (bucket.seconds - small.seconds) / bucket.num_bytes
    timings = [(each.num_bytes, each.seconds) for each in timed]
    line = fit.fit_line(timings, max(slope, sent * link.message.seconds_per_byte))
    return AllReduce(sent / line.seconds_per_byte, line.start_seconds, line.error), overlap, speed


def _reduce(group: "MPI.Comm") -> tuple[list[_Timed], float, float]:
    without = _mean_rate(group)
    hvd = horovod(group)
    speed = min(1.0, _mean_rate(group) / without)

    def start(num_bytes: int) -> Callable[[], Callable[[], object]]:
        tensors = [torch.zeros(num_bytes // 4 // NUM_TENSORS) for _ in range(NUM_TENSORS)]

        def begin() -> Callable[[], object]:
            handle = hvd.grouped_allreduce_async_(tensors, name=f"probe{num_bytes}", op=hvd.Sum)
            return lambda: hvd.synchronize(handle)

        return begin

    def prepare(num_bytes: int) -> Callable[[], object]:
        begin = start(num_bytes)
        return lambda: begin()()

    timed = _by_size(group, prepare)
    overlap = _overlap(group, start(timed[-1].num_bytes), timed[-1].seconds)
    if timed[-1].num_bytes < BUCKET_BYTES:
        timed.append(_repeated(group, BUCKET_BYTES, prepare(BUCKET_BYTES)))
    hvd.shutdown()
    return timed, overlap, speed


def _mean_rate(group: "MPI.Comm") -> float:
    """Units of work a second of each rank, all computing at once."""
    work, rates = _default_work(), []
    for _ in range(ROUNDS):
        group.Barrier()
        rates.append(mean(group.allgather(_rate(work))))
    return float(median(rates))


def _overlap(group: "MPI.Comm", begin: Callable[[], Callable[[], object]], seconds: float) -> float:
    """How much of an all-reduce of `seconds` is hidden behind as long a computation, all ranks computing."""
    work = _default_work()
    work()
    units = max(1, round(seconds / mean(group.allgather(_time(work)[0]))))

    def compute() -> None:
        for _ in range(units):
            work()

    def both() -> None:
        finish = begin()
        compute()
        finish()

    begin()()
    found = []
    for _ in range(ROUNDS):
        taken = []
        for action in (compute, lambda: begin()(), both):
            group.Barrier()
            taken.append(mean(group.allgather(_time(action)[0])))
        found.append(fit.overlap(*taken))
    return median(found)


# ---- Computing ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Computing:
    speeds: tuple[float, ...]
    relative_speed: tuple[float, ...] | None


def _computing(world: "MPI.Comm", per_machine: int, work: Work) -> _Computing:
    """How much work 1, 2, 4, ... and all ranks of a machine do at once; every machine at the same time."""
    counts = sorted({*(2**i for i in range(per_machine.bit_length())), per_machine})
    work()
    rounds = ROUNDS if largest(world, _time(work)[0]) < COMPUTE_SECONDS else 1
    firsts = range(0, world.size, per_machine)
    done: dict[int, list[list[float]]] = {n: [] for n in counts}  # by machine, for each round
    for _ in range(rounds):
        for n in counts:
            idle_barrier(world)
            rate = _rate(work) if world.rank % per_machine < n else 0.0
            idle_barrier(world)
            rates = world.allgather(rate)
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
    return _Computing(fit.compute_speeds(throughput), relative)


def _rate(work: Work) -> float:
    """Units of work a second, for COMPUTE_SECONDS or one unit."""
    done, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < COMPUTE_SECONDS:
        work()
        done += 1
    return done / elapsed


def _default_work() -> Work:
    """About a millisecond, half of it in the cache and half of it through memory, as training is of both."""
    matrix, vector = torch.ones(192, 192), torch.ones(2**19)
    product, total = torch.empty_like(matrix), torch.empty_like(vector)

    def work() -> None:
        torch.mm(matrix, matrix, out=product)
        torch.add(vector, vector, out=total)

    return work
