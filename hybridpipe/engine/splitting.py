"""Splitting: gives a rank its part of the experts of its stages, and lets their modules exchange tokens.

Knows a plan, the model and an exchange; no schedule. Invariant: it is done before anything else looks at the
parameters, so that optimizer, buckets and stages see a rank's own parts only.
"""

from collections.abc import Sequence

from torch import nn

from hybridpipe.model.deferred_init.deferred import Numbers
from hybridpipe.model.experts import Experts, hold_part
from hybridpipe.planning.plan import Place, Plan
from hybridpipe.stage.experts import Exchange, SplitExperts


def split_experts(
    model: nn.Module,
    experts: Sequence[Experts],
    plan: Plan,
    place: Place,
    exchange: Exchange,
    numbers: Numbers | None,
) -> None:
    """Leave this rank's part of experts in the model, and let it exchange tokens with the other replicas.

    Args:
        experts: those of the rank's stage.
        numbers: of parameters on the meta device.

    Raises:
        UserError: a module cannot be split (`SplitExperts`).
    """
    for each in experts:
        hold_part(model, each, place.replica, plan.replicas[place.stage], numbers)
        module = model.get_submodule(each.path)
        module.forward = SplitExperts(each.path, module, each.num_experts, exchange)
