"""Settings: what a model's records depend on beside its inputs: attributes, classes, globals and buffers.

Knows one model and which modules are called whole, nothing of records. Invariant: a change is reported once,
and one that a recording makes itself never is.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from inspect import unwrap
from itertools import compress, islice
from operator import is_
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from hybridpipe.model.attributes import (
    OF_CLASSES,
    OF_TORCH,
    Look,
    globals_of,
    is_atom,
    is_fixed,
    own_classes,
    same,
    same_tensor,
    unwatched,
)


class _Contents(NamedTuple):
    """Contents of a module or a class when it was last looked through.

    Attributes:
        first: number of the first name that counts; those before are torch's or Python's.
        names, values: from there on.
        fixed: names, with the contents of what no one can change.
        others: values that must be looked into each time.
    """

    first: int
    names: list[str]
    values: list[Any]
    fixed: list[Any]
    others: list[Any]


class _Present(NamedTuple):
    """Settings at one time: those of modules that are opened, and of those that are called whole."""

    opened: list[Any]
    whole: list[Any]

    def of(self, is_whole: bool) -> list[Any]:
        return self.whole if is_whole else self.opened


class Settings:
    """The present settings of a model, to be compared with later ones in about 1 us a module.

    A number of an opened module's stands in the record. One of a leaf module's, such as a dropout's `p`,
    decides whether it draws random numbers.

    Args:
        leaf_modules: paths of the modules that are called whole.
        replaced: names of the buffers that the forward itself replaces, which do not count.
    """

    def __init__(self, model: nn.Module, leaf_modules: Collection[str], replaced: Collection[str]) -> None:
        self._model, self._modules = model, list(model.modules())
        owners = (name.rpartition(".") for name in replaced)
        self._replaced = {(id(model.get_submodule(path)), name) for path, _, name in owners}
        whole = {id(part) for path in leaf_modules for part in model.get_submodule(path).modules()}
        self._classes = own_classes(self._modules)
        self._opened = set(own_classes(each for each in self._modules if id(each) not in whole))
        self._known = {id(each): i for i, each in enumerate(self._modules)}
        self._whole = whole | {id(each) for each in self._classes if each not in self._opened}
        self._tables: dict[int, _Contents] = {}
        self._latest = self._present()
        self._may_change = True

    def changed(self) -> bool:
        """Return True if the settings differ from those at the last call."""
        before, self._latest = self._latest, self._present()
        self._may_change |= self._latest != before
        return self._latest != before

    def settle(self) -> None:
        """Let changes by leaf modules, which have just run, not count, such as a count of calls.

        It looks after each run until one has changed nothing, and again after any change.
        """
        if self._may_change:
            now = _Present(self._latest.opened, self._present().whole)
            self._may_change, self._latest = now != self._latest, now

    def unwatched(self) -> list[str]:
        """Return the attributes in which `changed` may miss a change."""
        return unwatched(dict(self._model.named_modules()))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Let changes by the body not count, such as entries in a list that the forward fills."""
        before = self._present()
        yield
        parts = zip(self._latest, before, self._present(), strict=True)
        self._latest = _Present(*(now if old == latest else latest for latest, old, now in parts))

    def _present(self) -> _Present:
        look, found = Look(self._known), _Present([], [])
        for module in self._modules:
            contents = found.of(id(module) in self._whole)
            if not isinstance(module, torch.jit.ScriptModule):
                contents.append(self._held(module, vars(module), (), look))
            for name, buffer in module._buffers.items():
                if buffer is not None and (id(module), name) not in self._replaced:
                    contents.append((name, same_tensor(buffer)))
        for kind in self._classes:
            held = self._held(kind, vars(kind), OF_CLASSES, look)
            found.of(id(kind) in self._whole).append((held, self._of_forward(kind, look)))
        return found

    def _held(self, owner: object, table: Mapping[str, Any], wholes: tuple[type, ...], look: Look) -> Any:
        """Return the contents of a module's or class's table, in which `wholes` are compared by identity."""
        known = self._tables.get(id(owner))
        if known is None or not _is_same(table, known):
            known = self._tables[id(owner)] = _looked_through(table, wholes)
        look.begin(id(owner))
        return known.fixed, [look.at(each) for each in known.others]

    def _of_forward(self, kind: type, look: Look) -> Any:
        """Return what a class's `forward` names: all if it is recorded, otherwise plain globals."""
        forward: Any = vars(kind).get("forward")
        if kind in self._opened:
            return look.at(unwrap(forward)), look.at(forward)
        if not isinstance(forward, FunctionType):
            return None
        return [(name, look.at(each)) for name, each in globals_of(unwrap(forward)) if is_atom(each)]


def _is_same(table: Mapping[str, Any], known: _Contents) -> bool:
    names, values = islice(table, known.first, None), islice(table.values(), known.first, None)
    is_as_long = len(table) == known.first + len(known.names)
    return is_as_long and [*names] == known.names and all(map(is_, values, known.values))


def _looked_through(table: Mapping[str, Any], wholes: tuple[type, ...]) -> _Contents:
    counts = [name not in OF_TORCH and name[:2] != "__" for name in table]
    first = counts.index(True) if any(counts) else len(counts)
    fixed: list[Any] = []
    others: list[Any] = []
    for name, value in compress(table.items(), counts):
        if isinstance(value, wholes):
            fixed.append((name, same(value)))
        elif is_fixed(value):
            fixed.append((name, Look({}).at(value)))
        else:
            fixed.append((name, None))
            others.append(value)
    return _Contents(first, [*table][first:], [*table.values()][first:], fixed, others)
