"""Position: what this rank is doing. Written at every instruction and wait, read when a report says where.

Beside it what the thread does that saves in the background, and when the disk last took something from it.
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


class RankStatus:
    stage: int | None = None
    step: int | None = None
    instruction: Instruction | None = None
    wait: Wait | None = None  # of the main thread
    count = 0  # changes whenever something else is being done
    saving = ""  # what the saving thread is at, while it is not waiting for others'
    moved = -math.inf  # when that last got on, by time.monotonic()

    def at(self, stage: int, step: int | None, instruction: Instruction) -> None:
        """This instruction starts now; `step` is None in an evaluation."""
        self.stage, self.step, self.instruction = stage, step, instruction
        self.count += 1

    def outside(self) -> None:
        """The program is done; what follows is the caller's."""
        self.instruction = None
        self.count += 1

    def wait_for(self, wait: Wait | None) -> Wait | None:
        """From now on the main thread waits for that. Returns what it waited for before, to be put back."""
        before, self.wait = self.wait, wait
        self.count += 1
        return before

    @contextmanager
    def waiting(self, what: str, peers: Iterable[int]) -> Iterator[None]:
        """Around waiting for other ranks, or for a collective with them."""
        before = self.wait_for(Wait(what, tuple(peers)))
        try:
            yield
        finally:
            self.wait_for(before)

    @contextmanager
    def in_saving(self, what: str) -> Iterator[None]:
        """Around what the saving thread does: a verb, for "rank 3 ..."."""
        self.saving = what
        self.disk_moves()
        try:
            yield
        finally:
            self.saving = ""
            self.disk_moves()

    def disk_moves(self) -> None:
        """It has taken something more of a file."""
        self.moved = time.monotonic()

    @property
    def busy(self) -> bool:
        """With something that ends by itself, unless the job hangs; else it is the caller's turn."""
        return self.instruction is not None or self.wait is not None

    def __str__(self) -> str:
        if self.instruction is None:
            return OUTSIDE if self.step is None else f"{OUTSIDE}, after step {self.step}"
        microbatch = getattr(self.instruction, "microbatch", None)
        return (
            f"stage {self.stage}, step {'none (evaluation)' if self.step is None else self.step}, "
            f"microbatch {'none' if microbatch is None else microbatch}, instruction {self.instruction}"
        )


rank_status = RankStatus()
