"""Signature: what decides over a layer's time; layers of equal signature are measured once.

Knows modules, nothing of their place in a model. Invariant: no path, no name that the user gave and no number
that training changes is part of it.
"""

from typing import Any

from torch import Tensor, nn


def module_signature(module: nn.Module) -> str:
    """Return the classes, settings, shapes and types of a module and all modules in it.

    A module's own numbers are left out, since they are its place among others or a rate more often than an
    amount of work; `extra_repr` marks those that decide.
    """
    return repr([(path, *_own(part)) for path, part in module.named_modules(remove_duplicate=False)])


def tensor_signature(tensor: Tensor) -> tuple[Any, ...]:
    """Return the shape and the type of a tensor, and if it requires a gradient."""
    return tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad


def _own(module: nn.Module) -> tuple[Any, ...]:
    """Return what a module holds itself."""
    attributes = sorted((name, _setting(value)) for name, value in vars(module).items())
    return type(module).__module__, type(module).__qualname__, module.extra_repr(), attributes


def _setting(value: Any) -> str:
    if isinstance(value, bool | str | tuple | None):
        return repr(value)
    if isinstance(value, Tensor):
        return repr(tensor_signature(value))
    if isinstance(value, dict):  # parameters, buffers and hooks among them; children speak for themselves
        held = [(key, each) for key, each in value.items() if not isinstance(each, nn.Module)]
        return repr([(key if isinstance(key, str) else "", _setting(each)) for key, each in held])
    return getattr(value, "__qualname__", type(value).__qualname__)
