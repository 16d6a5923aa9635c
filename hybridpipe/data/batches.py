"""Batches: an epoch of a data set in minibatches and microbatches, and the samples of each.

Not known here: when a microbatch is loaded, and by which process (`loader`).
Invariant: order and random draws follow from seed, epoch and sample alone, so they are equal on all ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import TensorDataset

from hybridpipe.data.samples import Loaded, load
from hybridpipe.data.source import source_of
from hybridpipe.data.stream import LoadedOnce, Minibatch, microbatch_sizes
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.schedules.generators import ceil_div


class Microbatches:
    """One epoch of a data set; `[i, b]` loads microbatch b of minibatch i. The last of each may be short.

    A sample that is cropped at random is cropped alike on the rank of the first stage, which takes its
    inputs, and on that of the last stage, which takes its targets.

    Args:
        dataset: map-style, or a Source of one; `dataset[i]` is (inputs, target), or a dict that is both. It
            may draw from the generators of torch (the CPU's), NumPy and Python; those of the process stay as
            they are.
        minibatch_size, microbatch_size: in samples.
        epoch: counted from 0; it seeds the order and the draws together with `seed`.

    Raises:
        TypeError, ValueError: as `source_of`.
    """

    def __init__(
        self,
        dataset: Any,
        minibatch_size: int,
        microbatch_size: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool = False,
    ) -> None:
        self.source, self.seed, self.epoch = source_of("dataset", dataset), seed, epoch
        self.minibatch_size, self.microbatch_size = minibatch_size, microbatch_size
        self.order = self.source.order(minibatch_size, seed, epoch, shuffle)

    def __len__(self) -> int:
        return ceil_div(len(self.order), self.minibatch_size)

    @property
    def counts(self) -> list[int]:
        """Number of microbatches in each minibatch."""
        return [len(self.sizes(i)) for i in range(len(self))]

    def sizes(self, minibatch: int) -> list[int]:
        """Return the number of samples in each microbatch of a minibatch."""
        start = minibatch * self.minibatch_size
        return microbatch_sizes(min(self.minibatch_size, len(self.order) - start), self.microbatch_size)

    def __getitem__(self, at: tuple[int, int]) -> Loaded:
        minibatch, microbatch = at
        start = minibatch * self.minibatch_size + microbatch * self.microbatch_size
        return self._load(self.order[start : start + self.sizes(minibatch)[microbatch]])

    def _load(self, samples: Sequence[int]) -> Loaded:
        dataset = self.source.dataset
        if type(dataset) is TensorDataset and self.source.collate_fn is None:
            inputs, targets = (tensor[list(samples)] for tensor in dataset.tensors)  # in one indexing
            return inputs, targets
        return load(self.source, self.seed, self.epoch, samples)


def minibatches(
    microbatches: Microbatches, load: Callable[[int, int], Loaded] | None = None
) -> Iterator[Minibatch]:
    """Yield all minibatches of an epoch.

    Args:
        load: returns microbatch b of minibatch i; by default it is loaded when it is needed.
    """
    once = LoadedOnce(load or (lambda i, b: microbatches[i, b]))
    for i in range(len(microbatches)):
        yield once.minibatch(i, microbatches.sizes(i))


def microbatch_size_of(plan: Plan, minibatch_size: int, microbatch_size: int | None = None) -> int:
    """Return the microbatch size in samples that follows from the plan's number of microbatches.

    Raises:
        ValueError: no size gives that number of microbatches, or it differs from a given `microbatch_size`.
    """
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
    """Return half and a quarter of a rank's share as microbatch sizes, where they slice it evenly.

    A size is at least two samples: BatchNorm, and layers that squeeze, do not work with one.
    """
    return [] if minibatch_size % share else [share // n for n in (2, 4) if share % n == 0 and share > n]
