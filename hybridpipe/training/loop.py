"""EpochLoop: the loop over an epoch's minibatches, for all schedules. Minibatches in, records out.

Losses arrive late, because they travel while other minibatches run. Invariant: a snapshot is taken right
after an update, before any other change of this rank's state, and published with all losses before it.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

from hybridpipe.checkpoint.policy import Keeper
from hybridpipe.data.stream import Minibatch
from hybridpipe.engine.pending import PendingLosses
from hybridpipe.engine.worker import Worker
from hybridpipe.optim.update import Made
from hybridpipe.planning.schedules.generators import losses_late
from hybridpipe.planning.schedules.resume_point import ResumePoint
from hybridpipe.planning.timeline import TimedEvent
from hybridpipe.training.metrics import Metrics, MinibatchRecord
from hybridpipe.training.train_state import EpochProgress, TrainState, is_resume_point

# An update of this rank: its minibatches with their travelling losses, and the events since the last update.
Trained = tuple[list[tuple[Minibatch, PendingLosses]], list[TimedEvent]]


class Travelling(NamedTuple):
    """A minibatch whose losses travel.

    Args:
        seconds: time on this rank since the minibatch before.
        made: figures of its update.
    """

    minibatch: Minibatch
    sums: PendingLosses
    seconds: float
    made: Made


class Breaks(NamedTuple):
    """Breaks within an epoch, under a synchronous schedule.

    Args:
        max_steps: the training ends when it has that many minibatches, those of earlier runs included.
        eval_every: `evaluate` is called whenever the training has a multiple of that many minibatches.
        evaluate: evaluates; it may set `stop_from` of the train state.
    """

    max_steps: float = math.inf
    eval_every: int | None = None
    evaluate: Callable[[], object] = bool


class EpochLoop:
    """The rest of one epoch.

    Args:
        worker: this rank's worker.
        metrics: takes the records.
        state: the train state, kept up to date; its `progress` must not be None.
        minibatch_size: samples of a full minibatch, of all groups.
        keeper: saves checkpoints; None for none.
        breaks: breaks within the epoch.
    """

    def __init__(
        self,
        worker: Worker,
        metrics: Metrics,
        state: TrainState,
        minibatch_size: int,
        keeper: Keeper | None,
        breaks: Breaks,
    ) -> None:
        assert state.progress is not None
        self._worker, self._metrics, self._state, self._keeper = worker, metrics, state, keeper
        self._breaks = breaks
        self._progress: EpochProgress = state.progress
        self._minibatch_size = minibatch_size
        worker.keep_forward_state(keeper is not None)

    def run(self, batches: Iterator[Minibatch]) -> Generator[MinibatchRecord, None, None]:
        """Train on the rest of the epoch, and yield a record of each minibatch.

        Args:
            batches: the minibatches of the epoch from `progress.position` on; under an asynchronous schedule
                from `progress.stream_start`.
        """
        progress = self._progress
        trained = self._stream(batches) if self._worker.plan.is_asynchronous else self._one_by_one(batches)
        late = losses_late(self._worker.plan)
        pending = deque[Travelling]()
        self._began = time.perf_counter()
        self._start = self._began - progress.seconds
        for together, events in trained:
            now = time.perf_counter()
            self._began, seconds = now, now - self._began
            progress.position += len(together)
            at_resume_point = is_resume_point(self._worker.plan, self._point)
            if at_resume_point and self._keeper is not None:
                self._keeper.at_resume_point(self._state.step, self._point)
            may_stop = at_resume_point and not self._is_done
            self._keep_update([minibatch for minibatch, _ in together], events, seconds)
            made = self._worker.executor.update.made
            pending += [Travelling(*each, seconds / len(together), made) for each in together]
            pauses = self._keeper is not None and self._keeper.pauses
            yield from self._records(pending, 0 if self._evaluates or pauses else late)
            if may_stop and self._stops():
                self._save()
                if self._state.under_way:
                    self._worker.leave_stream()
                trained.close()
                break
        yield from self._records(pending, 0)
        progress.seconds = time.perf_counter() - self._start
        if self._state.stop_from is not None:
            self._save()

    def _records(self, pending: deque[Travelling], late: int) -> Iterator[MinibatchRecord]:
        """Yield the records of all but the last `late` minibatches, then let their checkpoint be written.

        So a checkpoint keeps what callbacks have made of them, and of the evaluation that is due.
        """
        while len(pending) > late:
            yield self._record(pending.popleft())
            self._progress.seconds = time.perf_counter() - self._start
            if self._evaluates and not pending:
                paused = time.perf_counter()
                self._breaks.evaluate()
                self._began = time.perf_counter()
                self._start += self._began - paused  # an evaluation is no training time
            if self._keeper is not None:
                self._keeper.losses_in(self._progress.losses_in)

    def _one_by_one(self, batches: Iterator[Minibatch]) -> Generator[Trained, None, None]:
        while self._state.step < self._breaks.max_steps and (minibatch := next(batches, None)) is not None:
            sums, events = self._worker.train(minibatch, self._state.step)
            self._state.step += 1
            yield [(minibatch, sums)], events

    def _stream(self, batches: Iterator[Minibatch]) -> Generator[Trained, None, None]:
        """Train without a flush; yield at each update."""
        of_stream = list(batches)
        done = self._progress.position - self._progress.stream_start
        ahead = deque(of_stream[done:])
        self._state.under_way = True
        try:
            for sums, events in self._worker.stream(of_stream, self._state.step - done, done):
                together = [(ahead.popleft(), each) for each in sums]
                self._state.step += len(together)
                yield together, events
        finally:
            self._state.under_way = False

    @property
    def _point(self) -> ResumePoint:
        return self._progress.resume_point(self._minibatch_size)

    @property
    def _evaluates(self) -> bool:
        """True if an evaluation is due; the one at the epoch's end follows by itself."""
        every = self._breaks.eval_every
        return every is not None and self._state.step % every == 0 and not self._is_done

    @property
    def _is_done(self) -> bool:
        return self._point.done == self._point.total

    def _stops(self) -> bool:
        """Return True once `stop_from` is reached.

        A request to stop travels with the losses, so all ranks know the step before they reach it.
        """
        return self._state.stop_from is not None and self._state.step >= self._state.stop_from

    def _save(self) -> None:
        if self._keeper is not None:
            self._keeper.take(self._state.step, self._point)
            self._keeper.losses_in(self._progress.losses_in)

    def _keep_update(self, trained: Sequence[Minibatch], events: list[TimedEvent], seconds: float) -> None:
        full = all(self._samples(minibatch) == self._minibatch_size for minibatch in trained)
        self._metrics.keep(events, seconds, full, len(trained))

    def _samples(self, minibatch: Minibatch) -> int:
        """Return the samples of a minibatch of all groups."""
        return minibatch.num_samples * self._worker.group.options.count

    def _record(self, travelling: Travelling) -> MinibatchRecord:
        minibatch, sums, seconds, made = travelling
        samples, loss = self._samples(minibatch), sums.total()
        full = samples == self._minibatch_size
        record = self._metrics.note(self._state.epoch, loss.mean, samples, seconds, full, made)
        self._progress.note(loss)
        # Every rank learns of wishes with this record, and none has trained beyond this step.
        recorded_step = self._state.step - self._progress.position + self._progress.recorded
        agreed_step = recorded_step + losses_late(self._worker.plan)
        if sums.ask_to_stop():
            self._state.preempt(agreed_step)
        if sums.ask_to_end() and not self._worker.plan.is_asynchronous:
            self._state.end_from(agreed_step)
        return record
