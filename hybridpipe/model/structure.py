"""Structure: the modules and parameters that a worker was built on.

Between two runs users may change modes, hooks and what is trained, which is taken up; the objects themselves
must stay, since optimizers, buckets and stages hold them. Knows one model, no ranks and no plan.
"""

from typing import Any, NamedTuple

import torch
from torch import nn


class _Table(NamedTuple):
    """The children or the parameters of a module, as they were found."""

    path: str
    module: nn.Module
    table: dict[str, Any]  # the module's own
    items: list[tuple[str, Any]]


class _Form(NamedTuple):
    """A parameter, and what it held."""

    path: str
    parameter: nn.Parameter
    shape: torch.Size
    dtype: torch.dtype


class Structure:
    """A model as it is now. Looked at before every minibatch of `train_step`: 1 µs a parameter."""

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_modules())
        self._modules = [module for _, module in named]
        self._tables = [
            _Table(path, module, table, list(table.items()))
            for path, module in named
            for table in (module._modules, module._parameters)
        ]
        self._forms = [_Form(path, p, p.shape, p.dtype) for path, p in model.named_parameters()]

    def check(self) -> None:
        """Raises ValueError, with the first name, if a module or a parameter is another one than it was."""
        for path, module, table, items in self._tables:
            if len(table) != len(items) or any(table.get(name) is not each for name, each in items):
                where = f"layer {path}" if path else "the model"
                raise ValueError(
                    f"{where} ({type(module).__name__}) has other children or parameters {_ANEW}"
                )
        for path, parameter, shape, dtype in self._forms:
            if parameter.dtype is not dtype or parameter.shape != shape:
                raise ValueError(f"{path} of the model has another shape or dtype {_ANEW}")

    def settings(self) -> tuple[object, ...]:
        """Everything that users may change between two runs, to be compared with what it was."""
        modes = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in self._modules]
        return modes, [form.parameter.requires_grad for form in self._forms]


_ANEW = "than when the trainer was made: make a new Trainer after such changes"
