"""Stream: the minibatches of one program, with their microbatches numbered throughout.

A synchronous program has a stream of one minibatch; an asynchronous one runs until the pipeline is drained.
Not known here: data sets. Invariant: tensors are fetched on the ranks that need them, when they need them.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, count
from typing import NamedTuple

from hybridpipe.model.tensors import Tree, num_samples, split


class Minibatch(NamedTuple):
    """One minibatch's microbatches: their sizes, and functions from a microbatch's index to its tensors.

    `drop` is called for a microbatch whose tensors are used no more; None where they are in memory anyway.
    """

    sizes: Sequence[int]  # in samples
    inputs: Callable[[int], Tree]
    targets: Callable[[int], Tree]
    drop: Callable[[int], None] | None = None

    @property
    def num_samples(self) -> int:
        """Number of samples in all microbatches."""
        return sum(self.sizes)


class LoadedOnce:
    """Loads a microbatch at its first use and keeps it until it is dropped.

    A rank may look at inputs long before it runs them, for the shapes of messages, and takes inputs and
    targets one after the other.

    Args:
        load: returns inputs and targets of microbatch b of minibatch i.
    """

    def __init__(self, load: Callable[[int, int], tuple[Tree, Tree]]) -> None:
        self._load = load
        self._kept: dict[tuple[int, int], tuple[Tree, Tree]] = {}

    def minibatch(self, i: int, sizes: Sequence[int]) -> Minibatch:
        """Return minibatch i, whose microbatches have these sizes."""
        return Minibatch(
            sizes, partial(self._part, 0, i), partial(self._part, 1, i), lambda b: self._drop(i, b)
        )

    def _part(self, which: int, i: int, b: int) -> Tree:
        if (i, b) not in self._kept:
            self._kept[i, b] = self._load(i, b)
        return self._kept[i, b][which]

    def _drop(self, i: int, b: int) -> None:
        self._kept.pop((i, b), None)


def microbatch_sizes(num_samples: int, microbatch_size: int) -> list[int]:
    """Return the samples in each microbatch of a minibatch: all of one size but for the last."""
    full, rest = divmod(num_samples, microbatch_size)
    return [microbatch_size] * full + [rest] * (rest > 0)


def slice_minibatch(inputs: Tree, targets: Tree, microbatch_size: int) -> Minibatch:
    """Slice a minibatch that is in memory, samples in the first dimension, into microbatches.

    Raises:
        TypeError, ValueError: as `num_samples`.
    """
    sizes = microbatch_sizes(num_samples(inputs=inputs, targets=targets), microbatch_size)
    of_inputs = split(inputs, microbatch_size, len(sizes))
    of_targets = split(targets, microbatch_size, len(sizes))
    return Minibatch(sizes, of_inputs.__getitem__, of_targets.__getitem__)


class StreamedMicrobatch(NamedTuple):
    """A microbatch of the stream."""

    minibatch: Minibatch
    step: int  # minibatches trained on before this one
    microbatch: int  # its index in its minibatch
    minibatch_samples: int
    share: float  # its fraction of them, in (0, 1]


class Stream(list[StreamedMicrobatch]):
    """The microbatches of minibatches, in order.

    Args:
        step: number of minibatches trained on before.
    """

    def __init__(self, minibatches: Sequence[Minibatch], step: int) -> None:
        super().__init__(chain.from_iterable(map(_streamed, minibatches, count(step))))
        self.minibatches, self.step = minibatches, step
        self.sizes = tuple(size for minibatch in minibatches for size in minibatch.sizes)


def _streamed(minibatch: Minibatch, step: int) -> Iterator[StreamedMicrobatch]:
    samples = minibatch.num_samples
    for m, size in enumerate(minibatch.sizes):
        yield StreamedMicrobatch(minibatch, step, m, samples, size / samples)
