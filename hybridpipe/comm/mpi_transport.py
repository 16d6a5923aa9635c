"""MPI transport: nonblocking sends and receives, and a progress thread that polls while the rank computes.

Knows requests and sizes of messages, not their content.
Invariant: MPI gets a receive only after a matching probe has found a message of the right size.
"""

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import compress
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hybridpipe.comm import transport
from hybridpipe.comm.messages import Buffers, ProtocolError
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.status import Wait, rank_status
from hybridpipe.comm.transport import SLOW_WAIT_SECONDS, Pending, PendingParts, Unexpected, is_last, parts_of
from hybridpipe.device import Completion

# A waiting rank polls without pauses for this time if every rank of its machine has a core of its own: a
# pause lasts at least 70 µs with the kernel's timer slack, and a small message takes 2 µs.
SPIN_SECONDS = 2e-3
# After that, or from the start if ranks outnumber cores, it sleeps between polls, which leaves the cores to
# ranks that compute (a blocking MPI receive takes 87 % of a core). Pauses double from the first to the last.
FIRST_PAUSE_SECONDS = 20e-6
LAST_PAUSE_SECONDS = 200e-6
# The progress thread's first pause after a large send. Without single copy a large send goes in fragments,
# and each fragment waits for polls of both sides.
PAUSE_URGENT_SECONDS = 100e-6
# Its first pause after anything else, which mostly means receives posted ahead while the rank computes, and
# its longest while a large message is under way: up to 4 ms, 64 MiB over TCP took 73 ms in place of 40. A
# fixed pause of 50 µs took 15 % of a core and slowed computing down by 7 %.
PAUSE_SECONDS = 1e-3
# Else pauses double up to this until something new is sent or received. A fixed pause of 1 ms takes 4 % of a
# core on a virtual machine, whose timers and thread switches are slow.
IDLE_PAUSE_SECONDS = 4e-3
# If only receives without a message are left, each pause is longer than the one before by this factor. A late
# message is then found within 4 ms and a sixteenth of the wait for it.
STRETCH = 17 / 16
# The longest pause takes 1 % of a core instead of 2 to 5 %; it delays a sender over TCP whose receiver
# computes by as much.
LONGEST_PAUSE_SECONDS = 20e-3
# Number of further pauses of an idle progress thread before it sleeps until it is woken: to wake it for each
# message would cost more than a small message.
LINGER_PAUSES = 12
# A message of up to this size is sent when `Isend` returns and needs no further polls.
SMALL_BYTES = 4096
# A waiting rank tests its own request, and all requests if there are more than this.
MOST_ACTIVE = 8
# Without a progress thread a waiting rank tests all requests. A sending rank does so if there are more than
# this, since their buffers are held. Fewer are not tested before the rank computes, since a test that finds
# nothing yields the core.
MOST_SENT = 2

_Item = TypeVar("_Item")


class _Request:
    """One MPI request in progress, or a receive whose message has not arrived (`request` is None).

    Args:
        large: True for a message that may go in fragments, which need frequent polls.
        what: description of the wait, for reports.
        arrived: called once a message that was received is there; what it raises, `wait` raises.
    """

    __slots__ = ("arrived", "buffer", "completed", "error", "large", "request", "transport", "what")

    def __init__(
        self,
        request: MPI.Request | None,
        buffer: object,
        transport: "MpiTransport",
        large: bool,
        what: Wait,
        arrived: Callable[[], None] | None = None,
    ) -> None:
        self.request, self.buffer, self.transport, self.large = request, buffer, transport, large
        self.what, self.arrived = what, arrived
        self.error: Exception | None = None
        self.completed = False

    def wait(self, on_slow: Callable[[], None] | None = None) -> None:
        if not self.completed:
            self.transport.wait_for(self, on_slow)
        if self.error is not None:
            raise self.error

    def is_complete(self) -> bool:
        return self.completed

    def complete(self) -> None:
        if self.arrived is not None and self.error is None:
            try:
                self.arrived()
            except Exception as error:  # often in the progress thread, where nobody would see it
                self.error = error
        self.buffer = self.arrived = None
        self.completed = True


class _Arrived(NamedTuple):
    """A message without a posted receive; MPI holds it, or `copy` does once its content was read."""

    message: MPI.Message | None
    num_bytes: int
    copy: Tensor | None = None

    def content(self) -> Tensor:
        """Return the message's bytes, and receive them from MPI if needed."""
        if self.copy is not None:
            return self.copy
        assert self.message is not None
        copy = torch.empty(self.num_bytes, dtype=torch.uint8)
        self.message.Recv([copy.numpy(), MPI.BYTE])
        return copy


class MpiTransport:
    """Transport over a communicator of its own. Use it as a context manager, or `close` it.

    A waiting rank polls itself; otherwise the progress thread polls. Without the thread a large nonblocking
    send makes no progress while Python computes, over TCP and over shared memory without single copy
    (measured: 16 MB arrived 500 to 1100 ms late). With single copy the receiver fetches a message by itself
    (`progress_thread`).

    Receives are matched by probes: Open MPI would write a message that is too long past the buffer's end,
    and accept one that is too short without an error.

    Args:
        cores_to_spare: True if every rank of this machine has a core of its own and may poll without pauses.
        progress_thread: start a progress thread. Without one, messages must arrive without their sender's
            help.
        pinned: its buffers are pinned memory, for copies to and from a GPU.
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        cores_to_spare: bool = False,
        progress_thread: bool = True,
        pinned: bool = False,
    ) -> None:
        self._communicator = communicator
        self.buffer = Buffers(pinned).take
        self._gpu = torch.cuda.current_device() if pinned and torch.cuda.is_available() else None
        self._spin_seconds = SPIN_SECONDS if cores_to_spare else 0.0
        self._active: list[_Request] = []  # MPI's requests
        self._unsent: deque[tuple[Completion, _Request]] = deque()  # not computed yet, in order
        # by (peer, tag), in order; a pair without any is absent
        self._expected: defaultdict[tuple[int, int], deque[_Request]] = defaultdict(deque)
        self._arrived: defaultdict[tuple[int, int], deque[_Arrived]] = defaultdict(deque)
        self._num_expected = 0
        self._status = MPI.Status()
        self._polling = threading.Lock()  # held by the one thread that tests the requests
        self._guard = threading.Lock()  # guards `_active`, `_num_expected` and the attributes below
        self._wake = threading.Condition(self._guard)  # wakes the progress thread
        self._resting = 0.0  # the progress thread's pause; 0: it is awake, inf: until it is woken
        self._pause = PAUSE_SECONDS  # its next pause
        self._closed = False
        self._num_waiting = 0
        self.thread: threading.Thread | None = None
        if progress_thread:
            name = "hybridpipe-progress"
            self.thread = threading.Thread(target=self._progress, name=name, daemon=True)
            self.thread.start()

    def send(self, buffer: Tensor, peer: int, tag: int, ready: Sequence[Completion] | None = None) -> Pending:
        """Start sending with `MPI_Isend`; `buffer` is kept alive until the transfer is complete."""
        if len(buffer) < transport.PART_BYTES:
            return self._send(buffer, peer, tag, None if ready is None else ready[0])
        parts = parts_of(buffer)
        each = [None] * len(parts) if ready is None else ready
        return PendingParts([self._send(part, peer, tag, at) for part, at in zip(parts, each, strict=True)])

    def _send(self, buffer: Tensor, peer: int, tag: int, ready: Completion | None) -> Pending:
        num_bytes = len(buffer)
        what = Wait("send", (peer,), tag, num_bytes)
        pending = _Request(None, buffer, self, num_bytes > SMALL_BYTES, what)
        if ready is None:
            pending.request = self._start(pending)
            return self._watch(pending)
        with self._guard:
            self._unsent.append((ready, pending))
            self._limit_pause(PAUSE_URGENT_SECONDS, 0.0)  # the event comes when the GPU is done, soon
        return pending

    def _start(self, pending: _Request) -> MPI.Request:
        what = pending.what
        assert isinstance(pending.buffer, Tensor) and what.tag is not None
        return self._communicator.Isend([memory_of(pending.buffer), MPI.BYTE], what.peers[0], what.tag)

    def _start_computed(self) -> None:
        """Start sending what is computed by now. `_polling` is held."""
        while self._unsent and self._unsent[0][0].query():
            _, pending = self._unsent.popleft()
            pending.request = self._start(pending)
            with self._guard:
                self._active.append(pending)

    def receive(
        self, buffer: Tensor, peer: int, tag: int, arrived: Callable[[int], None] | None = None
    ) -> Pending:
        """Post a receive of the peer's next message with this tag; its `wait` raises for another size."""
        if len(buffer) < transport.PART_BYTES:
            return self._receive(buffer, peer, tag, arrived and partial(arrived, 0))
        parts = enumerate(parts_of(buffer))
        return PendingParts(
            [self._receive(part, peer, tag, arrived and partial(arrived, i)) for i, part in parts]
        )

    def _receive(self, buffer: Tensor, peer: int, tag: int, arrived: Callable[[], None] | None) -> Pending:
        num_bytes = len(buffer)
        what = Wait("receive", (peer,), tag, num_bytes)
        expected = _Request(None, buffer, self, num_bytes > SMALL_BYTES, what, arrived)
        with self._polling:
            if (peer, tag) in self._arrived:
                self._take(expected, _pop(self._arrived, (peer, tag)))
            else:
                self._expected[peer, tag].append(expected)
                with self._guard:
                    self._num_expected += 1
                    self._limit_pause(PAUSE_SECONDS, IDLE_PAUSE_SECONDS)
        return expected

    def watch(
        self,
        request: MPI.Request,
        buffer: object,
        what: str = "collective",
        ranks: Sequence[int] | None = None,
    ) -> Pending:
        """Complete any request in the background, such as that of a nonblocking collective.

        Args:
            buffer: kept alive until the request is complete.
            what: name of the request, for reports.
            ranks: the ranks that take part, for reports; None: all.
        """
        ranks = range(self._communicator.size) if ranks is None else ranks
        return self._watch(_Request(request, buffer, self, False, Wait(what, tuple(ranks))))

    def unexpected(self, peer: int) -> list[Unexpected]:
        """Return the messages from a peer that have arrived without a posted receive."""
        with self._polling:
            while self._match():
                pass
            found = []
            for (source, tag), arrived in self._arrived.items():
                if source == peer:
                    copies = [each.content() for each in arrived]
                    self._arrived[source, tag] = deque(_Arrived(None, len(copy), copy) for copy in copies)
                    firsts = compress(copies, [True, *map(is_last, copies)])
                    found += [Unexpected(tag, copy) for copy in firsts]
        return found

    def _watch(self, pending: _Request) -> _Request:
        # Not tested here: a test that finds nothing yields the core (mpi_yield_when_idle). With more ranks
        # than cores the rank's next computation would then wait a millisecond or more for a time slice.
        with self._guard:
            self._active.append(pending)
            if pending.large:
                self._limit_pause(PAUSE_URGENT_SECONDS, 8 * PAUSE_URGENT_SECONDS)
            else:
                self._limit_pause(PAUSE_SECONDS, IDLE_PAUSE_SECONDS)
        if self.thread is None and len(self._active) > MOST_SENT:
            self._poll()
        return pending

    def _limit_pause(self, next_pause: float, this_pause: float) -> None:
        """Limit the progress thread's next pause, and end a longer present one. `_guard` is held."""
        self._pause = min(self._pause, next_pause)
        if self._resting > this_pause:
            self._wake.notify()

    def wait_for(self, pending: _Request, on_slow: Callable[[], None] | None = None) -> None:
        """Poll until the request is complete; the progress thread does not poll meanwhile.

        Args:
            on_slow: called after every SLOW_WAIT_SECONDS; raises if the message cannot arrive any more.
        """
        with self._guard:
            self._num_waiting += 1
        began = time.perf_counter()
        slow_at = began + SLOW_WAIT_SECONDS
        pauses = _pauses()
        before, rank_status.wait = rank_status.wait, pending.what
        try:
            while not self._test(pending):
                if self.thread is None:
                    self._poll()
                now = time.perf_counter()
                if now >= began + self._spin_seconds:
                    time.sleep(next(pauses))
                if now >= slow_at and on_slow is not None:
                    on_slow()
                    slow_at = now + SLOW_WAIT_SECONDS
        finally:
            rank_status.wait = before
            with self._guard:
                self._num_waiting -= 1  # the progress thread's pauses have grown meanwhile
                self._limit_pause(PAUSE_SECONDS, IDLE_PAUSE_SECONDS)

    def close(self) -> None:
        """Wait for all transfers and end the progress thread."""
        with self._guard:
            self._closed = True
            self._wake.notify()
        if self.thread is not None:
            self.thread.join()
        pauses = _pauses()
        while self._is_under_way:
            self._poll()
            time.sleep(next(pauses))

    def __enter__(self) -> "MpiTransport":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _is_under_way(self) -> bool:
        return bool(self._active) or bool(self._unsent) or self._num_expected > 0

    def _progress(self) -> None:
        """Run the progress thread."""
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)  # else this thread's first look at an event would use the first
        idle_pauses = 0
        while True:
            with self._guard:
                under_way = self._is_under_way
                if self._closed and not under_way:
                    return
                idle_pauses = 0 if under_way else idle_pauses + 1
                pause = self._pause
                self._resting = math.inf if idle_pauses > LINGER_PAUSES else pause
                large = any(request.large for request in self._active)
                self._pause = _longer(pause, large, only_expected=self._num_expected > 0 and not self._active)
                if self._unsent:
                    self._pause = PAUSE_URGENT_SECONDS
                self._wake.wait(None if math.isinf(self._resting) else pause)
                self._resting = 0.0
                due = under_way and not self._num_waiting
            if due:
                self._poll()

    def _test(self, pending: _Request) -> bool:
        """Return True if the request is complete; then test the others as well, if there are many."""
        with self._polling:
            self._start_computed()
            while not pending.completed and pending.request is None:
                if not self._match():
                    return False
            if not pending.completed:
                assert pending.request is not None
                if not pending.request.Test():
                    return False
                with self._guard:
                    self._active.remove(pending)
                pending.complete()
        if len(self._active) > MOST_ACTIVE:
            self._poll()
        return True

    def _poll(self) -> None:
        """Match arrived messages with receives, and test all requests."""
        with self._polling:
            self._start_computed()
            while self._match():
                pass
            with self._guard:
                active = list(self._active)
            finished = MPI.Request.Testsome([each.request for each in active if each.request is not None])
            if not finished:
                return
            completed = [active[i] for i in finished]
            with self._guard:
                self._active = [pending for pending in self._active if pending not in completed]
            for pending in completed:
                pending.complete()

    def _match(self) -> bool:
        """Match one arrived message with its receive; False if there is none. `_polling` is held."""
        if not self._num_expected:
            return False
        message = self._probe() or self._probe()  # Open MPI's first probe makes the progress for the second
        if message is None:
            return False
        place = self._status.source, self._status.tag
        arrived = _Arrived(message, self._status.Get_count(MPI.BYTE))
        if place not in self._expected:
            self._arrived[place].append(arrived)
            return True
        with self._guard:
            self._num_expected -= 1
            self._limit_pause(PAUSE_SECONDS, IDLE_PAUSE_SECONDS)  # further messages may follow
        self._take(_pop(self._expected, place), arrived)
        return True

    def _probe(self) -> MPI.Message | None:
        return self._communicator.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, self._status)

    def _take(self, pending: _Request, arrived: _Arrived) -> None:
        """Start receiving an arrived message, or set the error if its size is wrong."""
        what = pending.what
        assert isinstance(pending.buffer, Tensor) and what.tag is not None
        if arrived.num_bytes != what.num_bytes:
            pending.error = ProtocolError(
                f"rank {what.peers[0]} sent {arrived.num_bytes} bytes with tag {what.tag} where the plan "
                f"expects {what.num_bytes}; the message was not read"
            )
            self._arrived[what.peers[0], what.tag].appendleft(arrived)
            pending.complete()
        elif arrived.copy is not None:
            pending.buffer.copy_(arrived.copy)
            pending.complete()
        elif arrived.num_bytes <= SMALL_BYTES:  # all of it has arrived
            assert arrived.message is not None
            arrived.message.Recv([memory_of(pending.buffer), MPI.BYTE])
            pending.complete()
        else:
            assert arrived.message is not None
            pending.request = arrived.message.Irecv([memory_of(pending.buffer), MPI.BYTE])
            with self._guard:
                self._active.append(pending)
                self._limit_pause(PAUSE_SECONDS, IDLE_PAUSE_SECONDS)


def memory_of(buffer: Tensor) -> object:
    """Return a tensor of bytes as mpi4py takes it: memory of the host, or of a GPU where MPI can use it."""
    return buffer.numpy() if buffer.device.type == "cpu" else buffer


def _longer(pause: float, large: bool, only_expected: bool) -> float:
    """Return the progress thread's pause after this one.

    Args:
        large: a large message is under way.
        only_expected: receives without a message are all there is.
    """
    if large:
        return min(2 * pause, PAUSE_SECONDS)
    stretched = max(STRETCH * pause, IDLE_PAUSE_SECONDS) if only_expected else IDLE_PAUSE_SECONDS
    return min(2 * pause, stretched, LONGEST_PAUSE_SECONDS)


def _pop(queues: dict[tuple[int, int], deque[_Item]], place: tuple[int, int]) -> _Item:
    """Remove and return the first item of a queue, and drop a queue that is empty then."""
    item = queues[place].popleft()
    if not queues[place]:
        del queues[place]
    return item


def _pauses() -> Iterator[float]:
    """Yield the pauses between polls in seconds, doubled up to LAST_PAUSE_SECONDS."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, LAST_PAUSE_SECONDS)
