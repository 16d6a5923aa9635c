"""Feed: checks a training's data sets, and loads the minibatches that this rank needs of them.

Not known here: what is computed with a minibatch. Invariant: every rank yields minibatches of the same sizes,
and a rank loads only samples that its stages need, except of a data set that is iterated.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from hybridpipe.comm.training_group import TrainingGroup
from hybridpipe.config.options import DataOptions
from hybridpipe.data.batches import Microbatches
from hybridpipe.data.loader import loaded
from hybridpipe.data.reader import Begin, Reader, first_minibatch
from hybridpipe.data.source import Source, source_of
from hybridpipe.data.stream import Minibatch
from hybridpipe.engine import consistency
from hybridpipe.engine.worker import Worker
from hybridpipe.errors import UserError
from hybridpipe.training.train_state import EpochProgress, TrainState


class Feed:
    """The data sets of one training.

    Args:
        minibatch_size: samples of a minibatch, of which each group takes its part.
        options: how they are drawn and loaded.
    """

    def __init__(self, group: TrainingGroup, minibatch_size: int, options: DataOptions) -> None:
        self._world, self._seed, self._whole_size = group.everyone, options.seed, minibatch_size
        self._minibatch_size = group.share_of("minibatch_size", minibatch_size)
        self._group = group.index, group.options.count
        self._num_workers, self._collate_fn = options.num_workers, options.collate_fn

    def training_set(self, dataset: Any, drop_last: bool = False) -> Source:
        """Return the source of a data set or DataLoader to train on.

        Args:
            drop_last: leave out the samples behind the last full minibatch; a DataLoader may say so as well.

        Raises:
            TypeError, ValueError: as `source_of`, or an IterableDataset cannot be loaded ahead.
        """
        source = self._source("dataset", dataset, self._whole_size)
        if source.is_iterable and self._group[1] > 1:
            raise UserError(
                "dataset is an IterableDataset, whose samples have no index by which groups could deal them: "
                "give it __len__ and __getitem__, or leave groups out"
            )
        return replace(source, drop_last=drop_last or source.drop_last, group=self._group)

    def held_out_set(self, name: str, dataset: Any) -> Source:
        """Return the source of a data set or DataLoader to evaluate on; its batch size may be any.

        Raises:
            TypeError, ValueError: as `training_set`, or samples would be dropped.
        """
        source = self._source(name, dataset, None)
        if source.drop_last:
            raise UserError(
                f"{name} is a DataLoader with drop_last, which would leave samples out of the figures: leave "
                "drop_last out"
            )
        return source

    def _source(self, name: str, dataset: Any, batch_size: int | None) -> Source:
        source = source_of(name, dataset, self._collate_fn, batch_size)
        if source.is_iterable and self._num_workers:
            raise ValueError(
                f"{name} is an IterableDataset, which each rank reads itself as it trains: leave "
                f"num_workers = {self._num_workers} out"
            )
        return source

    def check(self, name: str, source: Source) -> dict[str, str]:
        """Compare a data set between ranks and return its fingerprint. Collective.

        Raises:
            TypeError, ValueError: as `check_data_alike`.
        """
        return consistency.check_data_alike(self._world, name, source, self._seed)

    def num_samples(self, source: Source) -> int | None:
        """Return the number of samples in an epoch, of all groups; None where only the end shows it."""
        own = source.num_samples(self._minibatch_size)
        return None if own is None else own * self._group[1]

    def first(self, source: Source, microbatch_size: int) -> Minibatch:
        """Return the first minibatch of the data set's own order, the same on every rank."""
        return first_minibatch(source, self._minibatch_size, microbatch_size, self._seed)

    def first_samples(self, source: Source, count: int) -> Minibatch:
        """Return the first `count` samples of the data set's own order as one microbatch."""
        return first_minibatch(source, count, count, self._seed)

    def epoch(
        self, worker: Worker, source: Source, microbatch_size: int, shuffle: bool, state: TrainState
    ) -> Iterator[Minibatch]:
        """Begin the next epoch, or continue the one that `state` is in; yield the rest of its minibatches.

        Under an asynchronous schedule the rest begins with the stream.
        """
        worker.expect_shapes(self._shapes_vary(worker, source))
        if source.is_iterable:
            progress = state.begin_epoch(None, shuffle=False)
            done, total = progress.resume_point(self._whole_size)
            begin = Begin(progress.position, state.data_states.get(progress.position), is_end=done == total)
            reader = self._agreeing(worker, source, microbatch_size, epoch=state.epoch, begin=begin)
            state.data_states = reader.states
            return _noting_the_end(reader, progress)
        if state.only_ends_epoch(self._whole_size) and not worker.plan.is_asynchronous:
            return iter(())  # perhaps with other groups, to whom an epoch may be shorter by a few samples
        shuffle = shuffle if source.shuffle is None else source.shuffle
        microbatches = self._microbatches(source, microbatch_size, epoch=state.epoch, shuffle=shuffle)
        progress = state.begin_epoch(len(microbatches.order) * self._group[1], shuffle)
        loads = partial(worker.loads, begin=progress.position, stream_start=progress.stream_start)
        first = progress.stream_start if worker.plan.is_asynchronous else progress.position
        return islice(loaded(microbatches, loads, self._processes(source)), first, None)

    def evaluation(self, worker: Worker, source: Source, microbatch_size: int) -> Iterator[Minibatch]:
        """Yield the minibatches of a data set, in its own order."""
        worker.expect_shapes(self._shapes_vary(worker, source))
        if source.is_iterable:
            return self._agreeing(worker, source, microbatch_size).minibatches()
        microbatches = self._microbatches(source, microbatch_size)
        return loaded(microbatches, worker.loads_to_infer, self._processes(source))

    def _shapes_vary(self, worker: Worker, source: Source) -> bool:
        """Return True if every stage must look at the inputs to know their shapes."""
        if source.shapes_vary or source.is_iterable or worker.plan.num_stages == 1:
            return source.shapes_vary
        return not worker.layers.expects(lambda: self._microbatches(source, microbatch_size=1)[0, 0][0])

    def _processes(self, source: Source) -> int:
        return self._num_workers if source.num_workers is None else source.num_workers

    def _microbatches(self, source: Source, microbatch_size: int, **which: Any) -> Microbatches:
        return Microbatches(source, self._minibatch_size, microbatch_size, seed=self._seed, **which)

    def _agreeing(self, worker: Worker, source: Source, microbatch_size: int, **options: Any) -> Reader:
        """Return a reader on ranks that load samples, and on rank 0, which saves its state.

        Those are the ranks of the first and the last stage, and of others that use inputs; where shapes may
        vary, all that hold a stage.
        """
        reads = worker.loads_samples or worker.control.rank == 0
        agree, size = partial(_agreed, worker), self._minibatch_size
        return Reader(source, size, microbatch_size, self._seed, agree=agree, reads=reads, **options)


def _noting_the_end(reader: Reader, progress: EpochProgress) -> Iterator[Minibatch]:
    """Yield a reader's minibatches; the last one comes with the number of samples of the epoch."""
    for minibatch in reader.minibatches():
        progress.dataset_samples = reader.num_samples or 0
        yield minibatch


def _agreed(worker: Worker, count: int | None) -> int:
    """Return the number of samples that every rank which reads has read. Collective.

    Raises:
        ValueError: on all ranks alike; the ranks have read different numbers.
    """
    own = (0, 0, 0) if count is None else (count, count * count, 1)
    total, squares, readers = worker.sum_losses(np.array(own, dtype=float)).wait().tolist()
    if squares * readers != total * total:
        raise ValueError(
            "the ranks have read different numbers of samples of an IterableDataset: every rank passes the "
            "whole data set, which must give the same samples on each"
        )
    return int(total / readers)
