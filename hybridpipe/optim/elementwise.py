"""Elementwise: finds out whether an optimizer updates each element of a parameter by itself.

Knows torch optimizers; no stages and no messages. Invariant: neither the user's optimizer nor a random state
changes: what is tried is another optimizer of the same factory, on tensors of its own.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
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
SHAPE, CUTS, NUM_STEPS = (96, 64), (0, 1232, 4096, 96 * 64), 3  # some work on blocks of 2,048 elements
TOLERANCE = 1e-3  # of an update, in float32; LAMB's differ by half


def why_not_in_parts(
    factory: OptimizerFactory, parameters: Sequence[Tensor], sharded: Collection[Tensor]
) -> str | None:
    """Return why parts of a parameter cannot be updated apart, in a sentence; None if they can.

    An optimizer that is not one of ELEMENTWISE is tried: with the options of each of its groups it updates a
    small matrix whole, and another time in parts.

    Args:
        parameters: what the factory is called with.
        sharded: those of them that are to be updated in parts.
    """
    optimizer = factory(parameters)
    if type(optimizer) in ELEMENTWISE:
        return None
    name, wanted = type(optimizer).__name__, set(sharded)
    for i, group in enumerate(optimizer.param_groups):
        if not any(p in wanted for p in group["params"]):
            continue
        try:
            start, whole = _updated(factory(parameters), i, lambda matrix: [matrix.clone()])
            _, parts = _updated(factory(parameters), i, _cut)
        except Exception as error:  # whatever a user's step raises
            return f"{name} could not be tried on a part of a parameter: {type(error).__name__}: {error}"
        if torch.equal(whole, start) and group.get("lr") != 0:
            return f"{name} could not be tried: it has changed nothing"
        if not torch.allclose(whole - start, parts - start, rtol=TOLERANCE, atol=1e-7):
            return f"{name} updates a part of a parameter otherwise than the whole"
    return None


def _updated(
    optimizer: torch.optim.Optimizer, group: int, divide: Callable[[Tensor], list[Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return the elements of a matrix before and after a few updates of what `divide` makes of it."""
    device = optimizer.param_groups[group]["params"][0].device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        growing = torch.logspace(-1, 1, SHAPE[0], device=device).unsqueeze(1)  # so that norms of parts differ
        start, *gradients = torch.randn(1 + NUM_STEPS, *SHAPE).to(device)
        start = start * growing
        tensors = [nn.Parameter(tensor) for tensor in divide(start)]
        optimizer.param_groups = [{**optimizer.param_groups[group], "params": tensors}]
        optimizer.state = defaultdict[Any, Any](dict)
        for gradient in gradients:
            for tensor, own in zip(tensors, divide(gradient * growing.flip(0)), strict=True):
                tensor.grad = own
            optimizer.step()
    return start.reshape(-1), torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _cut(matrix: Tensor) -> list[Tensor]:
    return [matrix.reshape(-1)[a:b].clone() for a, b in pairwise(CUTS)]
