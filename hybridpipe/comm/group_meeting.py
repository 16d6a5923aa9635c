"""Group meeting: the way from a rank to the groups' meeting (`launch.meeting`), where each group is a job.

Knows sockets and tensors; no rule. Invariant: a rank that waits for other groups makes progress, as these may
be restarting; the meeting knows when they are lost.
"""

import atexit
import contextlib
import json
import secrets
import socket
from collections.abc import Iterator

import torch
from torch import Tensor

from hybridpipe.comm.frames import Frame, Kind, keep_alive, receive, send
from hybridpipe.comm.group_sums import SumsOverGroups, content
from hybridpipe.comm.status import MEETING, Wait, rank_status
from hybridpipe.comm.training_group import TrainingGroup
from hybridpipe.errors import UserError


class MeetingSums(SumsOverGroups):
    """Adds up tensors over the groups that are there, each of which is a job."""

    def __init__(self, group: TrainingGroup) -> None:
        super().__init__(group.options.count)
        self._group = group
        self._connection: socket.socket | None = None

    def join(self, step: int, plan: str, takes_part: bool) -> Tensor | None:
        """Come to the meeting, as `SumsOverGroups.join`.

        Raises:
            UserError: the meeting cannot be reached, or other groups have another plan.
        """
        world = self._group.world
        session = world.bcast(secrets.token_hex(8) if world.rank == 0 else None)
        size = world.allreduce(int(takes_part))
        if not takes_part:
            return None
        token = self._connect()
        hello = {"token": token, "index": self._group.index, "session": session, "size": size, "plan": plan}
        hello |= {"rank": world.rank, "step": step}
        self._send(Frame(Kind.HELLO, json.dumps(hello).encode()))
        frame = self._answer()
        if frame.kind == Kind.REFUSED:
            raise UserError(f"groups: {bytes(frame.content).decode()}")
        return _numbers(frame) if frame.kind == Kind.CENTRE else None

    def give(self, centre: Tensor) -> None:
        """Send this rank's centre, flat, for groups that come."""
        self._send(_frame(Kind.CENTRE, centre))
        self.is_asked = False

    def leave(self) -> None:
        """Tell the meeting that this rank's training has ended."""
        atexit.unregister(self.leave)
        if self._connection is not None:
            with contextlib.suppress(OSError):  # the meeting may have ended
                send(self._connection, Frame(Kind.BYE))
            self._connection.close()
            self._connection = None

    def _connect(self) -> str:
        """Connect to the meeting; return the token that it asks for."""
        host, port, token = self._group.meeting.rsplit(":", 2)
        try:
            self._connection = socket.create_connection((host, int(port)))
            keep_alive(self._connection)
        except OSError as error:
            raise UserError(f"the groups' meeting at {host}:{port} cannot be reached: {error}") from None
        atexit.register(self.leave)  # a script may end without `Trainer.close`
        return token

    def _sum(self, tensor: Tensor) -> None:
        self._send(_frame(Kind.MOVES, tensor))
        self.bytes_sent += tensor.nbytes
        tensor.copy_(_numbers(self._answer()))

    def _send(self, frame: Frame) -> None:
        assert self._connection is not None
        with _refusing():
            send(self._connection, frame)

    def _answer(self) -> Frame:
        assert self._connection is not None
        _note_progress()
        with _refusing():
            frame = receive(self._connection, _note_progress)
        rank_status.wait = None
        if frame.kind in (Kind.WELCOME, Kind.SUM):
            self.count, self.is_asked = frame.groups or self.count, frame.asks
        return frame


def _frame(kind: Kind, tensor: Tensor) -> Frame:
    return Frame(kind, content(tensor), str(tensor.dtype).removeprefix("torch."))


def _numbers(frame: Frame) -> Tensor:
    dtype: torch.dtype = getattr(torch, frame.dtype)
    return torch.frombuffer(frame.content, dtype=dtype) if frame.content else torch.empty(0, dtype=dtype)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Raise UserError where the connection is lost."""
    try:
        yield
    except OSError as error:
        raise UserError(f"the groups' meeting, in hybridpipe launch, is lost: {error}") from None


def _note_progress() -> None:
    rank_status.wait = Wait(MEETING, ())
