"""Stream: the minibatches that one program works through, their microbatches numbered from end to end.

A synchronous program flushes after one minibatch, so its stream holds one; an asynchronous program runs
from one drain of the pipeline to the next. Tensors are fetched where, and when, they are needed.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from hybridpipe.model.tensors import TensorTree, map_tensors, tensors_of


class Minibatch(NamedTuple):
    """One minibatch's microbatches; inputs and targets are fetched where, and when, they are needed."""

    sizes: Sequence[int]
    inputs: Callable[[int], TensorTree]
    targets: Callable[[int], TensorTree]

    @property
    def num_samples(self) -> int:
        """Samples in all microbatches."""
        return sum(self.sizes)


def microbatch_sizes(num_samples: int, microbatch_size: int) -> list[int]:
    """Samples in each microbatch of a minibatch: all of one size but for the last."""
    full, rest = divmod(num_samples, microbatch_size)
    return [microbatch_size] * full + [rest] * (rest > 0)


def slice_minibatch(inputs: TensorTree, targets: TensorTree, microbatch_size: int) -> Minibatch:
    """A minibatch that is in memory already, samples in the first dimension."""
    counts = {len(tensor) for value in (inputs, targets) for tensor in tensors_of(value)}
    if len(counts) != 1:
        raise ValueError(f"inputs and targets must hold equally many samples, got {sorted(counts)}")
    count = counts.pop()
    if not count:
        raise ValueError("inputs and targets must hold at least one sample, got none")
    sizes = microbatch_sizes(count, microbatch_size)

    def part(value: TensorTree, microbatch: int) -> TensorTree:
        start = microbatch * microbatch_size
        return map_tensors(lambda tensor: tensor[start : start + microbatch_size], value)

    return Minibatch(sizes, lambda m: part(inputs, m), lambda m: part(targets, m))


class StreamedMicrobatch(NamedTuple):
    """A microbatch of the stream: which it is of which minibatch."""

    minibatch: Minibatch
    step: int  # minibatches trained on before this one
    microbatch: int

    @property
    def inputs(self) -> TensorTree:
        """What the first stage takes."""
        return self.minibatch.inputs(self.microbatch)

    @property
    def targets(self) -> TensorTree:
        """What the loss takes."""
        return self.minibatch.targets(self.microbatch)

    @property
    def share(self) -> float:
        """Its part of the minibatch's samples."""
        return self.minibatch.sizes[self.microbatch] / self.minibatch.num_samples


class Stream:
    """Minibatches, in order.

    Args:
        step: how many minibatches have been trained on before.
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
