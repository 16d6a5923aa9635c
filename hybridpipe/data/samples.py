"""Samples: checks of data sets, batches of samples, and fingerprints that ranks compare.

Not known here: ranks and schedules. Invariant: the process's random generators are left as they were.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, default_collate

from hybridpipe.model.rng import preserved_state, random_key, seed_generators
from hybridpipe.model.tensors import Tree, named_leaves, raw_bytes

A_SAMPLE = -1  # stands in a random key where a layer has its index
CPU = torch.device("cpu")
NUM_COMPARED = 6  # samples in a fingerprint
DRAWN_ANEW = "drawn anew each time"
_PARTS = ("inputs", "target")


def check_dataset(name: str, dataset: Any) -> None:
    """Check that a data set can be trained on.

    Args:
        name: the caller's name for it, such as "dataset", for the message.

    Raises:
        TypeError: it is not map-style.
        ValueError: it is empty.
    """
    accepted = f"{name} must be a map-style data set, whose samples are pairs (inputs, target)"
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise TypeError(
            f"{accepted}, got a {kind}: pass the data set inside it, {name} = loader.dataset; "
            "minibatch_size, num_workers and fit(shuffle=...) replace the loader's options"
        )
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{accepted}, got the IterableDataset {kind}, whose samples cannot be indexed; "
            "read it into a list first"
        )
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not indexed or isinstance(dataset, str | Mapping):
        raise TypeError(f"{accepted}, with len() and an index from 0, got {kind}")
    if not len(dataset):
        raise ValueError(f"{name} must hold at least one sample, got none")


def drawn(dataset: Any, seed: int, epoch: int, indices: Sequence[int]) -> list[Any]:
    """Load the samples at `indices`, each with random draws that follow from seed, epoch and index alone."""
    samples = []
    with preserved_state(CPU, python_too=True):
        for index in indices:
            seed_generators(random_key(seed, epoch, index, A_SAMPLE), CPU, python_too=True)
            samples.append(dataset[index])
    return samples


def stacked(samples: list[Any], indices: Sequence[int]) -> tuple[Tree, Tree]:
    """Stack samples into the inputs and targets of a microbatch, samples in the first dimension.

    Args:
        indices: of the samples in the data set, for the message.

    Raises:
        ValueError: the samples differ in shape; the message names the first two that do.
    """
    try:
        inputs, targets = default_collate(samples)
    except (RuntimeError, ValueError):
        _check_alike(samples, indices)
        raise
    return _as_tree(inputs), _as_tree(targets)


def fingerprint(name: str, dataset: Any, seed: int) -> dict[str, str]:
    """Return the length of a data set and hashes of a few of its samples, as facts that ranks compare.

    Args:
        name: as for `check_dataset`; the facts are named after it.
        seed: of the training; it chooses the samples.

    Raises:
        TypeError, ValueError: a sample cannot be trained on, or not together with others.
    """
    count = len(dataset)
    generator = torch.Generator().manual_seed(random_key(seed, 0, count, A_SAMPLE))
    some = torch.randint(count, (NUM_COMPARED - 2,), generator=generator).tolist()
    indices = sorted({0, count - 1, *some})
    samples, again = drawn(dataset, seed, 0, indices), drawn(dataset, seed, 0, indices)
    for index, sample in zip(indices, samples, strict=True):
        _check_sample(f"{name}[{index}]", sample)
    _check_alike(samples, indices)
    facts = {f"len({name})": str(count)}
    for index, *both in zip(indices, samples, again, strict=True):
        for part, first, second in zip(_PARTS, *both, strict=True):
            digest = _digest(first)
            facts[f"{part} of {name}[{index}]"] = digest if digest == _digest(second) else DRAWN_ANEW
    return facts


def drawn_anew(facts: Mapping[str, str]) -> set[str]:
    """Return those of "inputs" and "target" that differ each time a sample is loaded, by a fingerprint."""
    return {name.split()[0] for name, text in facts.items() if text == DRAWN_ANEW}


def comparable(facts: Mapping[str, str], anew: Collection[str]) -> dict[str, str]:
    """Return the fingerprint without the hashes of parts in `anew`, of which some may agree by chance."""
    return {name: DRAWN_ANEW if name.split()[0] in anew else text for name, text in facts.items()}


def _check_sample(where: str, sample: Any) -> None:
    pair = f"{where}: a sample must be a pair (inputs, target) of tensors, arrays or numbers, got"
    if isinstance(sample, Mapping):
        raise TypeError(f"{pair} a {type(sample).__name__} with the keys {', '.join(map(str, sample))}")
    if not isinstance(sample, tuple | list):
        raise TypeError(f"{pair} a {type(sample).__name__}")
    if len(sample) != len(_PARTS):
        raise TypeError(f"{pair} {len(sample)} parts; several inputs go into one tuple: ((a, b), target)")
    for key, leaf in _leaves(sample):
        if not isinstance(leaf, Tensor | np.ndarray | np.number | np.bool_ | int | float):
            raise TypeError(f"{pair} {key} of type {type(leaf).__name__}")


def _check_alike(samples: Sequence[Any], indices: Sequence[int]) -> None:
    """Raise ValueError unless the samples can be stacked."""
    first = _shapes(samples[0])
    for index, sample in zip(indices, samples, strict=True):
        shapes = _shapes(sample)
        if shapes.keys() != first.keys():
            odd = min(first.keys() ^ shapes.keys())
            raise ValueError(
                f"samples must have the same parts, got {odd} in one only of samples {indices[0]} and {index}"
            )
        for key, here in first.items():
            if here != shapes[key]:
                raise ValueError(
                    f"samples of a microbatch are stacked and must have one shape, got {key} of shape "
                    f"{here} in sample {indices[0]} and {shapes[key]} in sample {index}; pad them"
                )


def _shapes(sample: Any) -> dict[str, tuple[int, ...]]:
    return {key: tuple(np.shape(leaf)) for key, leaf in _leaves(sample)}


def _leaves(sample: Any) -> Iterator[tuple[str, Any]]:
    return named_leaves(**dict(zip(_PARTS, sample, strict=True)))


def _digest(value: Any) -> str:
    """Return a short hash of types, shapes and bytes."""
    hashed = hashlib.blake2b(digest_size=4)
    for leaf in pytree.tree_leaves(value):
        hashed.update(f"{type(leaf).__name__} {np.shape(leaf)} {getattr(leaf, 'dtype', '')}".encode())
        hashed.update(raw_bytes(leaf) if isinstance(leaf, Tensor) else np.asarray(leaf).tobytes())
    return hashed.hexdigest()


def _as_tree(collated: Tree) -> Tree:
    """Turn a list that `default_collate` makes of a tuple into a tuple."""
    return tuple(collated) if isinstance(collated, list) else collated
