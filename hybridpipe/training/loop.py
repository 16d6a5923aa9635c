"""EpochLoop: the loop over an epoch's minibatches, for all schedules. Minibatches in, records out.

Losses arrive late, because they travel while other minibatches run. Invariant: a snapshot is taken right
after an update, before any other change of this rank's state, and published with all losses before it.
"""

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence

from hybridpipe.checkpoint.policy import Keeper
from hybridpipe.data.stream import Minibatch
from hybridpipe.engine.pending import PendingLosses
from hybridpipe.engine.worker import Worker
from hybridpipe.planning.schedules.generators import losses_late
from hybridpipe.planning.schedules.resume_point import ResumePoint
from hybridpipe.planning.timeline import Event
from hybridpipe.training.metrics import MinibatchRecord, Recorder
from hybridpipe.training.train_state import EpochProgress, TrainState, is_resume_point

# An update of this rank: its minibatches with their travelling losses, and the events since the last update.
Trained = tuple[list[tuple[Minibatch, PendingLosses]], list[Event]]


class EpochLoop:
    """The rest of one epoch.

    Args:
        worker: this rank's worker.
        recorder: takes the records.
        state: the train state, kept up to date; its `progress` must not be None.
        minibatch_size: samples of a full minibatch.
        keeper: saves checkpoints; None for none.
    """

    def __init__(
        self,
        worker: Worker,
        recorder: Recorder,
        state: TrainState,
        minibatch_size: int,
        keeper: Keeper | None,
    ) -> None:
        assert state.progress is not None
        self._worker, self._recorder, self._state, self._keeper = worker, recorder, state, keeper
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
        pending = deque[tuple[Minibatch, PendingLosses, float]]()  # minibatches with travelling losses
        before, start = progress.seconds, time.perf_counter()
        began = start
        for together, events in trained:
            now = time.perf_counter()
            began, seconds = now, now - began
            progress.position += len(together)
            at_resume_point = is_resume_point(self._worker.plan, self._point)
            if at_resume_point and self._keeper is not None:
                self._keeper.at_resume_point(self._state.step, self._point)
            may_stop = at_resume_point and not self._is_done
            self._record_update([minibatch for minibatch, _ in together], events, seconds)
            pending += [(*each, seconds / len(together)) for each in together]
            while len(pending) > late:
                yield self._record(*pending.popleft())
                progress.seconds = before + time.perf_counter() - start
            if may_stop and self._stops():
                self._save()
                if self._state.under_way:
                    self._worker.leave_stream()
                trained.close()
                break
        while pending:
            yield self._record(*pending.popleft())
        progress.seconds = before + time.perf_counter() - start
        if self._state.stop_from is not None:
            self._save()

    def _one_by_one(self, batches: Iterator[Minibatch]) -> Generator[Trained, None, None]:
        for minibatch in batches:
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

    def _record_update(self, trained: Sequence[Minibatch], events: list[Event], seconds: float) -> None:
        full = all(minibatch.num_samples == self._minibatch_size for minibatch in trained)
        self._recorder.keep(events, seconds, full, len(trained))

    def _record(self, minibatch: Minibatch, sums: PendingLosses, seconds: float) -> MinibatchRecord:
        full = minibatch.num_samples == self._minibatch_size
        loss = sums.total()
        record = self._recorder.note(self._state.epoch, loss.mean, minibatch.num_samples, seconds, full)
        self._progress.note(loss)
        if sums.ask_to_stop():  # every rank learns it with this record; none has trained beyond this step
            recorded_step = self._state.step - self._progress.position + self._progress.recorded
            self._state.preempt(recorded_step + losses_late(self._worker.plan))
        if self._keeper is not None:
            self._keeper.losses_in(self._progress.losses_in)
        return record
