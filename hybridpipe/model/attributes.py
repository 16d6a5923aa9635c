"""Attributes: what modules keep beside parameters, buffers and children, as texts that can be compared.

Knows modules, nothing of records. Invariant: two lists are equal only if numbers, texts, plain containers and
configuration objects among the attributes are.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, slice, type(None), type(...), type)
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


def _content(value: Any, seen: set[int], tensors: bool, depth: int = 3) -> Any:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return (id(value), value._version) if tensors else Tensor
    if depth == 0 or isinstance(value, nn.Module) or callable(value):
        return type(value)
    if isinstance(value, dict):
        return [(repr(key), _content(each, seen, tensors, depth - 1)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [_content(each, seen, tensors, depth - 1) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if id(value) in seen or not hasattr(value, "__dict__"):
        return type(value)
    seen.add(id(value))
    return [(name, _content(each, seen, tensors, depth - 1)) for name, each in vars(value).items()]
