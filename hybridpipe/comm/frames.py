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
FLOATS = ("float32", "float64")  # types of numbers, in the order of their index in a header
_HEADER = struct.Struct("<BBI?Q")


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
        dtype: of FLOATS, where the content is numbers.
        groups: of a SUM: the number of groups in it.
        asks: of a WELCOME or a SUM: groups have come that need this rank's centre.
    """

    kind: Kind
    content: bytearray | memoryview | bytes = b""
    dtype: str = FLOATS[0]
    groups: int = 0
    asks: bool = False


def send(connection: socket.socket, frame: Frame) -> None:
    """Send a frame; OSError if the peer is lost."""
    kind, content, dtype, groups, asks = frame
    connection.sendall(_HEADER.pack(kind, FLOATS.index(dtype), groups, asks, len(content)))
    connection.sendall(content)


def receive(connection: socket.socket, waits: Callable[[], None] = lambda: None) -> Frame:
    """Return the next frame.

    Args:
        waits: called once in POLL_SECONDS while nothing comes.

    Raises:
        ConnectionError: the peer has closed the connection; OSError if it is lost.
        ValueError: it speaks otherwise.
    """
    kind, number, groups, asks, size = _HEADER.unpack(_exactly(connection, _HEADER.size, waits))
    if number >= len(FLOATS):
        raise ValueError(f"no type of numbers is {number}")
    return Frame(Kind(kind), _exactly(connection, size, waits), FLOATS[number], groups, asks)


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
