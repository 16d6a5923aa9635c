"""Batches: minibatches of a data set, cut into microbatches that are loaded where they are needed.

The order depends on seed and epoch alone, so every rank knows it without a word; a rank loads a
microbatch when its program asks for it, and ranks that need neither inputs nor targets load nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from hybridpipe.planning.plan import Plan, microbatch_sizes
from hybridpipe.planning.schedules import ceil_div
from hybridpipe.runtime.stream import Minibatch
from hybridpipe.stage.randomness import random_key
from hybridpipe.stage.values import Value, map_tensors, tensors_of


def minibatches(
    dataset: Any,
    minibatch_size: int,
    microbatch_size: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = False,
) -> Iterator[Minibatch]:
    """All minibatches of one epoch; the last may be short.

    Args:
        dataset: map-style: `len(dataset)`, and `dataset[i]` is (inputs, target).
    """
    if not len(dataset):
        raise ValueError("dataset must hold at least one sample, got none")
    order = _order(len(dataset), seed, epoch, shuffle)

    @lru_cache(maxsize=1)  # a rank that is first and last stage asks for inputs, then for targets
    def load(start: int, stop: int) -> tuple[Value, Value]:
        return _load(dataset, order[start:stop])

    for start in range(0, len(order), minibatch_size):
        yield _load_minibatch(load, start, min(start + minibatch_size, len(order)), microbatch_size)


def num_minibatches(dataset: Any, minibatch_size: int) -> int:
    """How many minibatches an epoch has."""
    return -(-len(dataset) // minibatch_size)


def slice_minibatch(inputs: Value, targets: Value, microbatch_size: int) -> Minibatch:
    """A minibatch that is in memory already, samples in the first dimension."""
    counts = {len(tensor) for value in (inputs, targets) for tensor in tensors_of(value)}
    if len(counts) != 1:
        raise ValueError(f"inputs and targets must hold equally many samples, got {sorted(counts)}")
    count = counts.pop()
    if not count:
        raise ValueError("inputs and targets must hold at least one sample, got none")
    sizes = microbatch_sizes(count, microbatch_size)

    def part(value: Value, microbatch: int) -> Value:
        start = microbatch * microbatch_size
        return map_tensors(lambda tensor: tensor[start : start + microbatch_size], value)

    return Minibatch(sizes, lambda m: part(inputs, m), lambda m: part(targets, m))


def microbatch_size_of(plan: Plan, minibatch_size: int, microbatch_size: int | None = None) -> int:
    """What the plan's number of microbatches makes it; it must be the given one, if one is given."""
    size = ceil_div(minibatch_size, plan.num_microbatches)
    count = ceil_div(minibatch_size, size)
    if count != plan.num_microbatches:
        raise ValueError(
            f"minibatch_size = {minibatch_size} cannot be sliced into the plan's num_microbatches = "
            f"{plan.num_microbatches} of one size: slices of {size} are {count}"
        )
    if microbatch_size not in (None, size):
        raise ValueError(
            f"microbatch_size = {microbatch_size} disagrees with the plan: minibatch_size = {minibatch_size} "
            f"in num_microbatches = {plan.num_microbatches} makes {size}; leave microbatch_size out"
        )
    return size


def parts_of(share: int, minibatch_size: int) -> list[int]:
    """Halves and quarters of a rank's share, where they make slices of one size; of two samples at least.

    BatchNorm, and what squeezes, does not work with one.
    """
    return [] if minibatch_size % share else [share // n for n in (2, 4) if share % n == 0 and share > n]


def _order(length: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    if not shuffle:
        return list(range(length))
    generator = torch.Generator().manual_seed(random_key(seed, epoch, 0, 0))
    order: list[int] = torch.randperm(length, generator=generator).tolist()
    return order


def _load_minibatch(
    load: Callable[[int, int], tuple[Value, Value]], start: int, stop: int, microbatch_size: int
) -> Minibatch:
    def part(microbatch: int) -> tuple[Value, Value]:
        first = start + microbatch * microbatch_size
        return load(first, min(first + microbatch_size, stop))

    sizes = microbatch_sizes(stop - start, microbatch_size)
    return Minibatch(sizes, lambda m: part(m)[0], lambda m: part(m)[1])


def _load(dataset: Any, indices: Sequence[int]) -> tuple[Value, Value]:
    if type(dataset) is TensorDataset:  # one indexing instead of a call a sample; a subclass may do more
        inputs, targets = (tensor[list(indices)] for tensor in dataset.tensors)
    else:
        inputs, targets = default_collate([dataset[i] for i in indices])
    return _as_value(inputs), _as_value(targets)


def _as_value(collated: Tensor | Sequence[Tensor]) -> Value:
    """`default_collate` turns tuples into lists."""
    return collated if isinstance(collated, Tensor) else tuple(collated)
