"""Samples: microbatches made of samples, and fingerprints of data sets that ranks compare.

Not known here: ranks and schedules. Invariant: the process's random generators are left as they were.
"""

import hashlib
from collections import UserDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from hybridpipe.data.beginning import begun
from hybridpipe.data.source import CPU, Source
from hybridpipe.model.rng import preserved_state, random_key, seed_generators
from hybridpipe.model.tensors import Tree, named_leaves, num_samples, raw_bytes
from hybridpipe.torch_private import pytree
from hybridpipe.types import Collate

A_SAMPLE, A_COLLATION = -1, -2  # stand in a random key where a layer has its index
NUM_COMPARED = 6  # samples in a fingerprint
DRAWN_ANEW = "drawn anew each time"
_PARTS = ("inputs", "target")

Loaded = tuple[Tree, Tree]  # inputs and targets of a microbatch


def load(source: Source, seed: int, epoch: int, indices: Sequence[int]) -> Loaded:
    """Load the samples at `indices` as a microbatch.

    Random draws of a sample follow from seed, epoch and its index alone; those of `collate_fn` from the index
    of the first sample.
    """
    with preserved_state(CPU, python_too=True):
        samples = []
        for index in indices:
            seed_generators(random_key(seed, epoch, index, A_SAMPLE), CPU, python_too=True)
            samples.append(source.dataset[index])
        seed_generators(random_key(seed, epoch, indices[0], A_COLLATION), CPU, python_too=True)
        return collated(samples, indices, source.collate_fn)


def collated(samples: list[Any], indices: Sequence[int], collate_fn: Collate | None) -> Loaded:
    """Make the inputs and targets of a microbatch of samples; a dict is both.

    Args:
        indices: of the samples in the data set, for messages.

    Raises:
        TypeError: a leaf is neither tensor, number nor None.
        ValueError: samples cannot be stacked, or `collate_fn` returns another number of samples.
    """
    if collate_fn is None:
        return _stacked([pair_of(sample) for sample in samples], indices)
    made = pair_of(collate_fn(samples))
    if not isinstance(made, tuple | list) or len(made) != len(_PARTS):
        kind = type(made).__name__
        raise TypeError(
            f"collate_fn must return a pair (inputs, targets), or a dict that is both, got {kind}"
        )
    inputs, targets = made
    held = num_samples(inputs=inputs, targets=targets)
    if held != len(samples):
        raise ValueError(f"collate_fn must return as many samples as it gets, {len(samples)}, got {held}")
    return inputs, targets


def pair_of(sample: Any) -> Any:
    """Return a sample or microbatch as a pair (inputs, targets); a dict is both. Anything else stays."""
    whole = plain(sample)
    return (whole, whole) if isinstance(whole, Mapping) else whole


def plain(tree: Any) -> Any:
    """Return the tree with dicts in place of each UserDict, such as BatchEncoding of transformers."""
    if isinstance(tree, Tensor):  # the usual inputs of a step
        return tree
    return pytree.tree_map_only(UserDict, lambda each: plain(each.data), tree)


def _stacked(samples: list[Any], indices: Sequence[int]) -> Loaded:
    try:
        inputs, targets = default_collate(samples)
    except (RuntimeError, ValueError, KeyError):
        _check_alike(samples, indices)
        raise
    return _as_tree(inputs), _as_tree(targets)


def fingerprint(name: str, source: Source, seed: int) -> dict[str, str]:
    """Return the length of a data set and hashes of a few of its samples, as facts that ranks compare.

    Args:
        name: as for `source_of`; the facts are named after it.
        seed: of the training; it chooses the samples.

    Raises:
        TypeError, ValueError: a sample cannot be trained on, or not together with others.
    """
    first, again = _some(source, seed), _some(source, seed)
    if not first:
        raise ValueError(f"{name} must hold at least one sample, got none")
    if len(first) != len(again):
        raise ValueError(
            f"{name} gives other samples each time it is iterated: let its __iter__ begin anew each time"
        )
    pairs, same = (
        [_checked(f"{name}[{index}]", sample, index, source.collate_fn) for index, sample in drawn.items()]
        for drawn in (first, again)
    )
    if source.collate_fn is None:
        _check_alike(pairs, list(first))
    facts = _facts_of_order(name, source, seed)
    for index, *both in zip(first, pairs, same, strict=True):
        for part, one, other in zip(_PARTS, *both, strict=True):
            digest = _digest(one)
            facts[f"{part} of {name}[{index}]"] = digest if digest == _digest(other) else DRAWN_ANEW
    return facts


def _some(source: Source, seed: int) -> dict[int, Any]:
    """Return a few samples by their indices, with their draws of epoch 0."""
    with preserved_state(CPU, python_too=True):
        if source.is_iterable:
            seed_generators(random_key(seed, 0, 0, A_SAMPLE), CPU, python_too=True)
            return dict(enumerate(islice(begun(source.dataset, epoch=0), NUM_COMPARED)))
        count = len(source.dataset)
        generator = torch.Generator().manual_seed(random_key(seed, 0, count, A_SAMPLE))
        some = torch.randint(count, (NUM_COMPARED - 2,), generator=generator).tolist()
        samples = {}
        for index in sorted({0, count - 1, *some}):
            seed_generators(random_key(seed, 0, index, A_SAMPLE), CPU, python_too=True)
            samples[index] = source.dataset[index]
        return samples


def _facts_of_order(name: str, source: Source, seed: int) -> dict[str, str]:
    """Return the length of the data set and a hash of the order that a sampler gives."""
    if source.is_iterable:
        return {}
    facts = {f"len({name})": str(len(source.dataset))}
    if source.sampler is not None:
        order, again = (source.order(1, seed, 0, shuffle=False) for _ in range(2))
        if order != again:
            raise ValueError(
                f"{name}: its sampler gives another order each time, so ranks would differ and no training "
                "could be resumed: let it draw from torch, random or numpy.random, without a generator"
            )
        facts[f"order of {name}"] = hashlib.blake2b(repr(order).encode(), digest_size=4).hexdigest()
    return facts


def drawn_anew(facts: Mapping[str, str]) -> set[str]:
    """Return those of "inputs" and "target" that differ each time a sample is loaded, by a fingerprint."""
    return {name.split()[0] for name, text in facts.items() if text == DRAWN_ANEW}


def comparable(facts: Mapping[str, str], anew: Collection[str]) -> dict[str, str]:
    """Return the fingerprint without the hashes of parts in `anew`, of which some may agree by chance."""
    return {name: DRAWN_ANEW if name.split()[0] in anew else text for name, text in facts.items()}


def _checked(where: str, sample: Any, index: int, collate_fn: Collate | None) -> Any:
    """Return a sample's inputs and targets, as they are or, with a `collate_fn`, as a microbatch of one."""
    if collate_fn is not None:
        return collated([sample], [index], collate_fn)
    accepted = f"{where}: a sample must be a dict or a pair (inputs, target) of tensors, arrays, numbers, got"
    pair = pair_of(sample)
    if isinstance(pair, Tensor) or (isinstance(pair, tuple | list) and len(pair) == 1):
        raise TypeError(f"{accepted} inputs alone; to predict, any target will do: (inputs, 0)")
    if not isinstance(pair, tuple | list):
        raise TypeError(f"{accepted} a {type(pair).__name__}; or give a collate_fn")
    if len(pair) != len(_PARTS):
        raise TypeError(f"{accepted} {len(pair)} parts; several inputs go into one tuple: ((a, b), target)")
    for key, leaf in _leaves(pair):
        if not isinstance(leaf, Tensor | np.ndarray | np.number | np.bool_ | int | float):
            raise TypeError(f"{accepted} {key} of type {type(leaf).__name__}; or give a collate_fn")
    return pair


def _check_alike(pairs: Sequence[Any], indices: Sequence[int]) -> None:
    """Raise ValueError unless the samples can be stacked."""
    first = _shapes(pairs[0])
    for index, pair in zip(indices, pairs, strict=True):
        shapes = _shapes(pair)
        if shapes.keys() != first.keys():
            odd = min(first.keys() ^ shapes.keys())
            raise ValueError(
                f"samples must have the same parts, got {odd} in one only of samples {indices[0]} and {index}"
            )
        for key, here in first.items():
            if here != shapes[key]:
                raise ValueError(
                    f"samples of a microbatch are stacked and must have one shape, got {key} of shape "
                    f"{here} in sample {indices[0]} and {shapes[key]} in sample {index}; pad them, or give a "
                    "collate_fn that does"
                )


def _shapes(pair: Any) -> dict[str, tuple[int, ...]]:
    return {key: tuple(np.shape(leaf)) for key, leaf in _leaves(pair)}


def _leaves(pair: Any) -> Iterator[tuple[str, Any]]:
    return named_leaves(**dict(zip(_PARTS, pair, strict=True)))


def _digest(value: Any) -> str:
    """Return a short hash of types, shapes and bytes."""
    hashed = hashlib.blake2b(digest_size=4)
    for key, leaf in named_leaves(**{"": value}):
        hashed.update(f"{key}{type(leaf).__name__} {np.shape(leaf)} {getattr(leaf, 'dtype', '')}".encode())
        hashed.update(raw_bytes(leaf) if isinstance(leaf, Tensor) else np.asarray(leaf).tobytes())
    return hashed.hexdigest()


def _as_tree(collated: Tree) -> Tree:
    """Turn a list that `default_collate` makes of a tuple into a tuple."""
    return tuple(collated) if isinstance(collated, list) else collated
