"""The meeting of groups that are jobs: who is there, comes, is lost, and returns. Ranks are sockets here."""

import contextlib
import json
import socket
import time

import numpy as np
import pytest

from hybridpipe.comm.frames import Frame, Kind, receive, send
from hybridpipe.launch.meeting import Meeting

ONES = np.ones(3, np.float32)


class Rank:
    """One rank's connection."""

    def __init__(
        self, meeting: Meeting, index: int, rank: int = 0, size: int = 1, session: str = "a", step: int = 0
    ):
        host, port, token = meeting.address.rsplit(":", 2)
        self.connection = socket.create_connection((host, int(port)), timeout=10)
        hello = {"token": token, "index": index, "rank": rank, "size": size, "session": session, "step": step}
        self.tell(Kind.HELLO, json.dumps({**hello, "plan": "1"}).encode())

    def tell(self, kind: Kind, content: bytes = b"") -> None:
        send(self.connection, Frame(kind, content))

    def move(self, by: float) -> None:
        self.tell(Kind.MOVES, (by * ONES).tobytes())

    def get(self) -> tuple[Kind, int, bool, list[float]]:
        """Return the next frame's kind, its number of groups, whether it asks, and its numbers."""
        kind, content, dtype, groups, asks = receive(self.connection)
        return kind, groups, asks, np.frombuffer(content, dtype).tolist()

    def is_told_nothing(self) -> bool:
        self.connection.settimeout(0.3)
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self.connection.settimeout(10)


@pytest.fixture
def meeting():
    made = Meeting(2, "127.0.0.1")
    yield made
    made.close()


def begin(meeting: Meeting) -> tuple[Rank, Rank]:
    """Let both groups come; the first gives the centre."""
    first, second = Rank(meeting, 0), Rank(meeting, 1)
    assert first.get()[:3] == (Kind.WELCOME, 0, True)
    first.tell(Kind.CENTRE, (5 * ONES).tobytes())
    assert second.get() == (Kind.CENTRE, 0, False, [5.0] * 3)
    return first, second


def test_groups_add_up_what_they_send(meeting):
    first, second = begin(meeting)
    first.move(1)
    assert first.is_told_nothing()
    second.move(2)
    assert first.get() == second.get() == (Kind.SUM, 2, False, [3.0] * 3)


def test_the_others_go_on_without_a_group_that_is_lost(meeting, capsys):
    first, second = begin(meeting)
    first.move(1)
    second.connection.close()
    assert first.get() == (Kind.SUM, 1, False, [1.0] * 3)
    back = Rank(meeting, 1, session="b")
    time.sleep(0.3)
    first.move(2)
    assert first.get() == (Kind.SUM, 1, True, [2.0] * 3)  # it is asked for the centre
    first.tell(Kind.CENTRE, (7 * ONES).tobytes())
    assert back.get() == (Kind.CENTRE, 0, False, [7.0] * 3)
    told = capsys.readouterr().err
    assert "group 1 is lost; 1 go on" in told and "group 1 is back" in told


def test_an_exchange_is_for_all_ranks_of_a_group_or_none(meeting):
    """Group 1 is lost after one of its two ranks has sent its moves."""
    ranks = [Rank(meeting, index, rank, size=2) for index in range(2) for rank in range(2)]
    for rank in ranks[:2]:
        assert rank.get()[0] == Kind.WELCOME
        rank.tell(Kind.CENTRE, ONES.tobytes())
    for rank in ranks[2:]:
        assert rank.get()[0] == Kind.CENTRE
    for rank in ranks[:3]:
        rank.move(1)
    assert ranks[0].is_told_nothing()
    ranks[3].connection.close()
    assert ranks[0].get() == ranks[1].get() == (Kind.SUM, 1, False, [1.0] * 3)


def test_where_all_come_anew_the_furthest_has_the_centre(meeting):
    first, second = Rank(meeting, 0, step=3), Rank(meeting, 1, step=8)
    assert second.get()[:3] == (Kind.WELCOME, 0, True)
    second.tell(Kind.CENTRE, ONES.tobytes())
    assert first.get()[0] == Kind.CENTRE


def test_a_giver_that_is_lost_is_not_waited_for(meeting):
    first, second = Rank(meeting, 0), Rank(meeting, 1)
    assert first.get()[:3] == (Kind.WELCOME, 0, True)
    meeting.give_up(0)
    first.connection.close()
    assert second.get()[:3] == (Kind.WELCOME, 0, False)


def test_a_group_that_ends_is_not_lost(meeting, capsys):
    first, second = begin(meeting)
    second.tell(Kind.BYE)
    time.sleep(0.3)
    first.move(1)
    assert first.get() == (Kind.SUM, 1, False, [1.0] * 3)
    assert "lost" not in capsys.readouterr().err


def test_a_rank_may_have_nothing_to_train(meeting):
    first, second = begin(meeting)
    for rank in (first, second):
        rank.tell(Kind.MOVES)
    assert first.get() == second.get() == (Kind.SUM, 2, False, [])


def test_groups_that_train_something_else_are_refused(meeting):
    first = Rank(meeting, 0)
    host, port, token = meeting.address.rsplit(":", 2)
    other = socket.create_connection((host, int(port)))
    hello = {"token": token, "index": 1, "rank": 0, "size": 1, "session": "a", "step": 0, "plan": "1-1"}
    time.sleep(0.2)
    send(other, Frame(Kind.HELLO, json.dumps(hello).encode()))
    frame = receive(other)
    assert frame.kind == Kind.REFUSED
    assert bytes(frame.content) == b"group 1 trains 1-1; group 0 1: give all of them the same"
    first.connection.close()


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", Kind.HELLO.to_bytes() + bytes(14), b""])
def test_strangers_are_sent_away(meeting, sent):
    host, port, _ = meeting.address.rsplit(":", 2)
    stranger = socket.create_connection((host, int(port)), timeout=10)
    with contextlib.suppress(OSError):  # it may be closed already
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(1) == b""
    begin(meeting)
