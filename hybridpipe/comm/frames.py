"""Frames: messages over a TCP socket, between a rank and the meeting of groups (`launch.meeting`).

Knows sockets only. Invariant: a frame arrives whole, or ConnectionError is raised.
"""

import select
import socket
import struct
from collections.abc import Callable
from enum import IntEnum, auto
from typing import NamedTuple

ALIVE_SECONDS = 5, 5  # of silence before a peer is asked for a sign of life, and between two questions
MOST_QUESTIONS = 4  # without an answer: the peer's host is lost
POLL_SECONDS = 1.0
_HEADER = struct.Struct("<BIQ")


class Kind(IntEnum):
    """The meaning of a frame."""

    HELLO = auto()  # from a rank that comes, in JSON
    WELCOME = auto()  # to it: it has the centre
    MOVES = auto()  # from a rank: how far it is from the centre
    SUM = auto()  # to it: all groups' moves, and the number of these
    CENTRE = auto()  # from a rank that has it, and to one that comes
    REFUSED = auto()  # to a rank that comes: why it cannot
    BYE = auto()  # from a rank whose training ends


class Frame(NamedTuple):
    """A message.

    Args:
        number: a small one, beside the content.
    """

    kind: Kind
    number: int
    content: bytearray | memoryview | bytes


def send(connection: socket.socket, frame: Frame) -> None:
    """Send a frame; OSError if the peer is lost."""
    connection.sendall(_HEADER.pack(frame.kind, frame.number, len(frame.content)))
    connection.sendall(frame.content)


def receive(connection: socket.socket, waits: Callable[[], None] = lambda: None) -> Frame:
    """Return the next frame.

    Args:
        waits: called once in POLL_SECONDS while nothing comes.

    Raises:
        ConnectionError: the peer has closed the connection; OSError if it is lost.
    """
    kind, number, size = _HEADER.unpack(_exactly(connection, _HEADER.size, waits))
    return Frame(Kind(kind), number, _exactly(connection, size, waits))


def keep_alive(connection: socket.socket) -> None:
    """Let the end of the peer's host show itself within half a minute."""
    idle, pause = ALIVE_SECONDS
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, MOST_QUESTIONS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (idle + pause * MOST_QUESTIONS))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _exactly(connection: socket.socket, size: int, waits: Callable[[], None]) -> bytearray:
    content, at = bytearray(size), 0
    whole, poll = memoryview(content), select.poll()
    poll.register(connection, select.POLLIN)
    while at < size:
        if not poll.poll(1000 * POLL_SECONDS):
            waits()
            continue
        got = connection.recv_into(whole[at:])
        if not got:
            raise ConnectionError("the connection was closed")
        at += got
    return content
