"""Status: what this rank is doing, written at every instruction and wait, read when a report says where.

Plain attributes, as the writer is in the middle of a step. Knows no MPI.
Invariant: a new object in `doing` or `wait` means that the rank has moved.
"""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from hybridpipe.planning.schedules.instructions import Instruction

OUTSIDE = "outside a step"
CHECKPOINT = "checkpoint"  # what a rank waits for until one is published


class Wait(NamedTuple):
    """What a rank waits for.

    Args:
        what: "receive", "send", or a collective in words.
        peers: the ranks that it takes.
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
    """A place in a program.

    Args:
        step: minibatches trained on before this one; None in an evaluation.
        instruction: None between programs, when the rank is in its caller's hands.
    """

    stage: int | None
    step: int | None
    instruction: Instruction | None


class RankStatus:
    """The status of this process's rank.

    Args:
        doing: by the main thread.
        wait: of the main thread, for other ranks.
        saving: by the thread that saves, while it does not wait for other ranks'.
        moved: when that thread last got on, in seconds of time.monotonic().
    """

    doing = Doing(None, None, None)
    wait: Wait | None = None
    saving = ""
    disk_moved_at = -math.inf

    @property
    def step(self) -> int | None:
        """The step that the rank is in, or was in last."""
        return self.doing.step

    def has_moved_since(self, doing: Doing, wait: Wait | None) -> bool:
        """Whether the rank has begun anything else since it had that status."""
        return self.doing is not doing or self.wait is not wait

    @contextmanager
    def waiting(self, what: str, peers: Iterable[int]) -> Iterator[None]:
        """Around waiting for other ranks, or for a collective with them."""
        before, self.wait = self.wait, Wait(what, tuple(peers))
        try:
            yield
        finally:
            self.wait = before

    @contextmanager
    def in_saving(self, what: str) -> Iterator[None]:
        """Around what the saving thread does: a verb, for "rank 3 ..."."""
        self.saving = what
        self.note_disk_progress()
        try:
            yield
        finally:
            self.saving = ""
            self.note_disk_progress()

    def note_disk_progress(self) -> None:
        """It has taken something more of a file."""
        self.disk_moved_at = time.monotonic()

    @property
    def is_busy(self) -> bool:
        """Whether it does what ends by itself, unless the job hangs; else it is the caller's turn."""
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
