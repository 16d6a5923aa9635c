"""Messages: a link alone and shared, rested and not, and what a message takes from those who compute."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from typing import TYPE_CHECKING

import torch

from hybridpipe.comm.idle import idle_barrier, largest
from hybridpipe.comm.p2p import PointToPoint
from hybridpipe.comm.transport import Pending, Transport
from hybridpipe.measure.repetitions import (
    MIN_REPEATS,
    ROUNDS,
    SIZES_BYTES,
    OpenTransport,
    Unit,
    Work,
    by_size,
    computation,
    default_work,
    in_group,
    timed_call,
)
from hybridpipe.model.tensors import tensors_of
from hybridpipe.planning.cost import fit
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.schedules.instructions import (
    Instruction,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
)

if TYPE_CHECKING:
    from mpi4py import MPI

STREAM_SECONDS = 0.06  # of the messages that one pair, or several at once, send one after another
MAX_STREAMED = 16
REST_SECONDS = 0.06  # over 100 Mbit/s 750 KB could have passed meanwhile
LIMITED_SECONDS = 1e-3
WAKING_ROUNDS = 3
TURNS, TURN_SECONDS = 30, 4e-3  # of computing between two messages, a few time slices of the kernel
LONG_AHEAD = 4  # turns, after which a message has been there for long
WAITED_SECONDS = 2e-4  # a rank that finds a message goes on sooner
HANDLED, UNITS = 30, 3  # messages each way, and units of work between them
HANDLED_BYTES = 2**14  # more than what MPI sends at once
EXCHANGES: tuple[tuple[Callable[[int], Instruction], ...], ...] = (  # of the first stage of two, and the last
    (SendActivation, ReceiveGradient),
    (ReceiveActivation, SendGradient),
)
LARGE_BYTES, ARRIVED_SECONDS = 2**19, 2e-3  # those, or as many as arrive in less than the units of work take


@dataclass(frozen=True, slots=True)
class Link:
    message: fit.Line
    handling_seconds: float  # processor time at either end
    handling_seconds_per_byte: float
    shared_bandwidth: float | None
    burst_bytes: float | None


def measure_link(world: "MPI.Comm", unit: Unit, per_machine: int, open_transport: OpenTransport) -> Link:
    """Messages between the first ranks of two units of the level below, then between all their ranks.

    A network that limits a rate lets some hundred KiB pass at once, and a ping-pong gives it pauses; so the
    bandwidth is at most what a stream sustains.
    """
    timings = in_group(world, (0, unit.inner), partial(_ping_pong, open_transport=open_transport))
    both_units = range(2 * unit.inner)
    streamed = fit.fit_line(timings).seconds_per_byte
    stream = partial(_stream, open_transport=open_transport)
    one = in_group(world, both_units, partial(stream, num_pairs=1, seconds_per_byte=streamed))
    message = fit.fit_line(timings, 1 / one)
    shared = None
    if unit.inner > 1:  # else it is the port of one rank
        slower = unit.inner * message.seconds_per_byte
        together = in_group(world, both_units, partial(stream, num_pairs=unit.inner, seconds_per_byte=slower))
        shared = fit.shared_bandwidth(one, together, unit.inner)
    at_once = unit.inner / shared if shared else message.seconds_per_byte  # seconds, a byte of every pair
    sizes = _handled_bytes(at_once)
    busy = range(max(2 * unit.inner, per_machine))
    handling_of = partial(_handling, distance=unit.inner, sizes=sizes, open_transport=open_transport)
    handled = in_group(world, busy, handling_of)
    per_byte = max(0.0, handled[-1] - handled[0]) / max(1, sizes[-1] - sizes[0])
    handling = max(0.0, handled[0] - sizes[0] * per_byte)
    rested_link = partial(_rested, message=message, open_transport=open_transport)
    rested = in_group(world, (0, unit.inner), rested_link)
    burst = fit.burst_bytes(rested, message)
    return Link(message, handling, per_byte, shared, burst)


def _ping_pong(group: "MPI.Comm", open_transport: OpenTransport) -> list[tuple[int, float]]:
    """(bytes, seconds one way): half of there and back."""
    with open_transport(group) as transport:
        prepare = partial(_there_and_back, group, transport)
        return [(each.num_bytes, each.seconds / 2) for each in by_size(group, SIZES_BYTES, prepare)]


def _rested(group: "MPI.Comm", message: fit.Line, open_transport: OpenTransport) -> list[tuple[int, float]]:
    """Messages over a link that has rested, by size, until one is limited: (bytes, seconds one way)."""
    timed: list[tuple[int, float]] = []
    with open_transport(group) as transport:
        for num_bytes in SIZES_BYTES:
            limited_seconds = num_bytes * message.seconds_per_byte
            if limited_seconds < LIMITED_SECONDS and num_bytes < SIZES_BYTES[-1]:
                continue  # too short to be told apart
            action = _there_and_back(group, transport, num_bytes, REST_SECONDS)
            taken = median(timed_call(action) for _ in range(MIN_REPEATS))
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


def _stream(
    group: "MPI.Comm", num_pairs: int, seconds_per_byte: float, open_transport: OpenTransport
) -> float:
    """Bytes per second that `num_pairs` ranks of the first half of the group send to those of the second.

    Args:
        seconds_per_byte: of each of them, about; decides how much is sent.
    """
    half = group.size // 2
    num_bytes = STREAM_SECONDS / seconds_per_byte
    count = min(MAX_STREAMED, math.ceil(num_bytes / SIZES_BYTES[-1]))
    buffers = [
        torch.zeros(min(SIZES_BYTES[-1], math.ceil(num_bytes / count)), dtype=torch.uint8)
        for _ in range(count)
    ]
    taken = []
    with open_transport(group) as transport:
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


def _handled_bytes(seconds_per_byte: float) -> list[int]:
    """Sizes of messages of which none is still on its way when it is waited for.

    A large one is left out where that is not much larger than the small one: on so slow a link the
    processor's part in a byte is nothing.
    """
    large = int(min(LARGE_BYTES, ARRIVED_SECONDS / seconds_per_byte))
    return [HANDLED_BYTES, large] if large > 4 * HANDLED_BYTES else [HANDLED_BYTES]


def _handling(
    group: "MPI.Comm", distance: int, sizes: Sequence[int], open_transport: OpenTransport
) -> list[float]:
    """Processor seconds that a message of each size takes, at either end, from ranks that compute in between.

    With all that `PointToPoint` does for it. A ping-pong's are fewer: its path stays in the caches, and a
    progress thread asleep.

    Args:
        distance: the first so many ranks exchange with the next so many, and so on; who has none, computes.
    """
    work = default_work()
    block, place = divmod(group.rank, distance)
    pair = [each * distance + place for each in (block & ~1, block | 1)]
    rounds: list[list[float]] = []
    with open_transport(group) as transport:
        p2p = _p2p(pair, block & 1, transport) if pair[1] < group.size else None
        for _ in range(1 + ROUNDS):
            taken = []
            for num_bytes in (0, *sizes):
                idle_barrier(group)
                began = time.process_time()
                _exchange_and_compute(p2p if num_bytes else None, block & 1, num_bytes, work)
                taken.append(time.process_time() - began)
            extra = [each for each in group.allgather(p2p and taken) if each is not None]
            rounds.append([mean(each[i] - each[0] for each in extra) for i in range(1, len(taken))])
    return [max(0.0, median(of_size)) / (2 * HANDLED) for of_size in zip(*rounds[1:], strict=True)]


def _p2p(pair: Sequence[int], stage: int, transport: Transport) -> PointToPoint:
    """Between two ranks that hold a stage each."""
    stages = [StageSpec(i, i + 1, ranks=(rank,)) for i, rank in enumerate(pair)]
    return PointToPoint(Plan(tuple(stages), num_microbatches=HANDLED), stage, transport, torch.device("cpu"))


def _exchange_and_compute(p2p: PointToPoint | None, stage: int, num_bytes: int, work: Work) -> None:
    """A message goes each way while both compute, and is asked for when it has long been there."""
    activation = torch.zeros(num_bytes // 4, requires_grad=True)
    if p2p is not None:
        program: Program = tuple(kind(m) for m in range(HANDLED) for kind in EXCHANGES[stage])
        sizes = [num_bytes] * HANDLED  # in place of samples, which the shapes are known by
        p2p.begin(program, sizes, step=0, training=True)
    for turn in range(HANDLED + 2):
        for _ in range(UNITS if turn < HANDLED else 0):
            work()
        if p2p is None:
            continue
        if stage == 1 and 0 < turn <= HANDLED:
            _answer(p2p, turn - 1)
        if stage == 0 and turn >= 2:
            p2p.receive_gradient(turn - 2)
        if stage == 0 and turn < HANDLED:
            p2p.send_activation(turn, activation)


def _answer(p2p: PointToPoint, microbatch: int) -> None:
    """An activation's gradient, which is as large."""
    received = tensors_of(p2p.receive_activation(microbatch))
    p2p.send_gradient(microbatch, [tensor.detach() for tensor in received])


def measure_wakeups(
    world: "MPI.Comm", sharing: int, speeds: Sequence[float], open_transport: OpenTransport
) -> tuple[float, ...]:
    """Processor time that a machine loses when a rank that has waited for a message goes on, by how many of
    its ranks compute then.

    The kernel may let it wait for one processor while another has nothing to do, and what the rank had in the
    caches is gone. So ranks in a ring compute and pass on as much, once each needing the message that the one
    before it has just sent, and once one that has long been there. Of n + 1 such ranks n compute, and the
    fewer they are, the less is there to fill a gap: on two cores 1.3 ms with two and 0.7 with three.

    Args:
        sharing: so many ranks share a machine's processors; 1 where each has its own.
        speeds: as `Cluster.compute_speeds`.

    Returns:
        entry n-1: with n ranks that compute, n < sharing; 0 where they leave a processor free, or hardly any
        had to wait. Empty where all leave one free.
    """
    together = [n * speed for n, speed in enumerate(speeds, start=1)]  # n ranks, relative to one alone
    measured = {}
    for n in fit.doubling(max(1, round(together[-1])), sharing - 1):
        slower = together[n] / together[n - 1]
        lost = partial(_lost_by_waiting, slower=slower, open_transport=open_transport)
        seconds, waits = in_group(world, range(n + 1), lost)
        measured[n] = max(0.0, seconds) * together[n - 1] / waits if waits > TURNS / 2 else 0.0
    return fit.between(measured)


def _lost_by_waiting(group: "MPI.Comm", slower: float, open_transport: OpenTransport) -> tuple[float, int]:
    """Seconds that turns take longer where all but one rank can have their message at once, and how many
    more messages are waited for; medians.

    Args:
        slower: and that they would take as many times as long anyway, as one rank fewer computes.
    """
    compute = computation(group, TURN_SECONDS)
    rounds = []
    for _ in range(WAKING_ROUNDS):
        scarce, waits = _turns(group, compute, int(group.rank < group.size - 1), open_transport)
        plenty, others = _turns(group, compute, LONG_AHEAD, open_transport)
        rounds.append((scarce - slower * plenty, waits - others))
    seconds, num_waits = map(median, zip(*rounds, strict=True))
    return seconds, round(num_waits)


def _turns(
    group: "MPI.Comm", compute: Callable[[], None], ahead: int, open_transport: OpenTransport
) -> tuple[float, int]:
    """Seconds of TURNS turns on all ranks, and the number of messages that were waited for.

    Args:
        ahead: so many turns a rank takes before it needs a message.
    """
    before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    message = torch.zeros(HANDLED_BYTES, dtype=torch.uint8)
    waits = 0
    with open_transport(group) as transport:
        idle_barrier(group)
        began = time.perf_counter()
        pending = [transport.receive(torch.empty_like(message), before, 0) for _ in range(TURNS)]
        for turn in range(TURNS):
            if turn >= ahead:
                waits += timed_call(pending[turn - ahead].wait) > WAITED_SECONDS
            compute()
            pending.append(transport.send(message, after, 0))
        taken = time.perf_counter() - began
        for each in pending:
            each.wait()
    return largest(group, taken), sum(group.allgather(waits))
