"""FitLoop: the epochs of one `Trainer.fit`, and what ends them before the last.

Knows worker and train state, no data set: minibatches and evaluation are handed in.
Invariant: after an error the next `fit` begins the epoch anew.
"""

from collections.abc import Callable, Iterator
from contextlib import closing

from hybridpipe.checkpoint.policy import Keeper
from hybridpipe.data.stream import Minibatch
from hybridpipe.engine.worker import Worker
from hybridpipe.training.evaluation import reached
from hybridpipe.training.loop import EpochLoop
from hybridpipe.training.metrics import MinibatchRecord, Recorder
from hybridpipe.training.train_state import TrainState


class FitLoop:
    """One `fit`.

    Args:
        keeper: saves on the way; None: nothing is saved.
        batches: begins the next epoch, or what is left of one, and gives its minibatches.
        evaluate: gives the metrics on held-out data, None where a rank was asked to stop; None: no data.
        wanted: metrics that end it once they are reached.
        on_minibatch: called with each record.
    """

    def __init__(
        self,
        worker: Worker,
        state: TrainState,
        recorder: Recorder,
        keeper: Keeper | None,
        minibatch_size: int,
        batches: Callable[[], Iterator[Minibatch]],
        evaluate: Callable[[], dict[str, float] | None] | None,
        wanted: dict[str, float],
        on_minibatch: Callable[[MinibatchRecord], None] | None,
    ) -> None:
        self._worker, self._state, self._recorder, self._keeper = worker, state, recorder, keeper
        self._minibatch_size, self._batches, self._evaluate = minibatch_size, batches, evaluate
        self._wanted, self._on_minibatch = wanted, on_minibatch
        self.is_training = False  # in the middle of an epoch
        self.stopped = False  # where `stop_from` said

    def run(self, epochs: int) -> None:
        """Train on so many epochs at most."""
        for _ in range(epochs):
            self._train()
            if self._stops() or not self._end_epoch():
                break

    def _train(self) -> None:
        batches = self._batches()
        epoch = EpochLoop(self._worker, self._recorder, self._state, self._minibatch_size, self._keeper)
        self.is_training = True
        try:
            with closing(epoch.run(batches)) as records:  # an error closes it at once
                for record in records:
                    if self._on_minibatch is not None:
                        self._on_minibatch(record)
        except BaseException:
            self._state.progress = None
            raise
        finally:
            self.is_training = False

    def _end_epoch(self) -> bool:
        """Evaluate, and count the epoch. Returns whether there is more to train."""
        state, metrics = self._state, None
        if self._evaluate is not None:
            metrics = self._evaluate()
            if metrics is None:  # the resumed training evaluates first
                state.preempt(state.step)
                return not self._stops()
        self._recorder.end_epoch(state.end_epoch(metrics))
        if self._stops():
            return False
        if self._wanted and metrics is not None and reached(metrics, self._wanted):
            self._recorder.reach_target(state.epoch)
            return False
        return True

    def _stops(self) -> bool:
        if self._state.stop_from is None:
            return False
        self._state.stop_from, self.stopped = None, True
        return True
