"""Surroundings: what a forward can reach and change beside numbers: attributes, objects, containers, globals.

Knows modules, functions and plain Python, no events. Code of installed packages is not looked through.
Invariant: `restore` keeps objects, brings modules' attributes back, and leaves no new tensor anywhere.
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import _lru_cache_wrapper, partial
from itertools import islice
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from hybridpipe.model.attributes import slots
from hybridpipe.model.tensors import tensors_in

ATOMS = (bool, int, float, complex, str, bytes, type(None), Tensor, np.ndarray, ModuleType)
CONTAINERS = (dict, list, set, deque)
MOST = 1000  # items of a container that are looked through
_FOREIGN = {"hybridpipe", "torch", "numpy", *sys.stdlib_module_names} - {"__main__"}


class Surroundings:
    """The present contents of everything that modules' forwards, or functions, can reach.

    Args:
        roots: the modules and functions.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        roots = list(roots)
        self._kept = [(each, _contents(each)) for each in _reached(roots)]
        modules = (each for root in roots if isinstance(root, nn.Module) for each in root.modules())
        held = (each for module in modules for each in (vars(module), *vars(module).values()))
        self._own = {id(each) for each in held if isinstance(each, CONTAINERS)}

    def restore(self) -> None:
        """Bring contents back; what is not a module's own keeps numbers and texts, but no tensor.

        A cache of a function's results that has grown is emptied.
        """
        for each, before in self._kept:
            now = _contents(each)
            kept = id(each) not in self._own and not isinstance(each, _lru_cache_wrapper)
            if _same(now, before) or (kept and not tensors_in(now)):
                continue
            if isinstance(each, CONTAINERS):
                each.clear()
                (each.update if isinstance(each, dict | set) else each.extend)(before)
            elif isinstance(each, _lru_cache_wrapper):
                each.cache_clear()
            else:
                _rename(each, now, before)


def _reached(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield everything that is reached, once."""
    seen: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, ATOMS) or _is_installed(each):
            continue
        seen[id(each)] = each
        yield each
        waiting += _inside(each)


def _inside(each: Any) -> Iterable[Any]:
    """Return what something holds or, of code, names."""
    if isinstance(each, dict):
        return islice(list(each.values()), MOST)
    if isinstance(each, list | tuple | set | frozenset | deque):
        return islice(list(each), MOST)
    if isinstance(each, MethodType):
        return each.__self__, each.__func__
    if isinstance(each, partial):
        return each.func, each.args, each.keywords
    if isinstance(each, property):
        return each.fget, each.fset
    if isinstance(each, _lru_cache_wrapper | staticmethod | classmethod):
        return (each.__wrapped__,)
    held = _contents(each).values()
    if isinstance(each, FunctionType):
        return *held, *(each.__closure__ or ()), *(each.__defaults__ or ())
    if isinstance(each, type):
        return *held, *each.__bases__
    return *held, getattr(each, "__dict__", None), type(each)


def _contents(each: Any) -> Any:
    """Return a copy of what is in a container, a class, a cell or slots, of the globals that code names."""
    if isinstance(each, dict):
        return dict(each)
    if isinstance(each, CONTAINERS):
        return list(each)
    if isinstance(each, _lru_cache_wrapper):
        return [None] * each.cache_info().currsize
    if isinstance(each, type):
        return dict(vars(each))
    if isinstance(each, FunctionType):
        return {name: each.__globals__[name] for name in _names(each.__code__) if name in each.__globals__}
    names = ["cell_contents"] if isinstance(each, CellType) else slots(type(each))
    return {name: getattr(each, name) for name in names if hasattr(each, name)}


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(now[name] is each for name, each in before.items())
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _rename(each: Any, now: dict[str, Any], before: dict[str, Any]) -> None:
    """Bring back what names stand for in a class, a cell or slots, or in a function's module."""
    for name in now.keys() | before.keys():
        if isinstance(each, FunctionType) and name in before:
            each.__globals__[name] = before[name]
        elif isinstance(each, FunctionType):
            each.__globals__.pop(name, None)  # made by the forward
        elif name not in before:
            delattr(each, name)
        elif now.get(name) is not before[name]:
            setattr(each, name, before[name])


def _names(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return {*code.co_names}.union(*map(_names, inner))


def _is_installed(each: Any) -> bool:
    """Return True for code of a package, and for an object of Python's or torch's that is no container."""
    if isinstance(each, nn.Module | CellType | MethodType | partial | property | tuple | frozenset):
        return False
    if isinstance(each, (*CONTAINERS, _lru_cache_wrapper, staticmethod, classmethod)):
        return False
    is_code = isinstance(each, type | FunctionType)
    module = (each if is_code else type(each)).__module__ or ""
    path = getattr(sys.modules.get(module), "__file__", None) or ""
    return module.partition(".")[0] in _FOREIGN or (is_code and "-packages" in path)
