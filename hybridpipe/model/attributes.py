"""Attributes: what modules keep beside parameters, buffers and children, as contents that can be compared.

Knows modules, their classes and what forwards name, nothing of records. Invariant: contents are equal only if
nothing has changed but what `unwatched` names; they keep alive what they know by its identity, but tensors.
"""

import ctypes
import dis
import logging
import operator
import random
import sys
import threading
import weakref
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import lru_cache, partial
from itertools import chain
from multiprocessing.synchronize import SemLock
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, slice, type(None), type(...), type)
MOST = 1000  # entries of an attribute that are compared
MOST_BYTES = 2**16  # of an array
DEEPEST, OF_GLOBALS = 8, 4  # levels of objects in objects, and those below a global

_ATOMS = frozenset({*PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format} - {slice, type})
_BUFFERS = (bytearray, memoryview, array, ctypes.Array, ctypes.Structure, ctypes.Union, ctypes._SimpleCData)
_GETTERS = (operator.attrgetter, operator.itemgetter, operator.methodcaller)
_LOCKS = (type(threading.Lock()), type(threading.RLock()), SemLock)
_LOGGERS = (logging.Logger, logging.LoggerAdapter)
_ONE = (BuiltinFunctionType, MethodDescriptorType, np.ufunc, *_GETTERS, ModuleType, Enum, *_LOCKS, *_LOGGERS)
OF_CLASSES = (FunctionType, property, classmethod, staticmethod, type)
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy"}  # packages whose code users do not change
OF_SCOPE = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME")
OF_TORCH = frozenset(vars(nn.Module()))  # tables of parameters, children and hooks, and the mode

Named = tuple[str, Any]


def attributes(modules: Iterable[nn.Module], tensors: bool = True) -> list[Named]:
    """Return the names and contents of the modules' attributes, in order; each object counts once.

    Args:
        tensors: tell one tensor from another, and how often it was written to; likewise one object without
            contents from another.
    """
    modules = list(modules)
    look = Look({id(each): i for i, each in enumerate(modules)}, alike=not tensors)
    return [(name, look.at(value)) for module in modules for name, value in _own(module)]


def unwatched(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the attributes, of modules by path, in which a change may go unseen, each with its culprit."""
    look, found = Look({id(each): i for i, each in enumerate(modules.values())}), []
    for path, module in modules.items():
        for name, value in _own(module):
            look.missed.clear()
            look.at(value)
            if look.missed:
                found.append(f"{path}.{name} ({look.missed[0]})".lstrip("."))
    return found


def own_classes(modules: Iterable[nn.Module]) -> list[type]:
    """Return the modules' classes, and those that they come from, without torch's and Python's."""
    classes = dict.fromkeys(base for module in modules for base in type(module).__mro__)
    return [each for each in classes if not _is_foreign(each)]


def same_tensor(tensor: Tensor) -> tuple[int, Any]:
    """Return the identity of a tensor, which does not keep it alive."""
    return id(tensor), weakref.ref(tensor)  # a dead reference is equal to itself alone


def same(value: object) -> tuple[int, object]:
    """Return the identity of an object, which keeps it alive, so that no other object gets the number."""
    return id(value), value  # of two numbers that are equal the objects are, and are not asked


def _own(module: nn.Module) -> Iterator[Named]:
    if not isinstance(module, torch.jit.ScriptModule):  # Python cannot read what it has
        yield from (item for item in vars(module).items() if item[0] not in OF_TORCH)


class Look:
    """One look at contents, in which each object counts once.

    Args:
        known: numbers of the objects, by their ids, that are looked at by themselves.
        alike: tensors, modules and objects without contents are alike if their types are.

    Attributes:
        missed: types of objects, met since this was emptied, in which a change may go unseen.
    """

    def __init__(self, known: Mapping[int, int], alike: bool = False) -> None:
        self._seen: dict[int, Any] = dict(known)
        self._alike = alike
        self.missed: list[str] = []
        self.begin(None)

    def begin(self, owner: Any) -> None:
        """Number the objects that follow from 0, as this owner's: another one's growth leaves them alone."""
        self._owner, self._count = owner, 0

    def at(self, value: Any) -> Any:
        """Return the contents of an attribute."""
        self._left = MOST
        return self._content(value, DEEPEST)

    def _content(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return kind, value or repr(value)  # 0, 0.0 and -0.0 are equal, but not the same
        if id(value) in self._seen:
            return self._seen[id(value)]
        if isinstance(value, Tensor | nn.Module) and self._alike:
            return Tensor if isinstance(value, Tensor) else kind
        if isinstance(value, Tensor):
            return *same_tensor(value), None if value.is_inference() else value._version
        if isinstance(value, _ONE) or (isinstance(value, FunctionType | type) and _is_foreign(value)):
            return self._identity(value)
        if (state := _state(value)) is not None:
            return kind, state
        if isinstance(value, FunctionType):
            depth = min(depth, OF_GLOBALS + 1)
        if _size(value) > self._left or not depth:
            return self._missed(value)
        parts = _parts(value, with_globals=depth > OF_GLOBALS)
        if parts is None:
            return (kind, value) if _is_value(kind) else self._missed(value)
        self._left -= len(parts)
        self._seen[id(value)] = self._owner, self._count
        self._count += 1
        contents = [self._content(each, depth - 1) for each in parts]
        return (*same(value), contents) if isinstance(value, type) else (kind, contents)

    def _missed(self, value: Any) -> Any:
        if type(value) is not object:
            self.missed.append(type(value).__name__)
        return self._identity(value)

    def _identity(self, value: Any) -> Any:
        return type(value) if self._alike else same(value)


def is_atom(value: Any) -> bool:
    """Return True for a number, a text and the like."""
    return type(value) in _ATOMS


def is_fixed(value: Any) -> bool:
    """Return True for an object inside which nothing can change that matters."""
    kind = type(value)
    if kind is tuple:
        return all(map(is_fixed, value))
    return kind in _ATOMS or isinstance(value, _ONE) or (kind is FunctionType and _is_foreign(value))


def _is_value(kind: Any) -> bool:
    """Return True for a type whose objects are compared by what they say, such as dates."""
    return kind.__eq__ is not object.__eq__ and kind.__hash__ not in (None, object.__hash__)


def _is_foreign(value: Any) -> bool:
    return (value.__module__ or "").partition(".")[0] in _FOREIGN


def _state(value: Any) -> Any:
    """Return the state of a random generator, or what a number of NumPy's, a path or a small array says."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.BitGenerator):
        return repr(value.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.generic | np.ndarray):
        is_read = not value.dtype.hasobject and value.nbytes <= MOST_BYTES
        return (value.dtype.str, value.shape, value.tobytes()) if is_read else None
    if isinstance(value, _BUFFERS) and (view := memoryview(value)).nbytes <= MOST_BYTES:
        return view.format, view.tobytes()
    return None


# The objects of which one of these types is made, beside those in its `__dict__` and slots.
_PARTS: tuple[tuple[Any, Callable[[Any], list[Any] | None]], ...] = (
    (defaultdict, lambda each: [each.default_factory, *chain(*each.items())]),
    (dict | MappingProxyType, lambda each: [*chain(*each.items())]),
    (list | tuple, list),
    (set | frozenset, lambda each: sorted(each, key=repr)),
    (deque, lambda each: [each.maxlen, *each]),
    (partial, lambda each: [each.func, each.args, each.keywords]),
    (MethodType, lambda each: [each.__func__, each.__self__]),
    (CellType, lambda each: [each.cell_contents] if each != CellType() else []),
    (slice, lambda each: [each.start, each.stop, each.step]),
    (weakref.ref, lambda each: [each()]),
    (type, lambda each: [own for own in _of_class(each) if not isinstance(own, OF_CLASSES)]),
    (nn.Module, lambda each: [each.training, *each.children()]),
    (np.ndarray, lambda each: [each.shape, *each.flat] if each.dtype.hasobject else None),
)


def _parts(value: Any, with_globals: bool) -> list[Any] | None:
    """Return the objects of which an object is made; None if they are unknown."""
    if isinstance(value, FunctionType):
        own = [value.__code__, value.__defaults__, value.__kwdefaults__, *(value.__closure__ or ())]
        named = chain.from_iterable(globals_of(value)) if with_globals else ()
        return [*own, vars(value), *named]
    parts = next((parts(value) for kinds, parts in _PARTS if isinstance(value, kinds)), None)
    fields = [*chain.from_iterable(_fields(value))]
    return fields or None if parts is None else parts + fields


def _fields(value: Any) -> Iterator[Named]:
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict):
        yield from _own(value) if isinstance(value, nn.Module) else held.items()
    yield from ((name, getattr(value, name, None)) for name in slots(type(value)))


def slots(kind: type) -> Iterator[str]:
    """Yield the names under which a class's objects have slots; those of private ones are mangled."""
    for base in kind.__mro__:
        for name, slot in vars(base).items() if "__slots__" in vars(base) else ():
            if isinstance(slot, MemberDescriptorType):
                yield name


def _of_class(kind: type) -> Iterator[Any]:
    return (value for name, value in vars(kind).items() if name[:2] != "__")


def _size(value: Any) -> int:
    """Return the number of entries of a container; 0 for another object."""
    if isinstance(value, np.ndarray):
        return value.size
    return len(value) if isinstance(value, dict | list | tuple | set | frozenset | deque) else 0


def globals_of(function: FunctionType) -> Iterator[Named]:
    """Yield the globals that a function names, and what it names of modules that are the user's."""
    scope = function.__globals__
    of_scope, names = _names(function.__code__)
    for name in of_scope:
        if name in scope:
            value = scope[name]
            yield name, value
            if isinstance(value, ModuleType) and value.__name__.partition(".")[0] not in _FOREIGN:
                yield from ((inner, vars(value)[inner]) for inner in names if inner in vars(value))


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[list[str], list[str]]:
    """Return the globals that code names, and all names, attributes among them."""
    of_scope = [each.argval for each in dis.get_instructions(code) if each.opname in OF_SCOPE]
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    names = chain(code.co_names, *(names for _, names in inner))
    return [*dict.fromkeys(chain(of_scope, *(found for found, _ in inner)))], [*dict.fromkeys(names)]
