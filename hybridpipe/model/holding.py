"""Holding: leaves in a model the parts of parameters that a rank holds.

Knows a model and parts by key; not what ranks do with them.
Invariant: a parameter in several places is the same part in all of them, and one at a time is made whole.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from hybridpipe.model.deferred_init.deferred import Numbers
from hybridpipe.model.held_part import HeldPart, part_of
from hybridpipe.model.plan_fit import uses_of


def hold(model: nn.Module, parts: Mapping[str, HeldPart], numbers: Numbers | None) -> None:
    """Let a model hold parts of parameters, wherever it has them.

    Args:
        parts: by key; a parameter in several places is there under each of its keys.
        numbers: of parameters on the meta device; None: their parts stay there.
    """
    for uses in uses_of(model).values():
        key, module = uses[0]
        if key not in parts:
            continue
        parameter: Tensor = module._parameters[key.rpartition(".")[2]]  # type: ignore[assignment]  # none is None
        whole = parameter.detach()
        if whole.is_meta and numbers is not None:
            whole = numbers.of([key])[key]
        made = part_of(parameter, whole, parts[key])
        for other, holder in uses:
            holder._parameters[other.rpartition(".")[2]] = made
