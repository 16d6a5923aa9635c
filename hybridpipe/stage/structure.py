"""Structure: the modules and parameters that a worker was built on.

Between two runs users may change modes, hooks and what is trained, which is taken up; the objects themselves
must stay, since optimizers, buckets and stages hold them. Knows one model, no ranks and no plan.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn


class _Part(NamedTuple):
    """A module as it was found."""

    path: str
    module: nn.Module
    children: dict[str, nn.Module | None]
    parameters: dict[str, nn.Parameter | None]
    forms: list[tuple[torch.Size, torch.dtype]]


class Structure:
    """A model as it is now."""

    def __init__(self, model: nn.Module) -> None:
        self._parts = [
            _Part(path, module, dict(module._modules), dict(module._parameters), _forms(module))
            for path, module in model.named_modules()
        ]
        self._parameters = list(model.parameters())

    def check(self) -> None:
        """Raises ValueError, with the first name, if a module or a parameter is another one than it was."""
        for part in self._parts:
            module = part.module
            same = _same(module._modules, part.children) and _same(module._parameters, part.parameters)
            if not same or _forms(module) != part.forms:
                changed = f"layer {part.path}" if part.path else "the model"
                raise ValueError(
                    f"{changed} ({type(module).__name__}) has other children or parameters, or of another "
                    "shape or dtype, than when the trainer was made: make a new Trainer after such changes"
                )

    def settings(self) -> tuple[object, ...]:
        """Everything that users may change between two runs, to be compared with what it was."""
        modes = tuple(
            (module.training, len(module._forward_hooks), len(module._forward_pre_hooks))
            for _, module, *_ in self._parts
        )
        return modes, tuple(parameter.requires_grad for parameter in self._parameters)


def _forms(module: nn.Module) -> list[tuple[torch.Size, torch.dtype]]:
    return [(p.shape, p.dtype) for p in module._parameters.values() if p is not None]


def _same(now: Mapping[str, object], before: Mapping[str, object]) -> bool:
    return now.keys() == before.keys() and all(now[name] is before[name] for name in before)
