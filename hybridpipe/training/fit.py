"""FitLoop: the epochs of one `Trainer.fit`, and what ends them before the last.

Knows worker and books, no data set: minibatches and evaluation are handed in.
Invariant: after an error the next `fit` begins the epoch anew.
"""

from collections.abc import Callable, Iterator
from contextlib import closing

from hybridpipe.checkpoint.policy import Keeper
from hybridpipe.data.stream import Minibatch
from hybridpipe.engine.worker import Worker
from hybridpipe.training.books import Books
from hybridpipe.training.evaluation import reached
from hybridpipe.training.loop import EpochLoop
from hybridpipe.training.metrics import MinibatchRecord


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
        books: Books,
        keeper: Keeper | None,
        batches: Callable[[], Iterator[Minibatch]],
        evaluate: Callable[[], dict[str, float] | None] | None,
        wanted: dict[str, float],
        on_minibatch: Callable[[MinibatchRecord], None] | None,
    ) -> None:
        self._worker, self._books, self._keeper, self._batches = worker, books, keeper, batches
        self._evaluate, self._wanted, self._on_minibatch = evaluate, wanted, on_minibatch
        self.is_training = False  # in the middle of an epoch
        self.stopped = False  # where `stop_from` said

    def run(self, epochs: int) -> None:
        """Train on so many epochs at most."""
        for _ in range(epochs):
            self._train()
            if self._stops() or not self._end_epoch():
                break

    def _train(self) -> None:
        batches, standing = self._batches(), self._books.standing
        minibatch_size = self._books.sizes.minibatch_size
        epoch = EpochLoop(self._worker, self._books.recorder, standing, minibatch_size, self._keeper)
        self.is_training = True
        try:
            with closing(epoch.run(batches)) as records:  # an error closes it at once
                for record in records:
                    if self._on_minibatch is not None:
                        self._on_minibatch(record)
        except BaseException:
            standing.so_far = None
            raise
        finally:
            self.is_training = False

    def _end_epoch(self) -> bool:
        """Evaluate, and close the epoch's books. Returns whether there is more to train."""
        books, metrics = self._books, None
        if self._evaluate is not None:
            metrics = self._evaluate()
            if metrics is None:  # whoever resumes evaluates first
                books.standing.preempt(books.standing.step)
                return not self._stops()
        books.end_epoch(metrics)
        if self._stops():
            return False
        if self._wanted and metrics is not None and reached(metrics, self._wanted):
            books.recorder.reach_target(books.standing.epoch)
            return False
        return True

    def _stops(self) -> bool:
        if self._books.standing.stop_from is None:
            return False
        self._books.standing.stop_from, self.stopped = None, True
        return True
