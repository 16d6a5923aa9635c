"""Prediction: weights after further updates, each of which moves them as the last one did.

Knows torch optimizers and their state; no stages and no schedule. Invariant: neither parameters nor state are
changed. Sources: SpecTrain (Chen et al. 2018); XPipe (Guan et al. 2019).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpipe.optim.combined import kind_of, members_of

_Direction = Callable[[Mapping[str, Any], Mapping[str, Any]], Tensor | None]


def _momentum(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor | None:
    """Return v, SGD's smoothed gradient, weight decay included; None before its first update."""
    return state.get("momentum_buffer") if group["momentum"] else None


def _adams(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor | None:
    """Return Adam's m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps); None before its first update.

    AdamW's own weight decay is no part of it.
    """
    if "exp_avg" not in state:
        return None
    step = state["step"].double()  # where it lies: reading it would wait for a GPU
    of_first, of_second = (1 - beta**step for beta in group["betas"])
    mean, squares = state["exp_avg"], state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    is_complex = mean.is_complex()
    if is_complex:  # Adam keeps the squares of both parts apart
        mean, squares = torch.view_as_real(mean), torch.view_as_real(squares)
    along: Tensor = mean.div((squares.sqrt() / of_second.sqrt()).add_(group["eps"])).div_(of_first)
    return torch.view_as_complex(along) if is_complex else along


class _Way(NamedTuple):
    """A way to predict.

    Args:
        optimizers: the classes whose state it reads; a subclass may keep another.
        direction: from a parameter's state and group; the optimizer subtracts it times the learning rate.
    """

    optimizers: tuple[type[torch.optim.Optimizer], ...]
    direction: _Direction


WAYS = {
    "spectrain": _Way((torch.optim.SGD,), _momentum),
    "xpipe": _Way((torch.optim.Adam, torch.optim.AdamW), _adams),
}


def why_not_predicted(optimizer: torch.optim.Optimizer | None, prediction: str) -> str | None:
    """Return why weights cannot be predicted from the optimizer's state; None if they can, or need not."""
    kinds = {type(each) for each in members_of(optimizer)}
    if prediction not in WAYS or kinds.issubset(WAYS[prediction].optimizers):
        return None
    assert optimizer is not None
    *others, last = (each.__name__ for each in WAYS[prediction].optimizers)
    fitting = [name for name, way in WAYS.items() if kinds.issubset(way.optimizers)]
    return (
        f"prediction = {prediction!r} reads the state of torch's own {' or '.join([*others, last])}, got "
        f"{kind_of(optimizer)}: set prediction = {(fitting or ['off'])[0]!r}"
    )


def predicted(
    optimizer: torch.optim.Optimizer | None, prediction: str, parameters: Sequence[Tensor], times: float
) -> list[Tensor]:
    """Return the parameters' weights after further updates: w - times * rate * direction.

    A parameter that nothing moves shares its storage with the result.
    """
    if optimizer is None:
        return [p.data for p in parameters]
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    return [_moved(optimizer, WAYS[prediction].direction, p, group_of.get(p), times) for p in parameters]


def _moved(
    optimizer: torch.optim.Optimizer,
    direction: _Direction,
    parameter: Tensor,
    group: Mapping[str, Any] | None,
    times: float,
) -> Tensor:
    along = None if group is None else direction(optimizer.state.get(parameter, {}), group)
    if group is None or along is None:
        return parameter.data
    return parameter.data.add(along, alpha=-times * float(group["lr"]))
