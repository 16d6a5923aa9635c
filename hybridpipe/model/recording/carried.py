"""Carried: attributes and globals that a forward changes from call to call, which slices would not change.

Knows modules and lines of the user's code. Invariant: what leaf modules do to attributes while they are
called does not count, since they do it in every run.
"""

from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

from torch import nn

from hybridpipe.model.attributes import Look, attributes, globals_of, own_classes
from hybridpipe.model.recording.events import Unsplittable

Name = tuple[str, str]  # what has it, in words, and an attribute of a module, or a global


class Carried:
    """The attributes of the modules that are opened, during one forward.

    Attributes:
        changed: those that the forward has changed outside leaf modules and not restored, and globals that
            its code names, each with the line before which it did so. Tensors count as all alike.
    """

    def __init__(self, model: nn.Module, leaf_modules: Iterable[nn.Module]) -> None:
        called = {id(part) for module in leaf_modules for part in module.modules()}
        self._opened = {path: each for path, each in model.named_modules() if id(each) not in called}
        self.changed: dict[Name, str] = {}
        self._first = self._last = self._present()
        self._functions = [
            each
            for kind in own_classes(self._opened.values())
            for name, each in vars(kind).items()
            if isinstance(each, FunctionType) and name[:2] != "__"
        ]
        self._first_globals = self._globals()

    def look(self, line: str) -> None:
        """Note what Python has changed since the last event."""
        now = self._present()
        for name in now.keys() | self._last.keys():
            if now.get(name) != self._last.get(name):
                self.changed.setdefault(name, line)
        self._last = now

    def pass_over(self) -> None:
        """Take the attributes as an event has left them."""
        self._last = self._present()

    def end(self) -> None:
        """Note what Python has changed since the last event, and leave out what is as it was at first."""
        self.look("the end of the forward")
        first, last = self._first | self._first_globals, self._last | self._globals()
        self.changed |= dict.fromkeys(self._first_globals, "the end of the forward")
        self.changed = {name: at for name, at in self.changed.items() if first.get(name) != last.get(name)}

    def _present(self) -> dict[Name, Any]:
        return {
            (path or "the model", name): content
            for path, module in self._opened.items()
            for name, content in attributes([module], tensors=False)
        }

    def _globals(self) -> dict[Name, Any]:
        """Return the contents of what the code of the opened modules names."""
        look, found = Look({}, alike=True), {}
        for function in self._functions:
            for name, value in globals_of(function):
                look.begin((function.__module__, name))
                found[function.__module__, name] = look.at(value)
        return found


def refuse_carried(first: Mapping[Name, str], second: Mapping[Name, str]) -> None:
    """Refuse attributes that each of two calls has changed; one that only the first has is made lazily.

    Raises:
        Unsplittable: there are some.
    """
    for (path, name), line in second.items():
        if (path, name) in first:
            what = f"before it the forward changes {name} of {path} in each call"
            remedy = "make it a buffer, or count outside the model"
            raise Unsplittable(f"{line}: {what}, which would happen at the recording only ({remedy})")
