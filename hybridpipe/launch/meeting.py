"""Meeting: the process where groups that are jobs of their own exchange, so that one can be lost and return.

Knows no MPI and no rule: it adds up what groups send, in their order, and hands the centre to those that
come. Invariant: an exchange is over all groups that are there, for all of their ranks, or it is not made.
"""

import json
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np

from hybridpipe.comm.frames import Frame, Kind, keep_alive, receive, send
from hybridpipe.notices import notices


@dataclass(eq=False)
class _Group:
    """A group, from its ranks' hello to its end.

    Args:
        session: differs between one start of a group and the next.
        size: number of its ranks.
        step: minibatches that it has trained on.
        plan: text that is the same for groups whose ranks hold the same.
    """

    index: int
    session: str
    size: int
    step: int
    plan: str
    outboxes: dict[int, "SimpleQueue[Frame | None]"] = field(default_factory=dict)
    moves: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """True if all of its ranks are connected."""
        return len(self.outboxes) == self.size

    def tell(self, rank: int, frame: Frame) -> None:
        """Let a thread send a frame to one of its ranks."""
        if rank in self.outboxes:
            self.outboxes[rank].put(frame)


class Meeting:
    """The meeting of `count` groups.

    Args:
        host: the name under which ranks reach this process.
    """

    def __init__(self, count: int, host: str) -> None:
        self._lock = threading.Lock()
        self._expected = set(range(count))  # groups that may come
        self._there: dict[int, _Group] = {}  # those that have the centre
        self._coming: dict[int, _Group] = {}  # those that do not
        self._giver: _Group | None = None  # is asked for the centre
        self._takers: list[_Group] = []  # that were there to take it when it was asked
        self._lost: set[int] = set()
        self._centre: dict[int, Frame] = {}  # what has come of it, by rank
        self._token = secrets.token_hex(16)
        self._server = socket.create_server(("", 0), backlog=1024)
        self.address = f"{host}:{self._server.getsockname()[1]}:{self._token}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Let no more ranks come."""
        self._server.close()

    def give_up(self, index: int) -> None:
        """Wait for a group no more: its job has ended for good."""
        with self._lock:
            self._expected.discard(index)
            self._go_on()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Read what one rank sends, until it ends."""
        group, rank = None, 0
        try:
            keep_alive(connection)
            while (frame := receive(connection)).kind != Kind.BYE:
                if frame.kind == Kind.HELLO:
                    hello = json.loads(bytes(frame.content))
                    if hello.pop("token") != self._token:
                        raise ValueError("not one of these groups")
                    rank = hello.pop("rank")
                    group = self._welcome(connection, rank, _Group(**hello))
                elif group is not None:
                    self._take(group, rank, frame)
            is_lost = False
        except (OSError, ValueError, KeyError, TypeError, MemoryError):  # or no rank of ours
            is_lost = True
        if group is not None:
            self._leave(group, rank, is_lost)
        connection.close()

    def _welcome(self, connection: socket.socket, rank: int, hello: _Group) -> _Group:
        with self._lock:
            group = self._coming.get(hello.index)
            if group is None or group.session != hello.session:
                group = self._coming[hello.index] = hello
            group.outboxes[rank] = outbox = SimpleQueue[Frame | None]()
            threading.Thread(target=_write, args=(connection, outbox), daemon=True).start()
            others = [*self._there.values(), *self._coming.values()]
            other = next((each for each in others if each.plan != group.plan), None)
            if other is None:
                self._go_on()
            else:
                what = f"group {group.index} trains {group.plan}; group {other.index} {other.plan}"
                group.tell(rank, Frame(Kind.REFUSED, f"{what}: give all of them the same".encode()))
        return group

    def _take(self, group: _Group, rank: int, frame: Frame) -> None:
        with self._lock:
            if frame.kind == Kind.MOVES:
                group.moves[rank] = np.frombuffer(frame.content, frame.dtype)
                self._go_on()
            elif frame.kind == Kind.CENTRE and group is self._giver:
                self._centre[rank] = frame
                if len(self._centre) == group.size:
                    self._hand_over()

    def _hand_over(self) -> None:
        """Give the centre, which is whole now, to the groups that wait for it."""
        for group in self._takers:
            if self._coming.get(group.index) is group:
                for rank, frame in self._centre.items():
                    group.tell(rank, frame)
                self._there[group.index] = self._coming.pop(group.index)
                if group.index in self._lost:
                    notices.say(f"group {group.index} is back, with the weights of the others")
        self._giver, self._takers, self._centre = None, [], {}

    def _leave(self, group: _Group, rank: int, is_lost: bool) -> None:
        """Note that a group has ended, or is lost, with this rank."""
        with self._lock:
            group.outboxes.pop(rank, SimpleQueue[Frame | None]()).put(None)
            if self._giver is group:
                self._giver, self._takers, self._centre = None, [], {}
            for groups in (self._there, self._coming):
                if groups.get(group.index) is group:
                    del groups[group.index]
                    if is_lost and group.index in self._expected:
                        self._lost.add(group.index)
                        notices.say(f"group {group.index} is lost; {len(self._there)} go on")
            self._go_on()

    def _go_on(self) -> None:
        """Make the exchange that all are ready for, or begin with those that have come."""
        there = [self._there[index] for index in sorted(self._there)]
        coming = [group for group in self._coming.values() if group.is_complete]
        if not there:
            if coming and {group.index for group in coming} >= self._expected:
                first = max(coming, key=lambda group: (group.step, -group.index))
                self._there[first.index] = self._coming.pop(first.index)
                takers = [group for group in coming if group is not first]
                self._answer(first, dict.fromkeys(first.outboxes, Frame(Kind.WELCOME)), takers)
            return
        if not all(len(group.moves) == group.size for group in there):
            return
        sums = {rank: _sum([group.moves[rank] for group in there]) for rank in there[0].moves}
        for group in there:
            group.moves = {}
            self._answer(group, sums, coming if group is there[0] else [])

    def _answer(self, group: _Group, frames: Mapping[int, Frame], takers: list[_Group]) -> None:
        """Answer each rank of a group, and ask it for the centre if any group is to take that."""
        if takers:
            self._giver, self._takers = group, takers
        for rank, frame in frames.items():
            group.tell(rank, frame._replace(asks=bool(takers)))


def _write(connection: socket.socket, outbox: "SimpleQueue[Frame | None]") -> None:
    """Send what comes; a rank that is lost is noticed where it is read from."""
    while (frame := outbox.get()) is not None:
        try:
            send(connection, frame)
        except OSError:
            return


def _sum(moves: Sequence[np.ndarray]) -> Frame:
    first, *others = moves
    total = first.copy()
    for each in others:
        total += each
    return Frame(Kind.SUM, total.view(np.uint8).data, total.dtype.name, len(moves))
