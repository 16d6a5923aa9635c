"""Named parameters: factories of optimizers that ask for the names of their parameters.

Knows torch optimizers only. Invariant: names that a group keeps are those of its parameters, in their order.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from hybridpipe.stage.state import NAMES
from hybridpipe.types import OptimizerFactory

STANDS_FOR = "stands_for"  # attribute of a parameter that has the name of another one: that one


def with_names(factory: OptimizerFactory, names: Mapping[Tensor, str]) -> OptimizerFactory:
    """Return a factory that is called with parameters, of one that may ask for `named_parameters`.

    As torch's optimizers do, such a one takes pairs (name, parameter).
    """
    try:
        asks = "named_parameters" in inspect.signature(factory).parameters
    except ValueError:  # some built-in callables have no signature
        asks = False
    if not asks:
        return factory

    def named(parameters: Iterable[Tensor]) -> Any:
        return factory([(names[getattr(p, STANDS_FOR, p)], p) for p in parameters])

    return named


def with_parameters(
    group: Mapping[str, Any],
    parameters: Sequence[Tensor],
    now: Mapping[Tensor, Tensor] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return a group of an optimizer with some of its parameters, and their names if it has any.

    Args:
        now: what takes the place of a parameter.
    """
    names = dict(zip(group["params"], group.get(NAMES, ())))
    named = {NAMES: [names[p] for p in parameters]} if names else {}
    return {**group, "params": [now.get(p, p) for p in parameters], **named}
