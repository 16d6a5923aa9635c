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
from hybridpipe.comm.mpi import MPI
from hybridpipe.comm.status import MEETING, Wait, rank_status
from hybridpipe.comm.training_group import TrainingGroup
from hybridpipe.errors import UserError

DTYPES = (torch.float32, torch.float64)  # as in `launch.meeting`


class MeetingSums:
    """Adds up tensors over the groups that are there.

    Attributes:
        ranks: none, as the other groups are other jobs.
        count: number of groups in the last sum.
        is_asked: the others need this rank's centre (`give`).
        bytes_sent: by this rank so far.
    """

    ranks: tuple[int, ...] = ()

    def __init__(self, group: TrainingGroup) -> None:
        self._group = group
        self._replicas: MPI.Intracomm | None = None
        self.count, self.is_asked, self.bytes_sent = group.count, False, 0
        self._connection: socket.socket | None = None

    def divide(self, replicas: MPI.Comm) -> None:
        """Let each of the ranks that have the same tensors send a part of them only. Collective over them."""
        self._replicas = MPI.Intracomm(replicas).Dup()

    def begin(self, takes_part: bool, plan: str) -> None:
        """Count the ranks that take part. Collective over the group.

        Args:
            plan: the same text in all groups.
        """
        world = self._group.world
        session = world.bcast(secrets.token_hex(8) if world.rank == 0 else None)
        size = world.allreduce(int(takes_part))
        self._hello = {"rank": world.rank, "size": size, "index": self._group.index, "session": session}
        self._hello |= {"plan": plan}

    def join(self, step: int) -> Tensor | None:
        """Come to the meeting; return the others' centre, or None if this rank has it.

        Args:
            step: minibatches trained on: where no group is there yet, all take the centre of the furthest.

        Raises:
            UserError: the meeting cannot be reached, or other groups have another plan.
        """
        host, port, token = self._group.meeting.rsplit(":", 2)
        try:
            self._connection = socket.create_connection((host, int(port)))
            atexit.register(self.leave)  # a script may end without `Trainer.close`
            keep_alive(self._connection)
        except OSError as error:
            raise UserError(f"the groups' meeting at {host}:{port} cannot be reached: {error}") from None
        self._send(Kind.HELLO, 0, json.dumps({**self._hello, "token": token, "step": step}).encode())
        frame = self._answer()
        if frame.kind == Kind.REFUSED:
            raise UserError(f"groups: {bytes(frame.content).decode()}")
        if frame.kind == Kind.CENTRE:
            return torch.frombuffer(frame.content, dtype=DTYPES[frame.number])
        return None

    def add_up(self, tensor: Tensor) -> Tensor:
        """Add the other groups' numbers to a tensor's. Collective over the groups that are there.

        Args:
            tensor: one-dimensional, contiguous, on the CPU, of float32 or float64; it is changed in place.
        """
        if self._replicas is None:
            return tensor.copy_(self._sum(tensor))
        share = -(-len(tensor) // self._replicas.size)
        padded = tensor.new_zeros(self._replicas.size, share)
        padded.view(-1)[: len(tensor)] = tensor
        own = self._sum(padded[self._replicas.rank])
        self._replicas.Allgather(_bytes(own), _bytes(padded))
        return tensor.copy_(padded.view(-1)[: len(tensor)])

    def give(self, centre: Tensor) -> None:
        """Send this rank's centre, flat, for groups that come."""
        self._send(Kind.CENTRE, DTYPES.index(centre.dtype), _content(centre))
        self.is_asked = False

    def leave(self) -> None:
        """Tell the meeting that this rank's training has ended."""
        atexit.unregister(self.leave)
        if self._connection is not None:
            with contextlib.suppress(OSError):  # the meeting may have ended
                send(self._connection, Frame(Kind.BYE, 0, b""))
            self._connection.close()
            self._connection = None

    def free(self) -> None:
        """Leave the meeting, and free the communicator. Collective over the replicas."""
        self.leave()
        if self._replicas is not None:
            self._replicas.Free()

    def _sum(self, tensor: Tensor) -> Tensor:
        own = tensor.contiguous()
        self._send(Kind.MOVES, DTYPES.index(own.dtype), _content(own))
        self.bytes_sent += own.nbytes
        content = self._answer().content
        return torch.frombuffer(content, dtype=own.dtype) if content else own  # a rank may train nothing

    def _send(self, kind: Kind, number: int, content: bytes | memoryview) -> None:
        assert self._connection is not None
        with _refusing():
            send(self._connection, Frame(kind, number, content))

    def _answer(self) -> Frame:
        assert self._connection is not None
        _note_progress()
        with _refusing():
            frame = receive(self._connection, _note_progress)
        rank_status.wait = None
        if frame.kind != Kind.CENTRE:
            count, asked = divmod(frame.number, 2)
            self.count, self.is_asked = count or self.count, bool(asked)
        return frame


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Raise UserError where the connection is lost."""
    try:
        yield
    except OSError as error:
        raise UserError(f"the groups' meeting, in hybridpipe launch, is lost: {error}") from None


def _note_progress() -> None:
    rank_status.wait = Wait(MEETING, ())


def _content(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _bytes(tensor: Tensor) -> list[object]:
    return [_content(tensor), MPI.BYTE]
