"""Fused: torch's fused kernels for an optimizer on a CPU that leaves open how its step is computed.

On a GPU torch takes a fast form by itself where `foreach` and `fused` are None; on a CPU the plain loop, an
operation at a time, each of which goes through memory. A fused step goes through it once: the same formula,
rounded elsewhere, so that a float32 differs in its last bits.
Invariant: the options of a group are the user's; what is made of them holds during the step only.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Their states do not tell which form they were made by. Not their subclasses, whose `step` may do anything.
FUSIBLE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
DTYPES = (torch.float32, torch.float64)  # in half precision the plain loop rounds after each operation


@contextmanager
def fused(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Around a step: fused where the user left that open and the kernels can."""
    groups = [group for group in optimizer.param_groups if _can_be(optimizer, group)]
    for group in groups:
        group["fused"] = True
    try:
        yield
    finally:
        for group in groups:
            group["fused"] = None


def _can_be(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    if type(optimizer) not in FUSIBLE or not _is_left_open(group):
        return False
    trained = [p for p in group["params"] if p.grad is not None]
    states = [optimizer.state.get(p, {}) for p in trained]
    # SGD has a first step for all parameters or for none (torch 2.13, `_fused_sgd`).
    return len(set(map(bool, states))) <= 1 and all(map(_suits, trained, states))


def _is_left_open(group: Mapping[str, Any]) -> bool:
    asked_for = group["fused"] is not None or group["foreach"] is not None or group["differentiable"]
    return not asked_for and not any(isinstance(option, Tensor) for option in group.values())


def _suits(parameter: Tensor, state: Mapping[str, Any]) -> bool:
    """The kernels take the numbers of all tensors one after the other as they lie in memory."""
    alike = [each for each in state.values() if isinstance(each, Tensor) and each.shape == parameter.shape]
    return parameter.dtype in DTYPES and all(
        each is not None
        and each.device.type == "cpu"
        and each.layout == torch.strided
        and each.dtype == parameter.dtype
        and each.is_contiguous()
        for each in (parameter, parameter.grad, *alike)
    )
