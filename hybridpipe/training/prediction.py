"""Prediction: the model's outputs for a data set, in its order, on rank 0.

Not known here: losses and metrics. Invariant: outputs are those that an evaluation sees; none is left out,
and none is joined with another along anything but the samples.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from hybridpipe.data.stream import Minibatch
from hybridpipe.engine.worker import Worker
from hybridpipe.model.tensors import Tree, map_tensors
from hybridpipe.torch_private import pytree


def predict(
    worker: Worker, batches: Iterable[Minibatch], first_samples: Callable[[int], Minibatch]
) -> Tree | None:
    """Return the outputs for all minibatches on rank 0 (`joined`), None elsewhere. Collective.

    It is called inside `worker.evaluating()`.

    Args:
        first_samples: returns that many of the data set as one microbatch.
    """
    worker.average_statistics()
    parts, sizes = list[Tree](), list[int]()
    for number, minibatch in enumerate(batches):
        parts += _outputs(worker, minibatch, number)
        sizes += minibatch.sizes
    count = len(sizes)
    if worker.control.bcast(worker.control.rank == 0 and is_unclear(parts, sizes)):
        sizes.append(sizes[0] - 1 if sizes[0] > 2 else sizes[0] + 1)  # a larger one may not fit into memory
        parts += _outputs(worker, first_samples(sizes[-1]), number=0)
    return None if worker.control.rank else joined(parts, sizes, count)


def _outputs(worker: Worker, minibatch: Minibatch, number: int) -> list[Tree]:
    """Return the outputs of a minibatch's microbatches on rank 0, none elsewhere. Collective."""
    kept, last = _Outputs(), worker.plan.num_stages - 1
    worker.infer(minibatch, kept, width=0, number=number).wait()
    of_ranks = worker.control.gather(kept.of_microbatches)
    if of_ranks is None:
        return []
    ahead = list(map(iter, of_ranks))
    return [next(ahead[worker.plan.rank_of(last, m)]) for m in range(len(minibatch.sizes))]


class _Outputs:
    """Keeps the outputs of the microbatches of this rank, in their order, in the host's memory."""

    def __init__(self) -> None:
        self.of_microbatches: list[Tree] = []

    def __call__(self, outputs: Tree, targets: Tree, num_samples: int) -> list[float]:
        """Keep a copy; there is nothing to add up."""
        self.of_microbatches.append(map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), outputs))
        return []


def is_unclear(parts: Sequence[Tree], sizes: Sequence[int]) -> bool:
    """Return True if a tensor may have as many rows as each microbatch has samples, by chance.

    Such are a recurrent state of as many layers, whose samples are in another dimension, and a matrix that
    is the same for all samples. A microbatch of another size decides.
    """
    if len(sizes) < 2 or len(set(sizes)) > 1:
        return False
    leaves = zip(*map(pytree.tree_leaves, parts), strict=False)  # trees that differ are not joined
    return any(
        isinstance(first, Tensor)
        and first.shape[:1] == (sizes[0],)
        and (sizes[0] in first.shape[1:] or all(_equal(first, other) for other in others))
        for first, *others in leaves
    )


def joined(parts: Sequence[Tree], sizes: Sequence[int], count: int | None = None) -> Tree:
    """Return the outputs of microbatches as one tree, or as a list of trees where these differ in form.

    A tensor with the samples in its first dimension becomes one tensor, or a list by sample where samples
    differ in shape. Numbers of a microbatch, tensors without dimensions, are stacked. Anything else is a list
    by microbatch, unless it is a plain value that is always the same.

    Args:
        sizes: of the microbatches, in samples.
        count: of the microbatches that are returned; later ones only show which dimension has the samples.
    """
    leaves, specs = zip(*map(pytree.tree_flatten, parts), strict=True)
    if any(spec != specs[0] for spec in specs):
        return list(parts[:count])
    by_leaf = zip(*leaves, strict=True)
    return pytree.tree_unflatten([_one(each, sizes, count) for each in by_leaf], specs[0])


def _one(leaves: Sequence[object], sizes: Sequence[int], count: int | None) -> object:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if len(tensors) < len(leaves):
        same = all(_equal(leaves[0], leaf) for leaf in leaves[:count])
        return leaves[0] if same else list(leaves[:count])
    found = tensors[:count]
    if not any(tensor.dim() for tensor in tensors):
        return torch.stack(found)
    if any(tensor.shape[:1] != (size,) for tensor, size in zip(tensors, sizes, strict=True)):
        return found
    if len({tensor.shape[1:] for tensor in found}) > 1:
        return [sample for tensor in found for sample in tensor]
    return torch.cat(found)


def _equal(one: object, other: object) -> bool:
    """Return True for the same object, equal tensors, and equal plain values."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    is_plain = isinstance(one, bool | int | float | str)
    return one is other or (is_plain and type(one) is type(other) and one == other)
