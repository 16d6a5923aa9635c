"""Fused: torch's fused kernels for an optimizer on a CPU that leaves open how its step is computed.

On a GPU torch takes a fast form by itself where `foreach` and `fused` are None; on a CPU the plain loop, an
operation at a time, each of which goes through memory. A fused step goes through it once: the same formula,
rounded elsewhere, so that a float32 may differ in its last bits.
Invariant: the options of a group are the user's; what is made of them holds during the step only.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Either form of these goes on with the other's state. Not their subclasses, whose `step` may do anything.
FUSIBLE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
FLAGS = ("nesterov", "maximize", "amsgrad")  # which the kernels take as bool only, the plain loop as anything
DTYPES = (torch.float32, torch.float64)  # in half precision the plain loop rounds after each operation


@contextmanager
def fused(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Around a step: fused where the user left that open and the kernels can, group by group."""
    if type(optimizer) not in FUSIBLE:
        yield
        return
    groups: list[dict[str, Any]] = []
    changed: list[Tensor] = []

    def choose(*_: object) -> None:
        groups.extend(each for each in optimizer.param_groups if _can_be(each, optimizer))
        for group in groups:
            group["fused"] = True
            # Now, as a hook behind the step may drop the gradients.
            changed.extend(p for p in group["params"] if p.grad is not None)

    hook = optimizer.register_step_pre_hook(choose)  # runs after the user's, which may change gradients
    try:
        yield
    finally:
        hook.remove()
        for group in groups:
            group["fused"] = None
        # The kernels do not count the change, by which autograd tells that a graph is out of date.
        for parameter in changed:
            torch.autograd.graph.increment_version(parameter)


def _can_be(group: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    trained = [(p, p.grad, optimizer.state.get(p, {})) for p in group["params"] if p.grad is not None]
    # SGD has a first step for all parameters or for none (torch 2.13, `_fused_sgd`).
    alike = len({frozenset(state) for *_, state in trained}) <= 1
    return alike and _is_left_open(group, optimizer.defaults) and all(_suits(*each) for each in trained)


def _is_left_open(group: Mapping[str, Any], names: Iterable[str]) -> bool:
    asked_for = group["fused"] is not None or group["foreach"] is not None
    other = group["differentiable"] or group.get("capturable")
    flags = all(type(group.get(flag, False)) is bool for flag in FLAGS)
    return flags and not asked_for and not other and all(_is_plain(group[name]) for name in names)


def _is_plain(option: object) -> bool:
    """A number or the like: tensors and arrays the kernels refuse, or compute with in another way."""
    if isinstance(option, tuple | list):
        return all(map(_is_plain, option))
    return option is None or isinstance(option, int | float)


def _suits(parameter: Tensor, gradient: Tensor, state: Mapping[str, Any]) -> bool:
    """The kernels take the numbers of all tensors one after the other as they lie in memory."""
    own = [each for each in state.values() if isinstance(each, Tensor) and each.shape == parameter.shape]
    return parameter.dtype in DTYPES and all(
        type(each) in (Tensor, nn.Parameter)
        and each.device.type == "cpu"
        and each.layout == torch.strided
        and each.dtype == parameter.dtype
        and each.is_contiguous()
        for each in (parameter, gradient, *own)
    )
