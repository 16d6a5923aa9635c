"""Fused: runs torch's fused CPU kernels for an optimizer whose `foreach` and `fused` the user left at None.

Knows torch optimizers; no stages and no schedule.
Invariant: groups and options are the user's again after the step. A parameter's own tensors decide the form
of its step, so that all stages that hold it round alike.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hybridpipe.optim.named import with_parameters
from hybridpipe.stage.state import NAMES

# The plain and the fused form of these share one state. A subclass is left out: its `step` may do anything.
FUSIBLE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
FLAGS = ("nesterov", "maximize", "amsgrad")  # the kernels take bool only, the plain loop any truth value
DTYPES = (torch.float32, torch.float64)  # in half precision the plain loop rounds after each operation


@contextmanager
def fused(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Run the step inside this context with fused kernels, for each parameter that allows it.

    Torch chooses a fast form by itself on a GPU; on a CPU it runs the plain loop, each operation of which
    reads and writes all parameters. A fused step reads and writes them once. It has the same formula with
    another rounding, so the last bits of a float32 may differ.
    """
    if type(optimizer) not in FUSIBLE:
        yield
        return
    groups = optimizer.param_groups
    changed: list[Tensor] = []

    def choose(*_: object) -> None:
        optimizer.param_groups = [part for group in groups for part in _parts(group, optimizer)]
        for part in optimizer.param_groups:
            if part["fused"]:
                # Collected now, since a hook behind the step may drop the gradients.
                changed.extend(p for p in part["params"] if p.grad is not None)

    hook = optimizer.register_step_pre_hook(choose)  # runs after the user's, which may change gradients
    try:
        yield
    finally:
        hook.remove()
        optimizer.param_groups = groups
        # The kernels do not raise the version counter by which autograd detects an outdated graph.
        for parameter in changed:
            torch.autograd.graph.increment_version(parameter)


def _parts(group: dict[str, Any], optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return a group as parts, each with the parameters that one call of a kernel may take together."""
    if not _is_left_open(group, optimizer.defaults):
        return [group]
    parts: dict[object, list[Tensor]] = {}
    for p in group["params"]:
        if p.grad is not None:
            state = optimizer.state.get(p, {})
            # SGD has a first step for all parameters or for none (torch 2.13, `_fused_sgd`).
            parts.setdefault(frozenset(state) if _suits(p, p.grad, state) else None, []).append(p)
    return [
        {**_with(group, parameters), "fused": None if form is None else True}
        for form, parameters in parts.items()
    ] or [group]


def _with(group: dict[str, Any], parameters: list[Tensor]) -> dict[str, Any]:
    """Return a group with some of its parameters; few groups have names to keep in order."""
    return with_parameters(group, parameters) if NAMES in group else {**group, "params": parameters}


def _is_left_open(group: Mapping[str, Any], names: Iterable[str]) -> bool:
    asked_for = group["fused"] is not None or group["foreach"] is not None
    other = group["differentiable"] or group.get("capturable")
    flags = all(type(group.get(flag, False)) is bool for flag in FLAGS)
    return flags and not asked_for and not other and all(_is_plain(group[name]) for name in names)


def _is_plain(option: object) -> bool:
    """Return True for a number or a tuple of them; the kernels refuse tensors or compute differently."""
    if isinstance(option, tuple | list):
        return all(map(_is_plain, option))
    return option is None or isinstance(option, int | float)


def _suits(parameter: Tensor, gradient: Tensor, state: Mapping[str, Any]) -> bool:
    """Return True if all tensors are contiguous on the CPU and of one dtype, as the kernels require."""
    own = [each for each in state.values() if isinstance(each, Tensor) and each.shape == parameter.shape]
    return parameter.dtype in DTYPES and all(
        type(each) in (Tensor, nn.Parameter)
        and each.device.type == "cpu"
        and each.layout == torch.strided
        and each.dtype == parameter.dtype
        and each.is_contiguous()
        for each in (parameter, gradient, *own)
    )
