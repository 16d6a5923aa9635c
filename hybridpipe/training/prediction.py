"""Prediction: the model's outputs for a data set, in its order, on rank 0.

Not known here: losses and metrics. Invariant: outputs are those that an evaluation sees.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hybridpipe.data.stream import Minibatch
from hybridpipe.engine.worker import Worker
from hybridpipe.errors import UserError
from hybridpipe.health import failure
from hybridpipe.model.tensors import Tree, map_tensors


def predict(worker: Worker, batches: Iterable[Minibatch]) -> Tree | None:
    """Return the outputs for all minibatches on rank 0, None elsewhere. Collective.

    It is called inside `worker.evaluating()`.

    Raises:
        UserError: outputs of microbatches differ in shape beyond the samples; it ends the job.
    """
    worker.average_statistics()
    last, parts = worker.plan.num_stages - 1, list[Tree]()
    for number, minibatch in enumerate(batches):
        outputs = _Outputs()
        worker.infer(minibatch, outputs, width=0, number=number).wait()
        of_ranks = worker.control.gather(outputs.of_microbatches)
        if of_ranks is not None:
            ahead = list(map(iter, of_ranks))
            parts += [next(ahead[worker.plan.rank_of(last, m)]) for m in range(len(minibatch.sizes))]
    if worker.control.rank:
        return None
    try:
        return joined(parts)
    except UserError as error:  # the other ranks do not see it
        if worker.control.size > 1:
            failure.refuse(error)
        raise


class _Outputs:
    """Keeps the outputs of the microbatches of this rank, in their order, in the host's memory."""

    def __init__(self) -> None:
        self.of_microbatches: list[Tree] = []

    def __call__(self, outputs: Tree, targets: Tree, num_samples: int) -> list[float]:
        """Keep a copy; there are no numbers to add up."""
        self.of_microbatches.append(map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), outputs))
        return []


def joined(parts: Sequence[Tree]) -> Tree:
    """Return trees of microbatches as one, of tensors with all samples; what is no tensor is the first one's.

    Numbers of a microbatch, tensors without dimensions, are stacked.

    Raises:
        UserError: tensors differ in shape beyond the first dimension, or trees in what they hold.
    """
    leaves, specs = zip(*map(pytree.tree_flatten, parts), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise UserError("the model must return for each microbatch what it returns for the first one")
    return pytree.tree_unflatten(list(map(_one, zip(*leaves, strict=True))), specs[0])


def _one(leaves: Sequence[object]) -> object:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if len(tensors) < len(leaves):
        return leaves[0]
    if not tensors[0].dim():
        return torch.stack(tensors)
    shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
    if len(shapes) > 1:
        found = " and ".join(map(str, sorted(shapes)[:2]))
        raise UserError(
            f"outputs of a sample must have one shape in all microbatches, got {found}: pad all samples to "
            "one length in collate_fn"
        )
    return torch.cat(tensors)
