"""FitLoop: the epochs of one `Trainer.fit`, and the reasons to end it early.

Data sets are not known here: minibatches and evaluation are callbacks.
Invariant: after an error the next `fit` begins the epoch again.
"""

from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np

from hybridpipe.checkpoint.policy import Keeper
from hybridpipe.data.stream import Minibatch
from hybridpipe.engine.worker import Worker
from hybridpipe.training.callbacks import CallbackList
from hybridpipe.training.evaluation import reached
from hybridpipe.training.loop import Breaks, EpochLoop
from hybridpipe.training.metrics import Metrics
from hybridpipe.training.train_state import TrainState


class FitLoop:
    """One call of `fit`.

    Args:
        worker: this rank's worker.
        state: the train state, kept up to date.
        metrics: takes records and the entries of the history.
        keeper: saves checkpoints; None for none.
        minibatch_size: samples of a full minibatch, of all groups.
        batches: begins the next epoch, or continues one, and yields its minibatches.
        evaluate: returns metrics on held-out data, or None if a rank was asked to stop; None for no data.
        wanted: metrics that end the training once they are reached.
        callbacks: called at the events of the training.
        breaks: where `max_steps` ends it, and how often it is evaluated within an epoch.
    """

    def __init__(
        self,
        worker: Worker,
        state: TrainState,
        metrics: Metrics,
        keeper: Keeper | None,
        minibatch_size: int,
        batches: Callable[[], Iterator[Minibatch]],
        evaluate: Callable[[], dict[str, float] | None] | None,
        wanted: dict[str, float],
        callbacks: CallbackList,
        breaks: Breaks,
    ) -> None:
        self._worker, self._state, self._metrics, self._keeper = worker, state, metrics, keeper
        self._minibatch_size, self._batches, self._evaluate = minibatch_size, batches, evaluate
        self._wanted, self._callbacks = wanted, callbacks
        self._breaks = breaks._replace(evaluate=self._evaluated)
        self.stopped = False  # by `stop_from`, `max_steps` or a callback

    def run(self, epochs: int) -> None:
        """Train on at most `epochs` epochs and, with a keeper, save the end. Collective.

        An epoch whose minibatches were all trained on before a checkpoint is ended first, and does not count.
        With a keeper, no epoch is begun if a rank was asked to stop before.
        """
        self._state.in_fit = True
        try:
            self._run(epochs)
        finally:
            self._state.in_fit = False

    def _run(self, epochs: int) -> None:
        self._worker.end_requested = False
        self._callbacks.tell("on_fit_start")
        if self._keeper is not None and self._worker.sum_losses(np.zeros(0)).ask_to_stop():
            self._state.preempted, epochs = True, 0
        elif self._state.only_ends_epoch(self._minibatch_size):
            epochs += 1
        for _ in range(epochs):
            if self._is_over():
                break
            self._train()
            if self._stops() or not self._end_epoch():
                break
        if self._keeper is not None and self._state.step:
            self._keeper.finish(self._state.step, self._state.resume_point(self._minibatch_size))
        self._callbacks.tell("on_fit_end")

    def _train(self) -> None:
        self._worker.renew()  # callbacks may have changed the model
        adopts = self._callbacks.are_users and not self._worker.plan.is_asynchronous
        batches = self._batches()
        size, keeper = self._minibatch_size, self._keeper
        epoch = EpochLoop(self._worker, self._metrics, self._state, size, keeper, self._breaks)
        self._state.in_epoch = True
        try:
            with closing(epoch.run(batches)) as records:  # closed at once after an error
                for record in records:
                    self._callbacks.tell("on_minibatch", record)
                    if adopts:
                        self._worker.adopt_settings()
        except BaseException:
            self._state.progress = None
            raise
        finally:
            self._state.in_epoch = False

    def _end_epoch(self) -> bool:
        """Evaluate and count the epoch. Return True if training continues."""
        state, metrics = self._state, None
        if not state.only_ends_epoch(self._minibatch_size):  # `max_steps` has ended it
            self.stopped = True
            return False
        if self._evaluate is not None:
            metrics = self._evaluated()
            if metrics is None:  # the resumed training evaluates first
                return not self._stops()
        entry = state.end_epoch(metrics)
        self._metrics.end_epoch(entry)
        self._callbacks.tell("on_epoch_end", entry)
        if self._stops():
            return False
        if self._wanted and metrics is not None and reached(metrics, self._wanted):
            self._metrics.reach_target(state.epoch)
            return False
        return True

    def _evaluated(self) -> dict[str, float] | None:
        """Evaluate, and return the metrics; None if a rank was asked to stop, which ends the epoch here."""
        assert self._evaluate is not None
        with self._callbacks.evaluating():
            metrics = self._evaluate()
        if metrics is None:
            self._state.preempt(self._state.step)
        else:
            self._callbacks.tell("on_evaluate", metrics)
        return metrics

    def _is_over(self) -> bool:
        """Return True if no epoch is to begin: a callback wants the end, or `max_steps` is reached."""
        if self._worker.sum_losses(np.zeros(0)).ask_to_end():
            self.stopped = True
        only_ends = self._state.only_ends_epoch(self._minibatch_size)
        return self.stopped or (self._state.step >= self._breaks.max_steps and not only_ends)

    def _stops(self) -> bool:
        """Return True once `stop_from` is set: the epoch then ended there; clear it."""
        if self._state.stop_from is None:
            return False
        self._state.stop_from, self.stopped = None, True
        return True
