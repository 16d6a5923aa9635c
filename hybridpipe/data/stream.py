"""Stream: the minibatches of one program, with their microbatches numbered throughout.

A synchronous program has a stream of one minibatch; an asynchronous one runs until the pipeline is drained.
Not known here: data sets. Invariant: tensors are fetched on the ranks that need them, when they need them.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from hybridpipe.model.tensors import Tree, map_tensors, num_samples


def _keep(_: int) -> None:
    """Drop nothing: the tensors are in memory anyway."""


class Minibatch(NamedTuple):
    """One minibatch's microbatches: their sizes, and functions from a microbatch's index to its tensors.

    `drop` is told of a microbatch whose tensors are used no more.
    """

    sizes: Sequence[int]  # in samples
    inputs: Callable[[int], Tree]
    targets: Callable[[int], Tree]
    drop: Callable[[int], None] = _keep

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

    def part(tree: Tree, microbatch: int) -> Tree:
        start = microbatch * microbatch_size
        return map_tensors(lambda tensor: tensor[start : start + microbatch_size], tree)

    return Minibatch(sizes, lambda m: part(inputs, m), lambda m: part(targets, m))


class StreamedMicrobatch(NamedTuple):
    """A microbatch of the stream, and its index in its minibatch."""

    minibatch: Minibatch
    step: int  # minibatches trained on before this one
    microbatch: int

    @property
    def inputs(self) -> Tree:
        """The first stage's inputs."""
        return self.minibatch.inputs(self.microbatch)

    @property
    def targets(self) -> Tree:
        """The loss's targets."""
        return self.minibatch.targets(self.microbatch)

    def drop(self) -> None:
        """Say that its tensors are used no more on this rank."""
        self.minibatch.drop(self.microbatch)

    @property
    def share(self) -> float:
        """Its fraction of the minibatch's samples, in (0, 1]."""
        return self.minibatch.sizes[self.microbatch] / self.minibatch.num_samples


class Stream:
    """Minibatches in order; `stream[m]` is microbatch m, counted from the first minibatch.

    Args:
        step: number of minibatches trained on before.
    """

    def __init__(self, minibatches: Sequence[Minibatch], step: int) -> None:
        self.minibatches, self.step = minibatches, step
        self.sizes = tuple(size for minibatch in minibatches for size in minibatch.sizes)
        self._ends = list(accumulate(len(minibatch.sizes) for minibatch in minibatches))

    def __getitem__(self, microbatch: int) -> StreamedMicrobatch:
        index = bisect_right(self._ends, microbatch)
        minibatch = self.minibatches[index]
        return StreamedMicrobatch(
            minibatch, self.step + index, microbatch - self._ends[index] + len(minibatch.sizes)
        )
