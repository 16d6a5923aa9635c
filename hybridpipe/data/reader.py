"""Reader: the minibatches of a data set that is iterated, read alike by every rank that needs samples.

Not known here: plans and MPI; ranks agree on the number of samples through a function.
Invariant: a minibatch is read only after all ranks have agreed on the one before it.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from hybridpipe.data.batches import Microbatches, minibatches
from hybridpipe.data.beginning import begun, has_state
from hybridpipe.data.samples import A_COLLATION, Loaded, collated
from hybridpipe.data.source import CPU, Source
from hybridpipe.data.stream import LoadedOnce, Minibatch, microbatch_sizes
from hybridpipe.errors import UserError
from hybridpipe.model.rng import preserved_state, random_key, seed_generators
from hybridpipe.stage.state import pack

A_MINIBATCH = -4  # stands in a random key where a layer has its index
KEPT = 4  # states of the data set: a checkpoint is described one minibatch late, and one is read ahead


class Begin(NamedTuple):
    """Place in an epoch: after `position` minibatches, where `state` was the data set's, if it has one."""

    position: int = 0
    state: Any = None
    is_end: bool = False  # nothing of the epoch is left


_AT_FIRST = Begin()


class Reader:
    """One epoch of a data set that is iterated.

    The generators of torch, NumPy and Python are seeded for each minibatch, so that every rank reads the same
    samples; those of the process stay as they are.

    Args:
        seed, epoch: together with a minibatch's index they determine its draws.
        begin: where to begin. Without a state, earlier samples are read and dropped.
        agree: given the number of samples that this rank has read (None: it reads none), returns the number
            that all ranks that read have; collective.
        reads: False on a rank that needs no samples.
    """

    def __init__(
        self,
        source: Source,
        minibatch_size: int,
        microbatch_size: int,
        seed: int = 0,
        epoch: int = 0,
        begin: Begin = _AT_FIRST,
        agree: Callable[[int | None], int] = lambda count: count or 0,
        reads: bool = True,
    ) -> None:
        self._source, self._seed, self._epoch, self._begin = source, seed, epoch, begin
        self._minibatch_size, self._microbatch_size = minibatch_size, microbatch_size
        self._agree, self._reads = agree, reads
        self._samples: Iterator[Any] = iter(())
        self.states: dict[int, Any] = {}  # the data set's state after the first n minibatches, by n
        self.num_samples: int | None = None  # in the epoch, once its end is known

    def minibatches(self) -> Iterator[Minibatch]:
        """Yield the minibatches from `begin` on; `num_samples` is known with the last one.

        Raises:
            UserError: there are none, and `begin` is not the epoch's end.
        """
        if self._begin.is_end:
            return
        first = self._begin.position
        if self._reads:
            self._open()
        samples, count = self._next(first)
        if not count:
            raise self._none_left()
        number, known = first, first * self._minibatch_size
        while count:
            self._keep_state(number + 1)
            ahead, more = self._next(number + 1) if count == self._minibatch_size else ([], 0)
            known += count
            if not more:
                self.num_samples = known
            load = partial(self._load, samples)
            yield LoadedOnce(load).minibatch(number, microbatch_sizes(count, self._microbatch_size))
            samples, count, number = ahead, more, number + 1

    def _open(self) -> None:
        """Begin to iterate at `begin`."""
        begin = self._begin
        with self._seeded(0):
            self._samples = begun(self._source.dataset, self._epoch, begin.state)
        for number in range(0 if begin.state is None else begin.position, begin.position):
            self._read(number)

    def _none_left(self) -> UserError:
        if not self._begin.position:
            return self._source.empty_epoch(self._minibatch_size)
        return UserError(
            f"the data set ends before minibatch {self._begin.position + 1} of the epoch, where the training "
            "goes on: it must give the samples that it gave before"
        )

    def _next(self, number: int) -> tuple[list[Any], int]:
        """Return the samples of a minibatch, and their number, on which all ranks agree."""
        samples = self._read(number) if self._reads else []
        if self._source.drop_last and len(samples) < self._minibatch_size:
            samples = []
        return samples, self._agree(len(samples) if self._reads else None)

    def _read(self, number: int) -> list[Any]:
        with self._seeded(number):
            return list(islice(self._samples, self._minibatch_size))

    def _load(self, samples: list[Any], number: int, microbatch: int) -> Loaded:
        start = microbatch * self._microbatch_size
        some = samples[start : start + self._microbatch_size]
        first = number * self._minibatch_size + start
        with self._seeded(first, A_COLLATION):
            return collated(some, range(first, first + len(some)), self._source.collate_fn)

    @contextmanager
    def _seeded(self, number: int, kind: int = A_MINIBATCH) -> Iterator[None]:
        with preserved_state(CPU, python_too=True):
            seed_generators(random_key(self._seed, self._epoch, number, kind), CPU, python_too=True)
            yield

    def _keep_state(self, position: int) -> None:
        """Keep the data set's state after `position` minibatches, if it has one.

        Raises:
            UserError: a checkpoint cannot hold the state.
        """
        if not self._reads or not has_state(self._source.dataset):
            return
        state = copy.deepcopy(self._source.dataset.state_dict())
        tensors: dict[str, Tensor] = {}
        pack(state, "state_dict() of the data set", tensors)
        for name in tensors:
            raise UserError(f"{name}: a checkpoint holds numbers and text of it, got a tensor; use tolist()")
        self.states[position] = state
        self.states.pop(position - KEPT, None)


def first_minibatch(source: Source, minibatch_size: int, microbatch_size: int, seed: int = 0) -> Minibatch:
    """Return the first minibatch in the data set's own order."""
    if source.is_iterable:
        return next(Reader(source, minibatch_size, microbatch_size, seed).minibatches())
    return next(minibatches(Microbatches(source, minibatch_size, microbatch_size, seed=seed)))
