"""Elementwise: finds out whether an optimizer updates each element of a parameter by itself.

Knows torch optimizers; no stages and no messages. Invariant: neither the user's optimizer nor a random state
changes: what is tried is another optimizer of the same factory, on tensors of its own.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hybridpipe.types import OptimizerFactory

# Those of torch that update an element from its own gradient and state. A subclass may do anything.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)
SHAPES, CUTS, NUM_STEPS = ((96, 64), (24, 16, 4, 4)), (0, 1232, 4096, 96 * 64), 3  # blocks may have 2,048
TOLERANCE = 1e-3  # of an update, in float32; LAMB's differ by half
TRIED_RATE = 0.01  # where the given rate is 0, as before a scheduler's first step


def why_not_in_parts(
    factory: OptimizerFactory, parameters: Sequence[Tensor], sharded: Collection[Tensor]
) -> str | None:
    """Return why parts of a parameter cannot be updated apart, in a sentence; None if they can.

    An optimizer that is not one of ELEMENTWISE is tried: with the options of its groups it updates a matrix
    and a convolution's kernel whole, and as many optimizers as there are parts update one part of each.

    Args:
        parameters: what the factory is called with.
        sharded: those of them that are to be updated in parts.
    """
    optimizer, wanted = factory(parameters), set(sharded)
    groups = [i for i, group in enumerate(optimizer.param_groups) if wanted.intersection(group["params"])]
    if type(optimizer) in ELEMENTWISE or not groups:
        return None
    name, given = type(optimizer).__name__, [optimizer.param_groups[i].get("lr") for i in groups]
    try:
        start, whole = _updated(factory(parameters), groups, None)
        each = [_updated(factory(parameters), groups, slice(*cut))[1] for cut in pairwise(CUTS)]
    except Exception as error:  # whatever a user's step raises
        return f"{name} could not be tried on a part of a parameter: {type(error).__name__}: {error}"
    if torch.equal(whole, start) and any(rate != 0 for rate in given):
        return f"{name} could not be tried: it has changed nothing"
    if not torch.allclose(whole - start, torch.cat(each, 1) - start, rtol=TOLERANCE, atol=1e-7):
        return f"{name} updates a part of a parameter otherwise than the whole"
    return None


def _updated(
    optimizer: torch.optim.Optimizer, groups: Sequence[int], part: slice | None
) -> tuple[Tensor, Tensor]:
    """Return tensors before and after a few updates, with their elements in a row each.

    Args:
        groups: each of these has a tensor of each of SHAPES.
        part: the elements of each that are updated; None: all, in their shape.
    """
    device = optimizer.param_groups[groups[0]]["params"][0].device
    count, size = len(groups) * len(SHAPES), CUTS[-1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        growing = torch.logspace(-1, 1, size)  # so that norms of parts differ
        start, *gradients = torch.randn(1 + NUM_STEPS, count, size)
    start, shapes = (start * growing).to(device), SHAPES * len(groups)

    def divided(rows: Tensor) -> list[Tensor]:
        if part is None:
            return [row.clone().view(shape) for row, shape in zip(rows, shapes, strict=True)]
        return [row[part].clone() for row in rows]

    tensors = [nn.Parameter(tensor) for tensor in divided(start)]
    for group in optimizer.param_groups:
        group["params"] = []
    for i, g in enumerate(groups):
        group = optimizer.param_groups[g]
        group["params"] = tensors[i * len(SHAPES) : (i + 1) * len(SHAPES)]
        if group.get("lr") == 0:
            group["lr"] = TRIED_RATE
    optimizer.state = defaultdict[Any, Any](dict)
    for gradient in gradients:
        for tensor, own in zip(tensors, divided((gradient * growing.flip(0)).to(device)), strict=True):
            tensor.grad = own
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            optimizer.step()
    return start, torch.stack([tensor.detach().reshape(-1) for tensor in tensors])
