"""The policy of checkpoints: when `fit` saves.

Knows the engine, not the trainer, which says what a manifest holds of a training. Invariant: what is
published with a step holds the losses of all minibatches before that step and of none behind it.
"""

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hybridpipe.checkpoint import snapshot
from hybridpipe.checkpoint.snapshot import Saver, Snapshot
from hybridpipe.engine.worker import Worker
from hybridpipe.errors import UserError
from hybridpipe.health import failure
from hybridpipe.planning.checks import positive_int
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.schedules.generators import ceil_div, losses_late, resume_points_every
from hybridpipe.planning.schedules.resume_point import ResumePoint

JSON = Any


@dataclass(frozen=True)
class Checkpointing:
    """Where and how often `fit` saves; what it ends with is saved, too.

    Args:
        folder: holds the checkpoints; every rank sees it.
        every: minibatches; None: at the end of each epoch. Under pipedream with replicas it is the next
            minibatch after which every stage has updated (`planning.schedules.resume_points_every`). Under
            asynchronous schedules a snapshot waits for its losses for so long that a small number is taken
            times 2, 3, …, so that no two copies of the whole state wait at once.
        keep: so many of the last ones stay.
    """

    folder: str | os.PathLike[str]
    every: int | None = None
    keep: int = 3

    def __post_init__(self) -> None:
        if self.every is not None:
            positive_int("every", self.every)
        positive_int("keep", self.keep)


def _far_enough(every: int, plan: Plan) -> int:
    """The multiple of `every` after which the losses of the last snapshot are in, on every rank.

    By the step alone: ranks hear of losses at different moments, and a resumed run saves at the same steps.
    """
    if not plan.is_asynchronous:
        return every
    apart = losses_late(plan) + 2 * resume_points_every(
        plan
    )  # the resume point may be late, and the update before it
    return every * ceil_div(apart, every)


class _Waiting(NamedTuple):
    """A snapshot that waits for the losses of the stream's first `position` minibatches."""

    snapshot: Snapshot
    position: int


class Keeper:
    """Saves while `fit` trains. Every rank has one, and they do the same, each in its own time.

    Args:
        step: of the training now.
        saved: the step of the checkpoint in the folder that the training has just come from.
        describe: what the manifest says, once the losses are in.
    """

    def __init__(
        self,
        asked: Checkpointing,
        saver: Saver,
        worker: Worker,
        step: int,
        saved: int | None,
        describe: Callable[[], dict[str, JSON]],
    ) -> None:
        self._asked, self._saver, self._worker, self._describe = asked, saver, worker, describe
        self._last_point, self._resumed, self._saved = step, saved, saved
        self._every = None if asked.every is None else _far_enough(asked.every, worker.plan)
        self._waiting = deque[_Waiting]()
        self._tried = False

    def at_resume_point(self, step: int, point: ResumePoint) -> None:
        """An update is done, and every stage will have the same minibatches after it: a snapshot, if due."""
        every, before, self._last_point = self._every, self._last_point, step
        if point.done == point.total if every is None else step // every > before // every:
            self.take(step, point)
        elif not self._tried:  # what cannot be saved is told at once, not an epoch later
            self._guarded(lambda: snapshot.referred(self._worker, 0, point))
        self._tried = True

    def take(self, step: int, point: ResumePoint) -> None:
        """A snapshot now, unless this step has one."""
        if self._saved != step:
            self._saved = step
            taken = self._guarded(lambda: snapshot.take(self._worker, step, point))
            self._waiting.append(_Waiting(taken, point.done))

    def losses_in(self, done: int) -> None:
        """The losses of the stream's first `done` minibatches are in; the snapshot taken there is written."""
        if self._waiting and self._waiting[0].position == done:
            taken = self._waiting.popleft().snapshot
            told = self._describe() if self._worker.control.rank == 0 else None
            self._saver.start(taken, Path(self._asked.folder), told, self._asked.keep)

    def finish(self, step: int, point: ResumePoint) -> None:
        """Training ends here: save that, and wait until it is published. Collective.

        What was saved before it was resumed is looked at, as what is saved now.
        """
        if step == self._resumed:
            self._guarded(lambda: snapshot.check_finite(self._worker, step, point))
        self.take(step, point)
        self.losses_in(point.done)
        self._saver.wait()

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """A rank that finds what it cannot save is perhaps the only one; the others would wait for it."""
        try:
            return work()
        except UserError as error:
            if self._worker.control.size > 1:
                failure.refuse(error)
            raise
