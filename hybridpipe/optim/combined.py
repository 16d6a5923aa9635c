"""Combined: several optimizers of a factory as one, each with its own parameters, such as Muon and AdamW.

Knows torch optimizers only. Invariant: groups and state are the members' own, so what reads or changes those
of the one (schedulers, checkpoints, shares) reads and changes the members'.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridpipe.optim.fused import fused
from hybridpipe.stage.state import MEMBER, name_of
from hybridpipe.types import OptimizerFactory

NO_PARAMETERS = "empty parameter list"  # torch's words


class CombinedOptimizer(torch.optim.Optimizer):
    """Optimizers that step together.

    Each group has its optimizer's class among its options, which checkpoints keep.

    Raises:
        ValueError: they have no parameters, or a parameter belongs to two of them.
    """

    members: tuple[torch.optim.Optimizer, ...] = ()

    def __init__(self, members: Iterable[torch.optim.Optimizer]) -> None:
        given = tuple(members)
        groups = [group for each in given for group in each.param_groups]
        number = Counter(p for group in groups for p in group["params"])
        if not groups:
            raise ValueError(f"optimizer got an {NO_PARAMETERS}")
        if twice := [tuple(p.shape) for p, count in number.items() if count > 1]:
            raise ValueError(
                f"optimizer must give each parameter to one optimizer, got one of shape {twice[0]} in several"
            )
        first, *others = (each.defaults for each in given)
        super().__init__([*number], {k: v for k, v in first.items() if all(k in each for each in others)})
        self.members = given
        self.param_groups, self.state = groups, defaultdict[Tensor, Any](dict)
        for each in given:
            self.state.update(each.state)
            for group in each.param_groups:
                group[MEMBER] = name_of(each)
        self._share()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Let each optimizer take its step."""
        for each in self.members:
            with fused(each):
                each.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does while an optimizer is made; later none of the members would have it."""
        if self.members:
            raise ValueError("add_param_group: give the parameters to one of the optimizers in the factory")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the groups and the state of all members."""
        super().load_state_dict(state_dict)
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: groups and state, which are the copied members' as well."""
        return {**super().__getstate__(), "members": self.members}

    def _share(self) -> None:
        """Give each member its groups, and the state."""
        groups = iter(self.param_groups)
        for each in self.members:
            each.param_groups, each.state = [next(groups) for _ in each.param_groups], self.state


def made_by(factory: OptimizerFactory, parameters: Sequence[Tensor]) -> torch.optim.Optimizer | None:
    """Return the optimizer that a factory makes; several become one.

    It is None if all parameters are frozen and the factory takes only trained ones.

    Raises:
        ValueError: one of several has no parameters among these.
    """
    try:
        made = factory(parameters)
        return CombinedOptimizer(made) if isinstance(made, Iterable) else made
    except ValueError as error:
        if NO_PARAMETERS not in str(error):
            raise
        if not any(p.requires_grad for p in parameters):
            return None
        raise ValueError(
            f"optimizer: {error}: a stage or a layer may have parameters of one kind only, so make each of "
            "several optimizers where it has some"
        ) from error


def members_of(optimizer: torch.optim.Optimizer | None) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that an optimizer consists of."""
    if isinstance(optimizer, CombinedOptimizer):
        return optimizer.members
    return () if optimizer is None else (optimizer,)


def step_hooks(optimizer: torch.optim.Optimizer | None) -> list[dict[int, Any]]:
    """Return the hooks that run before and after a step, those of members first."""
    each = dict.fromkeys([*members_of(optimizer), *([] if optimizer is None else [optimizer])])
    return [hooks for o in each for hooks in (o._optimizer_step_pre_hooks, o._optimizer_step_post_hooks)]


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer's class for people, or those of its members."""
    return " + ".join(type(each).__name__ for each in members_of(optimizer))
