"""Attributes: what modules keep beside parameters, buffers and children, as texts that can be compared.

Knows modules and their classes, nothing of records. Invariant: two lists are equal only if numbers, texts,
plain containers, configuration objects and the states of random generators among the attributes are.
"""

import random
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, slice, type(None), type(...), type)
_FOREIGN = ("torch", "builtins", "typing")  # packages whose classes users do not change
_OF_TORCH = frozenset(vars(nn.Module()))  # tables of parameters, children and hooks, and the mode


def attributes(modules: Iterable[nn.Module], tensors: bool = True) -> list[tuple[str, Any]]:
    """Return the names and contents of the modules' attributes, in order.

    A container counts with what is plain in it, and an object that is no module with its attributes, once.

    Args:
        tensors: tell one tensor from another, and how often it was written to.
    """
    seen: set[int] = set()
    found = []
    for module in modules:
        for name, value in vars(module).items():
            if name not in _OF_TORCH:
                found.append((name, _content(value, seen, tensors)))
    return found


def own_classes(modules: Iterable[nn.Module]) -> list[type]:
    """Return the modules' classes, and those that they come from, without torch's and Python's."""
    classes = dict.fromkeys(base for module in modules for base in type(module).__mro__)
    return [each for each in classes if each.__module__.partition(".")[0] not in _FOREIGN]


def class_attributes(classes: Iterable[type]) -> list[tuple[str, Any]]:
    """Return what `attributes` returns, of classes, and the plain globals that their `forward` names."""
    found = (pair for kind in classes for pair in _of_class(kind))
    return [(name, _content(value, set(), tensors=True)) for name, value in found]


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield a class's own attributes, and the plain globals that its `forward` names."""
    for name, value in vars(kind).items():
        if not name.startswith("__") and not callable(value):
            yield name, value
    forward = vars(kind).get("forward")
    if isinstance(forward, FunctionType):
        for name in forward.__code__.co_names:
            value = forward.__globals__.get(name)
            if isinstance(value, PLAIN) and not isinstance(value, type):
                yield name, value


def _content(value: Any, seen: set[int], tensors: bool, depth: int = 3) -> Any:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return (id(value), value._version) if tensors else Tensor
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if depth == 0 or isinstance(value, nn.Module | type | FunctionType | MethodType | BuiltinFunctionType):
        return type(value)
    if isinstance(value, dict):
        return [(repr(key), _content(each, seen, tensors, depth - 1)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [_content(each, seen, tensors, depth - 1) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    held = dict(getattr(value, "__dict__", {}))
    held |= {name: getattr(value, name, None) for name in _slots(type(value))}
    if id(value) in seen or not held:
        return type(value)
    seen.add(id(value))
    return [(name, _content(each, seen, tensors, depth - 1)) for name, each in held.items()]


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        yield from (names,) if isinstance(names, str) else names
