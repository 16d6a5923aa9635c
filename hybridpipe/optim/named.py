"""Named parameters: factories of optimizers that ask for the names of their parameters.

Knows torch optimizers only. Invariant: what is made does not keep the names.
"""

import inspect
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hybridpipe.types import OptimizerFactory

STANDS_FOR = "stands_for"  # attribute of a parameter that has the name of another one: that one


def with_names(factory: OptimizerFactory, names: Mapping[Tensor, str]) -> OptimizerFactory:
    """Return a factory that is called with parameters, of one that may ask for `named_parameters`.

    As torch's optimizers do, such a one takes pairs (name, parameter). The names that they keep are dropped:
    a stage's groups would differ from another plan's by them alone.
    """
    try:
        asks = "named_parameters" in inspect.signature(factory).parameters
    except ValueError:  # some built-in callables have no signature
        asks = False
    if not asks:
        return factory

    def named(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        optimizer = factory([(names[getattr(p, STANDS_FOR, p)], p) for p in parameters])
        for group in optimizer.param_groups:
            group.pop("param_names", None)
        return optimizer

    return named
