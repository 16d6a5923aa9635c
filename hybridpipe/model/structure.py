"""Structure: finds changes that users make in a model after a worker was built on it.

Knows one model, no ranks and no plan. Users may change modes, hooks and requires_grad between two calls.
Invariant: modules and parameters stay the same objects, since optimizers, buckets and stages hold them.
"""

from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from hybridpipe.model.recording.leaf_modules import HOOKS
from hybridpipe.model.sequential import is_sequential

# The hooks of a model itself, which no stage would call.
_ROOT_HOOKS = {
    "_forward_hooks": "forward hooks",
    "_forward_pre_hooks": "forward pre-hooks",
    "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
    "_state_dict_hooks": "state_dict hooks",
    "_state_dict_pre_hooks": "state_dict hooks",
    "_load_state_dict_pre_hooks": "load_state_dict hooks",
    "_load_state_dict_post_hooks": "load_state_dict hooks",
}


class _Table(NamedTuple):
    """The children or the parameters of a module when the worker was built."""

    path: str
    module: nn.Module
    table: dict[str, Any]  # the module's own; of TorchScript it is no dict
    names: list[str]  # its keys then
    values: list[Any]


class _Form(NamedTuple):
    """A parameter, and its shape and dtype when the worker was built."""

    path: str
    parameter: nn.Parameter
    shape: torch.Size
    dtype: torch.dtype


class Structure:
    """A model's present structure; comparing with it takes 1 µs a parameter."""

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_modules())
        self._modules = [module for _, module in named]
        self._tables = [
            _Table(path, module, table, list(table.keys()), list(table.values()))
            for path, module in named
            for table in (module._modules, module._parameters)
        ]
        self._forms = [_Form(path, p, p.shape, p.dtype) for path, p in model.named_parameters()]

    def check(self) -> None:
        """Check that no module or parameter was replaced, and no parameter has changed shape or dtype.

        Raises:
            ValueError: one was; names the first.
        """
        for path, module, table, names, values in self._tables:
            if list(table.keys()) != names or not all(map(is_, table.values(), values)):
                where = f"layer {path}" if path else "the model"
                raise ValueError(
                    f"{where} ({type(module).__name__}) has other children or parameters {_ANEW}"
                )
        for path, parameter, shape, dtype in self._forms:
            if parameter.dtype is not dtype or parameter.shape != shape:
                raise ValueError(f"{path} of the model has another shape or dtype {_ANEW}")

    def settings(self) -> tuple[object, ...]:
        """Return all that users may change between two runs: modes, numbers of hooks, requires_grad."""
        modes = [(m.training, *(len(getattr(m, table)) for table in HOOKS)) for m in self._modules]
        return modes, [form.parameter.requires_grad for form in self._forms]


_ANEW = "than when the trainer was made: make a new Trainer after such changes"


def check_model_now(model: nn.Module) -> None:
    """Check that a model that is cut has no hooks of its own; call it before each training and evaluation.

    Raises:
        ValueError: it has some.
    """
    for attribute, words in _ROOT_HOOKS.items():
        if getattr(model, attribute) and is_sequential(model):
            raise ValueError(
                f"the model itself must have no hooks, as each rank calls its own layers only, got {words}: "
                "register them on layers, or make it one layer, nn.Sequential(model)"
            )


def check_now(model: nn.Module, method: str) -> None:
    """Check the model and its surroundings before a call of this method.

    Raises:
        ValueError, RuntimeError: as the functions below.
    """
    check_surroundings(method)
    check_model_now(model)
    if method != "evaluate":
        check_trains(model)


def check_surroundings(method: str) -> None:
    """Check that no autocast or no_grad context surrounds a call, which would change the training.

    Args:
        method: the called method's name.

    Raises:
        RuntimeError: such a context is active.
    """
    for device_type in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device_type):
            raise RuntimeError(
                f"{method} must not be called inside torch.autocast({device_type!r}), which keeps the "
                "weights that it has cast once: enter it in the forward of layers"
            )
    if method != "evaluate" and not torch.is_grad_enabled():
        raise RuntimeError(f"{method} must not be called under torch.no_grad() or inference_mode()")


def check_trains(model: nn.Module) -> None:
    """Check that some parameter requires grad.

    Raises:
        ValueError: none does.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("the model has nothing to train: no parameter has requires_grad = True")
