"""MPI transport: nonblocking sends and receives, and a thread that makes progress while others compute.

Whoever waits polls by itself; while nobody waits, the communication thread does. Without it a large
nonblocking send stands still while Python computes, over TCP and over shared memory without single copy
(measured: 16 MB arrived 500 to 1100 ms late). With single copy who receives fetches a message by itself, and
where no core is left for the thread there is none (`progress_thread`). A rank that waits for long sleeps
between polls, which leaves the cores to whoever computes: a blocking MPI receive takes 87 % of one.

No receive is given to MPI before its message is there and known to have its size (matching probes): Open MPI
writes a longer message past the buffer's end, and takes a shorter one without an error.
"""

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hybridpipe.comm.messages import Buffers, ProtocolError
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.status import Wait, rank_status
from hybridpipe.comm.transport import SLOW_WAIT_SECONDS, Pending, Unexpected

# A rank that waits looks again at once for so long, where every rank of its machine has a core of its own: a
# pause lasts at least 70 µs, the kernel's timer slack included, and a small message takes 2.
SPIN_SECONDS = 2e-3
# Then, or from the start where ranks outnumber cores, it pauses: from the first to the last, doubled in
# between while nothing completes.
FIRST_PAUSE_SECONDS = 20e-6
LAST_PAUSE_SECONDS = 200e-6
# The communication thread's first pause after a large send, and after anything else. A large send without
# single copy goes in fragments, each of which waits for polls of both sides (256 KiB to a rank that waits
# while the sender computes: 7.9 ms at 1 ms, 3 ms at 100 µs). Receives posted ahead are mostly all there is
# while a rank computes: a fixed 50 µs took 15 % of a core and slowed computing down by 7 %.
PAUSE_URGENT_SECONDS = 100e-6
PAUSE_SECONDS = 1e-3
# Doubled up to this until there is something new: 1 ms and no more takes 4 % of a core on a virtual machine,
# whose timers and thread switches are slow; and a send waits for a receiver that computes.
IDLE_PAUSE_SECONDS = 4e-3
# Where receives whose messages are not there yet are all there is, each pause is then longer than the one
# before by this factor: what comes late is found within 4 ms and a sixteenth of the wait for it. The longest
# takes 1 % of a core in place of 2 to 5; a sender over TCP whose receiver computes starts so much later.
STRETCH = 17 / 16
LONGEST_PAUSE_SECONDS = 20e-3
# With nothing under way it takes so many pauses more before it sleeps until it is woken: to wake it for each
# message would cost more than a small message.
LINGER_PAUSES = 12
# A message of up to this size is on its way when `Isend` returns and needs no progress.
SMALL_BYTES = 4096
# Who waits tests its own request, and what else is under way once there is so much of it.
MOST_ACTIVE = 8
# Without a communication thread who waits tests all, and who sends does once there is so much: their buffers
# are held. Not who goes on to compute: a test that finds nothing yields the core.
MOST_SENT = 2

_Item = TypeVar("_Item")


class _Request:
    """One MPI request under way, or a receive whose message is not there yet (`request` is None).

    Args:
        what: for reports: what is waited for.
    """

    __slots__ = ("buffer", "completed", "error", "request", "transport", "urgent", "what")

    def __init__(
        self,
        request: MPI.Request | None,
        buffer: object,
        transport: "MpiTransport",
        urgent: bool,
        what: Wait,
    ) -> None:
        self.request, self.buffer, self.transport, self.urgent = request, buffer, transport, urgent
        self.what = what
        self.error: str | None = None
        self.completed = False

    def wait(self, on_slow: Callable[[], None] | None = None) -> None:
        if not self.completed:
            self.transport.wait_for(self, on_slow)
        if self.error is not None:
            raise ProtocolError(self.error)

    def is_complete(self) -> bool:
        return self.completed

    def complete(self) -> None:
        self.buffer = None
        self.completed = True


class _Arrived(NamedTuple):
    """A message that nobody has asked for yet: MPI holds it, or, once it was looked at, `copy` does."""

    message: MPI.Message | None
    num_bytes: int
    copy: Tensor | None = None

    def content(self) -> Tensor:
        """Its bytes, in memory of their own."""
        if self.copy is not None:
            return self.copy
        assert self.message is not None
        copy = torch.empty(self.num_bytes, dtype=torch.uint8)
        self.message.Recv([copy.numpy(), MPI.BYTE])
        return copy


class MpiTransport:
    """Transport over a communicator of its own. Use as a context manager, or `close` it.

    Args:
        cores_to_spare: every rank of this machine has a core of its own, so that one that waits may use it.
        progress_thread: a thread moves messages while the rank computes. Without one they must arrive without
            their sender's help.
        device: where this rank computes; by default the CPU.
    """

    def __init__(
        self,
        communicator: MPI.Comm,
        cores_to_spare: bool = False,
        progress_thread: bool = True,
        device: torch.device | None = None,
    ) -> None:
        self._communicator = communicator
        self.buffer = Buffers(pinned=device is not None and device.type == "cuda").take
        self._spin_seconds = SPIN_SECONDS if cores_to_spare else 0.0
        self._active: list[_Request] = []  # requests of MPI
        # by (peer, tag), in order, while there are any
        self._expected: defaultdict[tuple[int, int], deque[_Request]] = defaultdict(deque)
        self._arrived: defaultdict[tuple[int, int], deque[_Arrived]] = defaultdict(deque)
        self._num_expected = 0
        self._status = MPI.Status()
        self._polling = threading.Lock()  # held by the one thread that tests the requests
        self._guard = threading.Lock()  # guards what follows
        self._wake = threading.Condition(self._guard)  # wakes the communication thread
        self._resting = 0.0  # the communication thread's pause; 0: it is awake, inf: until it is woken
        self._pause = PAUSE_SECONDS  # its next one
        self._closed = False
        self._num_waiting = 0
        self.thread: threading.Thread | None = None
        if progress_thread:
            name = "hybridpipe-communication"
            self.thread = threading.Thread(target=self._progress, name=name, daemon=True)
            self.thread.start()

    def send(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        """Start sending (`MPI_Isend`)."""
        array = buffer.numpy()
        request = self._communicator.Isend([array, MPI.BYTE], peer, tag)
        what = Wait("send", (peer,), tag, array.nbytes)
        return self._watch(_Request(request, buffer, self, array.nbytes > SMALL_BYTES, what))

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        """The next message from there with this tag; waiting for it fails if it has another size."""
        expected = _Request(None, buffer, self, False, Wait("receive", (peer,), tag, len(buffer)))
        with self._polling:
            if (peer, tag) in self._arrived:
                self._take(expected, _pop(self._arrived, (peer, tag)))
            else:
                self._expected[peer, tag].append(expected)
                with self._guard:
                    self._num_expected += 1
                    self._look_within(PAUSE_SECONDS, IDLE_PAUSE_SECONDS)
        return expected

    def watch(
        self,
        request: MPI.Request,
        buffer: object,
        what: str = "collective",
        ranks: Sequence[int] | None = None,
    ) -> Pending:
        """Let any request be completed in the background, such as that of a nonblocking collective.

        Args:
            what, ranks: for reports: what it is, and who takes part (None: all).
        """
        ranks = range(self._communicator.size) if ranks is None else ranks
        return self._watch(_Request(request, buffer, self, False, Wait(what, tuple(ranks))))

    def unexpected(self, peer: int) -> list[Unexpected]:
        """The messages from there that have come, and that nobody has asked for."""
        with self._polling:
            while self._match():
                pass
            found = []
            for (source, tag), arrived in self._arrived.items():
                if source == peer:
                    copies = [each.content() for each in arrived]
                    self._arrived[source, tag] = deque(_Arrived(None, len(copy), copy) for copy in copies)
                    found += [Unexpected(tag, copy) for copy in copies]
        return found

    def _watch(self, pending: _Request) -> _Request:
        # Not tested here: a test that finds nothing yields the core (mpi_yield_when_idle), and with more
        # ranks than cores what is to be computed next waits for a time slice, a millisecond and more.
        with self._guard:
            self._active.append(pending)
            if pending.urgent:
                self._look_within(PAUSE_URGENT_SECONDS, 8 * PAUSE_URGENT_SECONDS)
            else:
                self._look_within(PAUSE_SECONDS, IDLE_PAUSE_SECONDS)
        if self.thread is None and len(self._active) > MOST_SENT:
            self._poll()
        return pending

    def _look_within(self, next_pause: float, this_pause: float) -> None:
        """The thread's next pause is no longer, and it is woken from one that is. `_guard` is held."""
        self._pause = min(self._pause, next_pause)
        if self._resting > this_pause:
            self._wake.notify()

    def wait_for(self, pending: _Request, on_slow: Callable[[], None] | None = None) -> None:
        """Poll until the request is complete; a communication thread rests meanwhile.

        Args:
            on_slow: called when it takes long; raises if it knows that there is nothing to wait for.
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
                self._num_waiting -= 1  # while others waited the thread did not look, and its pauses grew
                self._look_within(PAUSE_SECONDS, IDLE_PAUSE_SECONDS)

    def close(self) -> None:
        """Wait for what is under way and end the communication thread, if there is one."""
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
        return bool(self._active) or self._num_expected > 0

    def _progress(self) -> None:
        """The communication thread."""
        idle_pauses = 0
        while True:
            with self._guard:
                under_way = self._is_under_way
                if self._closed and not under_way:
                    return
                idle_pauses = 0 if under_way else idle_pauses + 1
                pause = self._pause
                self._resting = math.inf if idle_pauses > LINGER_PAUSES else pause
                self._pause = _longer(pause, only_expected=self._num_expected > 0 and not self._active)
                self._wake.wait(None if math.isinf(self._resting) else pause)
                self._resting = 0.0
                due = under_way and not self._num_waiting
            if due:
                self._poll()

    def _test(self, pending: _Request) -> bool:
        """Is the request complete? If so, see to what else is, too."""
        with self._polling:
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
        """Test what is under way."""
        with self._polling:
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
        """Take one message that has come, if any, to whoever expects it. Called while `_polling` is held."""
        if not self._num_expected:
            return False
        message = self._probe() or self._probe()  # Open MPI's first look moves what the second one finds
        if message is None:
            return False
        place = self._status.source, self._status.tag
        arrived = _Arrived(message, self._status.Get_count(MPI.BYTE))
        if place not in self._expected:
            self._arrived[place].append(arrived)
            return True
        with self._guard:
            self._num_expected -= 1
            self._look_within(PAUSE_SECONDS, IDLE_PAUSE_SECONDS)  # where one came, others may follow
        self._take(_pop(self._expected, place), arrived)
        return True

    def _probe(self) -> MPI.Message | None:
        return self._communicator.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, self._status)

    def _take(self, pending: _Request, arrived: _Arrived) -> None:
        """Start receiving a message that has come, if it is as long as it should be."""
        what = pending.what
        assert isinstance(pending.buffer, Tensor) and what.tag is not None
        if arrived.num_bytes != what.num_bytes:
            pending.error = (
                f"rank {what.peers[0]} sent {arrived.num_bytes} bytes with tag {what.tag} where the plan "
                f"expects {what.num_bytes}; nothing of it was taken"
            )
            self._arrived[what.peers[0], what.tag].appendleft(arrived)
            pending.complete()
        elif arrived.copy is not None:
            pending.buffer.copy_(arrived.copy)
            pending.complete()
        elif arrived.num_bytes <= SMALL_BYTES:  # all there
            assert arrived.message is not None
            arrived.message.Recv([pending.buffer.numpy(), MPI.BYTE])
            pending.complete()
        else:
            assert arrived.message is not None
            pending.request = arrived.message.Irecv([pending.buffer.numpy(), MPI.BYTE])
            with self._guard:
                self._active.append(pending)
                self._look_within(PAUSE_SECONDS, IDLE_PAUSE_SECONDS)


def _longer(pause: float, only_expected: bool) -> float:
    """The communication thread's pause after this one."""
    stretched = max(STRETCH * pause, IDLE_PAUSE_SECONDS) if only_expected else IDLE_PAUSE_SECONDS
    return min(2 * pause, stretched, LONGEST_PAUSE_SECONDS)


def _pop(queues: dict[tuple[int, int], deque[_Item]], place: tuple[int, int]) -> _Item:
    """The first in a queue, which goes with its last."""
    item = queues[place].popleft()
    if not queues[place]:
        del queues[place]
    return item


def _pauses() -> Iterator[float]:
    """Seconds to sleep between polls: doubled up to the last."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, LAST_PAUSE_SECONDS)
