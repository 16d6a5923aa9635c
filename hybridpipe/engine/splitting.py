"""Splitting: gives a rank its part of its stages' layers, and lets their modules exchange what they need.

Knows a plan, the model and exchanges; no schedule. Invariant: it is done before anything else looks at the
parameters, so that optimizer, buckets and stages see a rank's own parts only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from hybridpipe.model.deferred_init.deferred import Numbers
from hybridpipe.model.experts import Experts, hold_parts, split_by
from hybridpipe.model.held_part import HeldPart, axis_of
from hybridpipe.model.holding import hold
from hybridpipe.model.tensor_plan import SplitModule, parts_by
from hybridpipe.optim.shares import ReplicaShares
from hybridpipe.planning.plan import Place, Plan
from hybridpipe.stage.experts import Exchange, SplitExperts
from hybridpipe.stage.stage import Stage
from hybridpipe.stage.tensor_split import Sums, TensorSplit


class Splittable(NamedTuple):
    """The modules of a model that a plan may split over ranks.

    Args:
        experts: along the replicas of a stage.
        tensors: along the shards of a replica.
    """

    experts: Sequence[Experts] = ()
    tensors: Sequence[SplitModule] = ()

    def parts(
        self, model: nn.Module, plan: Plan, holders: Mapping[str, tuple[int, ...]]
    ) -> dict[str, HeldPart]:
        """Return the first part of each parameter that ranks have in parts, by its key.

        Args:
            holders: the stages that hold each tensor, by its key.

        Raises:
            ValueError: a stage has nothing to split, or its ranks do not divide it.
        """
        of_experts = {
            key: HeldPart(model.get_parameter(key).shape, "replica", 0, plan.replicas[s])
            for key, s in split_by(plan, self.experts, holders).items()
        }
        return of_experts | parts_by(model, plan, self.tensors, holders)


NOTHING_TO_SPLIT = Splittable()


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
    hold_parts(model, experts, place.replica, plan.replicas[place.stage], numbers)
    for each in experts:
        module = model.get_submodule(each.path)
        module.forward = SplitExperts(each.path, module, each.num_experts, exchange)


def split_tensors(
    model: nn.Module,
    modules: Sequence[SplitModule],
    parts: Mapping[str, HeldPart],
    sums: Sums,
    numbers: Numbers | None,
) -> TensorSplit:
    """Leave this rank's part of weights in the model, and let it sum what they make with the other shards.

    Args:
        modules: those of the rank's stages.
        parts: the first part of each of their parameters, by key.
        numbers: of parameters on the meta device.
    """
    mine = {key: replace(part, index=sums.index) for key, part in parts.items()}
    hold(model, mine, numbers)
    return TensorSplit(model, modules, sums)


def whole_gradients(stages: Sequence[Stage], shares: ReplicaShares | None) -> dict[str, Tensor | None]:
    """Return the gradients of parameters that are whole, as far as a rank updates them, by key.

    Args:
        shares: what each of the stage's replicas updates; None: everything.
    """
    held = (each for stage in stages for each in stage.layers.parameters().items())
    whole = {key: p for p, key in held if p.requires_grad and axis_of(p) is None}
    parts = {p: p for p in whole.values()} if shares is None else shares.parts
    return {key: parts[p].grad for key, p in whole.items() if p in parts}
