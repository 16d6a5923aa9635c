"""Source: a data set, and what a DataLoader around it says about its order, collation and processes.

Not known here: ranks, and which samples are loaded when. Invariant: whatever a DataLoader says is either in
its Source or refused in one line, except for what changes no number (pinned memory, prefetching).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from hybridpipe.data.beginning import begun, set_epoch
from hybridpipe.errors import UserError, shown
from hybridpipe.model.rng import preserved_state, random_key, seed_generators
from hybridpipe.types import Collate

CPU = torch.device("cpu")
AN_ORDER = -3  # stands in a random key where a layer has its index


@dataclass(frozen=True)
class Source:
    """A data set and how to go through it.

    Args:
        dataset: map-style, or one that is iterated (`is_iterable`).
        collate_fn: makes a microbatch of a list of samples; None: they are stacked.
        sampler: indices of an epoch's samples in order, of which its len() are taken; None: the data set's
            order, or a random one.
        shuffle: True for a random order; None: as the caller of `fit` says.
        drop_last: leave out the samples behind the last full minibatch.
        num_workers: processes that load ahead; None: as the Trainer says.
        group: the index of this group and the number of groups: each takes its part of every minibatch, as
            large as each other's, and what does not divide is left out.
    """

    dataset: Any
    collate_fn: Collate | None = None
    sampler: Any = None
    shuffle: bool | None = None
    drop_last: bool = False
    num_workers: int | None = None
    group: tuple[int, int] = (0, 1)

    @property
    def is_iterable(self) -> bool:
        """True if the samples have no index: the data set is read in its own order."""
        return isinstance(self.dataset, IterableDataset) or not hasattr(self.dataset, "__getitem__")

    @property
    def shapes_vary(self) -> bool:
        """True if microbatches of as many samples may differ in shape; samples that are stacked have one."""
        return self.collate_fn is not None

    def num_samples(self, minibatch_size: int) -> int | None:
        """Return the number of this group's samples in an epoch; None where only the end shows it.

        Args:
            minibatch_size: of this group.
        """
        if self.is_iterable:
            return None
        sized: Any = self.dataset if self.sampler is None else self.sampler
        return self._kept(len(sized), minibatch_size * self.group[1]) // self.group[1]

    def order(self, minibatch_size: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
        """Return the indices of an epoch's samples in order, the same on every rank of this group.

        A sampler's draws from the generators of torch, NumPy and Python follow from seed and epoch.

        Args:
            minibatch_size: of this group.

        Raises:
            UserError: the epoch holds no samples, or the sampler gives something else than their indices.
        """
        if self.sampler is None:
            indices = _order(len(self.dataset), seed, epoch, shuffle)
        else:
            with preserved_state(CPU, python_too=True):
                seed_generators(random_key(seed, epoch, 0, AN_ORDER), CPU, python_too=True)
                set_epoch(self.sampler, epoch)
                indices = [_index(given) for given in islice(self.sampler, len(self.sampler))]
        whole_size = minibatch_size * self.group[1]
        kept = self._dealt(indices[: self._kept(len(indices), whole_size)], whole_size)
        if not kept:
            raise self.empty_epoch(whole_size)
        return kept

    def empty_epoch(self, minibatch_size: int) -> UserError:
        """Return the error of an epoch without a minibatch."""
        if self.drop_last:
            return UserError(
                f"the data set holds fewer samples than a minibatch, {minibatch_size}, and drop_last drops "
                "them: leave drop_last out, or make minibatch_size smaller"
            )
        return UserError(
            "an epoch must hold at least one sample, and the data set, or its sampler, gives none"
        )

    def _dealt(self, indices: list[int], minibatch_size: int) -> list[int]:
        """Return this group's part of each minibatch."""
        index, count = self.group
        dealt = []
        for start in range(0, len(indices), minibatch_size):
            minibatch = indices[start : start + minibatch_size]
            each = len(minibatch) // count
            dealt += minibatch[index * each : (index + 1) * each]
        return dealt

    def _kept(self, count: int, minibatch_size: int) -> int:
        return count - count % minibatch_size if self.drop_last else count


def source_of(
    name: str, given: Any, collate_fn: Collate | None = None, minibatch_size: int | None = None
) -> Source:
    """Return what a data set or a DataLoader says; a Source as it is.

    Args:
        name: the caller's name for it, such as "dataset", for messages.
        minibatch_size: a DataLoader's batch_size must be equal; None: it may be any.

    Raises:
        TypeError: it is no data set, or can be read once only.
        ValueError: it is empty.
        UserError: the DataLoader has an option that cannot be followed.
    """
    if isinstance(given, Source):
        return given
    source = Source(given, collate_fn)
    if isinstance(given, DataLoader):
        for problem in _problems(given, collate_fn, minibatch_size):
            raise UserError(f"{name} is a DataLoader {problem}")
        source = _of_loader(given, collate_fn)
    _check_dataset(name, source)
    return source


def _of_loader(loader: DataLoader[Any], collate_fn: Collate | None) -> Source:
    own = None if loader.collate_fn is default_collate else loader.collate_fn
    source = Source(
        loader.dataset,
        own or collate_fn,
        drop_last=loader.drop_last,
        num_workers=loader.num_workers or None,
    )
    sampler, count = loader.sampler, None if source.is_iterable else len(loader.dataset)  # type: ignore[arg-type]
    if source.is_iterable:
        return source
    if type(sampler) is SequentialSampler:
        return _with(source, shuffle=False)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == count:
        return _with(source, shuffle=True)
    return _with(source, sampler=sampler, shuffle=False)


def _with(source: Source, **changes: Any) -> Source:
    return Source(**(vars(source) | changes))


def _problems(
    loader: DataLoader[Any], collate_fn: Collate | None, minibatch_size: int | None
) -> Iterator[str]:
    """Yield what cannot be followed, in words that end a sentence, and what to do instead."""
    if loader.batch_size is None or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        yield (
            "that makes batches of its own (batch_sampler, or batch_size=None), which hybridpipe cuts into "
            "microbatches: pass the data set, or a DataLoader with batch_size and sampler"
        )
    if minibatch_size is not None and loader.batch_size != minibatch_size:
        yield (
            f"with batch_size = {loader.batch_size}, and minibatch_size = {minibatch_size}: make them equal; "
            "both are the samples behind one update, over all ranks"
        )
    if isinstance(loader.sampler, DistributedSampler):
        yield (
            "with a DistributedSampler: every rank passes the whole data set, of which hybridpipe loads each "
            "rank's part itself; leave the sampler out"
        )
    if loader.generator is not None or getattr(loader.sampler, "generator", None) is not None:
        yield (
            "with a generator: the order of samples and their draws follow from the Trainer's seed; leave "
            "the generator out"
        )
    if not (isinstance(loader.dataset, IterableDataset) or hasattr(loader.sampler, "__len__")):
        yield "with a sampler without len(): give it a method __len__, the samples of an epoch"
    if type(loader).__iter__ is not DataLoader.__iter__:
        yield (
            "that overrides __iter__, which would not be called: do in the data set or in collate_fn what it "
            "does, and pass a plain DataLoader"
        )
    if loader.worker_init_fn is not None:
        yield "with worker_init_fn, which would not be called: do in the data set what it does"
    trains = minibatch_size is not None  # what is held out may be collated in a way of its own
    if trains and collate_fn is not None and loader.collate_fn not in (default_collate, collate_fn):
        yield "with a collate_fn of its own, and the Trainer has another: give one of them"
    context = loader.multiprocessing_context
    if context is not None and context.get_start_method() != "fork":
        yield "with a multiprocessing_context: loader processes are forked; leave it out"


def _check_dataset(name: str, source: Source) -> None:
    dataset = source.dataset
    accepted = f"{name} must be a data set with len() and an index from 0, or one that can be iterated anew"
    kind = type(dataset).__name__
    needed = "__iter__" if source.is_iterable else "__len__"
    if isinstance(dataset, str | Mapping) or not hasattr(dataset, needed):
        raise TypeError(f"{accepted}, got {kind}")
    if source.is_iterable and hasattr(dataset, "state_dict") != hasattr(dataset, "load_state_dict"):
        raise TypeError(
            f"{name} has only one of state_dict and load_state_dict, which together say where an epoch goes "
            "on: give it both"
        )
    if source.is_iterable and _is_read_once(dataset):
        raise TypeError(
            f"{accepted}, got the {kind}, which can be read once: wrap it in an IterableDataset whose "
            "__iter__ begins anew each time"
        )
    if source.is_iterable and source.num_workers:
        raise ValueError(
            f"{name} is an IterableDataset, which each rank reads itself: leave num_workers = "
            f"{source.num_workers} out"
        )
    if not source.is_iterable and not len(dataset):
        raise ValueError(f"{name} must hold at least one sample, got none")


def _index(given: Any) -> int:
    """Return a sampler's item as an index."""
    try:
        return index(given)
    except TypeError:
        raise UserError(
            f"a sampler must give indices of samples, integers, got {shown(given)}: what else a sample "
            "depends on is for the data set to draw"
        ) from None


def _is_read_once(dataset: Any) -> bool:
    with preserved_state(CPU, python_too=True):
        return begun(dataset, epoch=0) is begun(dataset, epoch=0)


def _order(length: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    if not shuffle:
        return list(range(length))
    generator = torch.Generator().manual_seed(random_key(seed, epoch, 0, 0))
    order: list[int] = torch.randperm(length, generator=generator).tolist()
    return order
