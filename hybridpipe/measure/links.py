"""Links between ranks: bandwidth alone and shared, bursts after a rest, and the processor time of a message.

Not known here: stages and plans of a training. Invariant: as in `repetitions`.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from typing import TYPE_CHECKING

import torch

from hybridpipe.comm.courier import Courier
from hybridpipe.comm.idle import idle_barrier, largest
from hybridpipe.comm.p2p import PointToPoint
from hybridpipe.comm.transport import Pending, Transport
from hybridpipe.device import Lanes
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

STREAM_SECONDS = 0.06  # planned for the messages that each pair sends one after another
MAX_STREAMED = 16
REST_SECONDS = 0.06  # in this time 750 KB could pass over 100 Mbit/s
LIMITED_SECONDS = 1e-3  # a message that takes less does not show a limited rate
WAKING_ROUNDS = 3
TURNS, TURN_SECONDS = 30, 4e-3  # a turn is computing between two messages, for some time slices of the kernel
LONG_AHEAD = 4  # turns; a message that was sent so long ago has certainly arrived
WAITED_SECONDS = 2e-4  # a shorter wait means that the message was there
HANDLED, UNITS = 30, 3  # messages each way, and units of work between them
HOST = Lanes(torch.device("cpu"))
HANDLED_BYTES = 2**14  # more than MPI's eager limit
EXCHANGES: tuple[tuple[Callable[[int], Instruction], ...], ...] = (  # of the first stage of two, and the last
    (SendActivation, ReceiveGradient),
    (ReceiveActivation, SendGradient),
)
# The larger size whose processor time is measured, and the time it has to arrive in, while units of work run.
LARGE_BYTES, ARRIVED_SECONDS = 2**19, 2e-3


@dataclass(frozen=True, slots=True)
class Link:
    """A measured link between units of a level.

    Args:
        message: seconds of a message by its bytes, between two ranks alone.
        handling_seconds: processor time of a message at either end.
        handling_seconds_per_byte: and for each of its bytes.
        shared_bandwidth: bytes per second of all ranks of a unit together; None: a unit has one rank.
        burst_bytes: bytes that pass a rested link at once; None: its rate is not limited.
    """

    message: fit.Line
    handling_seconds: float
    handling_seconds_per_byte: float
    shared_bandwidth: float | None
    burst_bytes: float | None


def measure_link(
    world: "MPI.Comm", unit: Unit, per_machine: int, open_transport: OpenTransport, on_host: bool
) -> Link:
    """Measure messages between the first ranks of two units of the level below, then between all their ranks.

    Collective over `world`. A network that limits its rate lets some hundred KiB pass at once, and recovers
    in the pauses of a ping-pong. So the bandwidth is at most that of a sustained stream.

    Args:
        per_machine: ranks on each machine.
        on_host: False if GPUs compute: the host handles messages beside them.
    """
    timings = in_group(world, (0, unit.inner), partial(_ping_pong, open_transport=open_transport))
    both_units = range(2 * unit.inner)
    streamed = fit.fit_line(timings).seconds_per_byte
    stream = partial(_stream, open_transport=open_transport)
    one = in_group(world, both_units, partial(stream, num_pairs=1, seconds_per_byte=streamed))
    message = fit.fit_line(timings, 1 / one)
    shared = None
    if unit.inner > 1:  # else only one rank uses the link
        slower = unit.inner * message.seconds_per_byte
        together = in_group(world, both_units, partial(stream, num_pairs=unit.inner, seconds_per_byte=slower))
        shared = fit.shared_bandwidth(one, together, unit.inner)
    shared_seconds_per_byte = unit.inner / shared if shared else message.seconds_per_byte  # of every pair
    sizes = _handled_bytes(shared_seconds_per_byte)
    busy = range(max(2 * unit.inner, per_machine))
    handling_of = partial(_handling, distance=unit.inner, sizes=sizes, open_transport=open_transport)
    handled = in_group(world, busy, handling_of) if on_host else [0.0]
    per_byte = max(0.0, handled[-1] - handled[0]) / max(1, sizes[-1] - sizes[0])
    handling = max(0.0, handled[0] - sizes[0] * per_byte)
    rested_link = partial(_rested, message=message, open_transport=open_transport)
    rested = in_group(world, (0, unit.inner), rested_link)
    burst = fit.burst_bytes(rested, message)
    return Link(message, handling, per_byte, shared, burst)


def _ping_pong(group: "MPI.Comm", open_transport: OpenTransport) -> list[tuple[int, float]]:
    """Return (bytes, seconds one way) by size; one way is half of there and back."""
    with open_transport(group) as transport:
        prepare = partial(_there_and_back, group, transport)
        return [(each.num_bytes, each.seconds / 2) for each in by_size(group, SIZES_BYTES, prepare)]


def _rested(group: "MPI.Comm", message: fit.Line, open_transport: OpenTransport) -> list[tuple[int, float]]:
    """Return (bytes, seconds one way) over a rested link, for growing sizes, until one is slowed down."""
    timed: list[tuple[int, float]] = []
    with open_transport(group) as transport:
        for num_bytes in SIZES_BYTES:
            limited_seconds = num_bytes * message.seconds_per_byte
            if limited_seconds < LIMITED_SECONDS and num_bytes < SIZES_BYTES[-1]:
                continue  # too short to show a limit
            action = _there_and_back(group, transport, num_bytes, REST_SECONDS)
            taken = median(timed_call(action) for _ in range(MIN_REPEATS))
            timed.append((num_bytes, mean(group.allgather(taken)) / 2 - REST_SECONDS))
            if timed[-1][1] > message.start_seconds + 0.5 * limited_seconds:
                break
    return timed


def _there_and_back(
    group: "MPI.Comm", transport: Transport, num_bytes: int, pause_seconds: float = 0.0
) -> Callable[[], None]:
    """Return an action that sends a message there and back; each of the two ranks pauses before it sends."""
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
    """Return the bytes per second that the first `num_pairs` ranks together send to the group's other half.

    Args:
        seconds_per_byte: approximate seconds of a byte of each pair; it determines the bytes that are sent.
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
    """Return message sizes that arrive before the receiver waits for them.

    On a slow link the large size is left out: the processor time of a byte is nothing beside its transfer.
    """
    large = int(min(LARGE_BYTES, ARRIVED_SECONDS / seconds_per_byte))
    return [HANDLED_BYTES, large] if large > 4 * HANDLED_BYTES else [HANDLED_BYTES]


def _handling(
    group: "MPI.Comm", distance: int, sizes: Sequence[int], open_transport: OpenTransport
) -> list[float]:
    """Return the processor seconds of a message at either end, by size, for ranks that compute in between.

    They include the work of `PointToPoint`. A ping-pong would take less: its code stays in the caches, and
    the progress thread sleeps.

    Args:
        distance: ranks i and i + distance exchange messages, in blocks of twice as many; a rank without a
            partner only computes.
    """
    work = default_work(HOST)
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
    """Return the exchange between two ranks that hold one stage each."""
    stages = [StageSpec(i, i + 1, ranks=(rank,)) for i, rank in enumerate(pair)]
    plan = Plan(tuple(stages), num_microbatches=HANDLED)
    return PointToPoint(plan, stage, Courier(transport, HOST))


def _exchange_and_compute(p2p: PointToPoint | None, stage: int, num_bytes: int, work: Work) -> None:
    """Send messages each way while both ranks compute; each is received long after its arrival."""
    activation = torch.zeros(num_bytes // 4, requires_grad=True)
    if p2p is not None:
        program: Program = tuple(kind(m) for m in range(HANDLED) for kind in EXCHANGES[stage])
        p2p.begin(program, lambda _: num_bytes, step=0, training=True)
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
    """Receive an activation and send a gradient of the same size."""
    received = tensors_of(p2p.receive_activation(microbatch))
    p2p.send_gradient(microbatch, [tensor.detach() for tensor in received])


def measure_wakeups(
    world: "MPI.Comm", sharing: int, speeds: Sequence[float], open_transport: OpenTransport
) -> tuple[float, ...]:
    """Measure the processor time that a machine loses when a waiting rank wakes up. Collective over `world`.

    The kernel may queue the rank for one processor while another is idle, and its cache contents are gone.
    Ranks in a ring compute and pass messages on: once each needs the message that the rank before it has just
    sent, and once a message that arrived long ago. Of n + 1 such ranks n compute. With fewer ranks less work
    fills the gap: on two cores 1.3 ms are lost with two ranks and 0.7 ms with three.

    Args:
        sharing: number of ranks that share a machine's processors; 1 where each has its own.
        speeds: as in `Cluster.compute_speeds`.

    Returns:
        Entry n-1: seconds lost while n < sharing ranks compute; 0 where they leave a processor free or hardly
        any rank had to wait. Empty where no number of ranks shares processors.
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
    """Return the extra seconds of turns whose messages are just in time, and the extra number of waits.

    Both are medians over the rounds, relative to turns whose messages arrived long before.

    Args:
        slower: factor by which turns with messages just in time take longer anyway: one rank fewer computes.
    """
    compute = computation(group, TURN_SECONDS, HOST)
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
    """Return the seconds of TURNS turns on all ranks, and the number of messages that were waited for.

    Args:
        ahead: turns that a rank takes before it needs a message.
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
