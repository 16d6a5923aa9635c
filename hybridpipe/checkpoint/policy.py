"""Policy of checkpoints: the steps at which `fit` saves.

The trainer is not known here; a callback describes the training for the manifest. Invariant: a checkpoint
contains the losses of all minibatches before its step and of none after it.
"""

import os
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hybridpipe.checkpoint import snapshot
from hybridpipe.checkpoint.names import name_of
from hybridpipe.checkpoint.snapshot import Saver, Snapshot
from hybridpipe.engine.worker import Worker
from hybridpipe.errors import suggesting
from hybridpipe.health import failure
from hybridpipe.planning.checks import positive_int
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.schedules.generators import ceil_div, losses_late, resume_points_every
from hybridpipe.planning.schedules.resume_point import ResumePoint

JSON = Any


@suggesting
@dataclass(frozen=True)
class Checkpointing:
    """Folder and interval of checkpoints during `fit`, which also saves at its end.

    Args:
        folder: the folder of checkpoints, on a disk that all ranks share.
        every: interval in minibatches; None for the end of each epoch. Under pipedream with replicas, a
            checkpoint moves to the next minibatch after which every stage has updated
            (`planning.schedules.resume_points_every`). Under asynchronous schedules, a small interval is
            multiplied: a snapshot waits for its losses, and only one copy of the state may wait.
        keep: number of latest checkpoints that stay.

    Raises:
        ValueError: `every` or `keep` is no integer >= 1.
    """

    folder: str | os.PathLike[str]
    every: int | None = None
    keep: int = 3

    def __post_init__(self) -> None:
        if self.every is not None:
            positive_int("every", self.every)
        positive_int("keep", self.keep)


def _far_enough(every: int, plan: Plan) -> int:
    """Return the smallest multiple of `every` after which the last snapshot's losses are on every rank.

    It depends on the plan only, because losses reach ranks at different times, and a resumed run must save at
    the same steps.
    """
    if not plan.is_asynchronous:
        return every
    # Both resume points may be late.
    apart = losses_late(plan) + 2 * resume_points_every(plan)
    return every * ceil_div(apart, every)


class _Waiting(NamedTuple):
    """A snapshot that waits for the losses of the stream's first `position` minibatches.

    Args:
        is_copy: False for the live state, which the training must not change before it is written.
    """

    snapshot: Snapshot
    position: int
    is_copy: bool


class Keeper:
    """Saves during `fit`. Every rank has one; all act at the same steps, without synchronisation.

    Args:
        settings: folder, interval and number of checkpoints.
        saver: writes snapshots.
        worker: the worker whose state is saved.
        step: the current step.
        saved: the step of the checkpoint in the folder that was just resumed; None if none was.
        describe: returns the manifest's description of the training; called once the losses are in.
        published: called with each published checkpoint, before the next one is written.
        room: returns the bytes that this process may still take; None: not limited.
    """

    def __init__(
        self,
        settings: Checkpointing,
        saver: Saver,
        worker: Worker,
        step: int,
        saved: int | None,
        describe: Callable[[], dict[str, JSON]],
        published: Callable[[Path], None] | None = None,
        room: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._settings, self._saver, self._worker, self._describe = settings, saver, worker, describe
        self._published, self._started, self._room = published, deque[Path](), room
        self._last_point, self._resumed, self._saved = step, saved, saved
        self._every = None if settings.every is None else _far_enough(settings.every, worker.plan)
        self._waiting = deque[_Waiting]()
        self._tried = False

    def at_resume_point(self, step: int, point: ResumePoint) -> None:
        """Take a snapshot if one is due; called after an update that ends at a resume point."""
        every, before, self._last_point = self._every, self._last_point, step
        if point.done == point.total if every is None else step // every > before // every:
            self.take(step, point)
        elif not self._tried:  # report unsavable state now, not an epoch later
            with self._refusing:
                snapshot.referred(self._worker, 0, point)
        self._tried = True

    @property
    def pauses(self) -> bool:
        """True while the training must not change the state that a snapshot refers to."""
        return any(not waiting.is_copy for waiting in self._waiting)

    def take(self, step: int, point: ResumePoint) -> None:
        """Take a snapshot now, unless this step has one."""
        if self._saved != step:
            self._saved = step
            with self._refusing:
                taken, is_copy = snapshot.take(self._worker, step, point, self._room())
            self._waiting.append(_Waiting(taken, point.done, is_copy))

    def losses_in(self, done: int) -> None:
        """Start writing the snapshot at `done`: the losses of the first `done` minibatches are in."""
        if self._waiting and self._waiting[0].position == done:
            (taken, _, is_copy), folder = self._waiting.popleft(), Path(self._settings.folder)
            self._wait()
            manifest = self._describe() if self._worker.control.rank == 0 else None
            self._saver.start(taken, folder, manifest, self._settings.keep)
            self._started.append(folder / name_of(taken.step))
            if not is_copy:
                self._wait()

    def finish(self, step: int, point: ResumePoint) -> None:
        """Save the final state and wait until it is published. Collective.

        State that was just resumed, and is not saved again, is checked for NaN and infinity as well.
        """
        if step == self._resumed:
            with self._refusing:
                snapshot.check_finite(self._worker, step, point)
        self.take(step, point)
        self.losses_in(point.done)
        self._wait()

    def _wait(self) -> None:
        """Wait until what was started is published, and say so."""
        self._saver.wait()
        while self._started:
            path = self._started.popleft()
            if self._published is not None:
                self._published(path)

    @property
    def _refusing(self) -> AbstractContextManager[None]:
        return failure.refusing(self._worker.control.size)
