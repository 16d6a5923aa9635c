"""Status: the instruction and the wait that this rank is in, for the watchdog's reports.

Knows no MPI; plain attributes, since they are written in the middle of a step.
Invariant: a new object in `doing` or `wait` means that the rank has made progress.
"""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from hybridpipe.planning.schedules.instructions import Instruction

OUTSIDE = "outside a step"
MEETING = "meeting of groups"  # name of the wait for groups that are other jobs
CHECKPOINT = "checkpoint"  # name of the wait until a checkpoint is published


class Wait(NamedTuple):
    """A rank's wait for other ranks.

    Args:
        what: "receive", "send", or a collective in words.
        peers: the ranks that take part, this one included; for a message its sender or receiver.
        tag, num_bytes: of a message; None for a collective.
    """

    what: str
    peers: tuple[int, ...]
    tag: int | None = None
    num_bytes: int | None = None

    def __str__(self) -> str:
        if self.tag is None:
            return f"{self.what} with ranks {', '.join(map(str, self.peers))}"
        way = "to" if self.what == "send" else "from"
        return f"{self.what} {way} rank {self.peers[0]}, tag {self.tag}, {self.num_bytes} bytes"


class Doing(NamedTuple):
    """A rank's position in a program.

    Args:
        step: number of minibatches trained on before this one; None in an evaluation.
        instruction: the present instruction; None between programs, while the caller's code runs.
    """

    stage: int | None
    step: int | None
    instruction: Instruction | None


class RankStatus:
    """The status of this process's rank.

    Args:
        doing: the main thread's position in its program.
        wait: the main thread's wait for other ranks, if it waits.
        first_rank: the rank among all from which waits count their ranks; they know those of one group.
        saving: the saving thread's activity, for "rank 3 ..."; empty while it waits for other ranks.
        disk_moved_at: time of the saving thread's last progress, in seconds of time.monotonic().
    """

    doing = Doing(None, None, None)
    wait: Wait | None = None
    first_rank = 0
    saving = ""
    disk_moved_at = -math.inf

    @property
    def step(self) -> int | None:
        """The rank's present or last step."""
        return self.doing.step

    @property
    def wait_among_all(self) -> Wait | None:
        """The wait, with ranks counted among all."""
        wait = self.wait
        return wait and wait._replace(peers=tuple(peer + self.first_rank for peer in wait.peers))

    def has_moved_since(self, doing: Doing, wait: Wait | None) -> bool:
        """Return True if the rank has started another instruction or wait since it had this status."""
        return self.doing is not doing or self.wait is not wait

    @contextmanager
    def waiting(self, what: str, peers: Iterable[int]) -> Iterator[None]:
        """Enter a wait for other ranks in the status inside this context.

        Args:
            what: name of the wait, for reports.
        """
        before, self.wait = self.wait, Wait(what, tuple(peers))
        try:
            yield
        finally:
            self.wait = before

    @contextmanager
    def in_saving(self, what: str) -> Iterator[None]:
        """Enter the saving thread's activity in the status inside this context.

        Args:
            what: a phrase with a verb, for "rank 3 ...".
        """
        self.saving = what
        self.note_disk_progress()
        try:
            yield
        finally:
            self.saving = ""
            self.note_disk_progress()

    def note_disk_progress(self) -> None:
        """Note that the disk has accepted more of a file."""
        self.disk_moved_at = time.monotonic()

    @property
    def is_busy(self) -> bool:
        """True inside an instruction or a wait, which end by themselves unless the job hangs."""
        return self.doing.instruction is not None or self.wait is not None

    def __str__(self) -> str:
        stage, step, instruction = self.doing
        if instruction is None:
            return OUTSIDE if step is None else f"{OUTSIDE}, after step {step}"
        microbatch = getattr(instruction, "microbatch", None)
        return (
            f"stage {stage}, step {'none (evaluation)' if step is None else step}, "
            f"microbatch {'none' if microbatch is None else microbatch}, instruction {instruction}"
        )


rank_status = RankStatus()
