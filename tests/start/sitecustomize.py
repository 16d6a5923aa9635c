"""A light `torch._dynamo` for tests, until more of the real one is wanted. Python runs this at its start.

Knows the two functions that eager optimizers call. Invariant: any other name first turns the module into the
real one. That takes over a second of a process's first update, and tests start hundreds of processes.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


class Light(ModuleType):
    """Stands in for torch._dynamo where nothing is compiled."""

    def graph_break(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no graph."""

    def disable(self, function: Any = None, recursive: bool = True, **kwargs: Any) -> Any:
        """Return the function as it is: it would not be compiled."""
        return (lambda given: given) if function is None else function

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":  # which Python asks of all modules
            raise AttributeError(name)
        self.load()
        return getattr(self, name)

    def load(self) -> None:
        """Become the real module."""
        self.__class__ = ModuleType
        spec = PathFinder.find_spec(NAME, sys.modules["torch"].__path__)
        self.__spec__, self.__loader__, self.__package__ = spec, spec.loader, NAME
        self.__path__, self.__file__ = spec.submodule_search_locations, spec.origin
        spec.loader.exec_module(self)


class LightDynamoFinder(MetaPathFinder, Loader):
    """Finds the light module, which becomes the real one before a part of that is found."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return where a module comes from; None leaves it to others."""
        if fullname == NAME:
            return ModuleSpec(NAME, self, is_package=True)
        if not fullname.startswith(f"{NAME}.") or not isinstance(sys.modules[NAME], Light):
            return None
        sys.modules[NAME].load()
        return ModuleSpec(fullname, self) if fullname in sys.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return Light(NAME) if spec.name == NAME else sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is complete."""


def install() -> None:
    """Put the light module before others, once."""
    if NAME not in sys.modules and not any(
        type(each).__name__ == LightDynamoFinder.__name__ for each in sys.meta_path
    ):
        sys.meta_path.insert(0, LightDynamoFinder())


install()
if __name__ == "sitecustomize":  # not where a test imports it
    import forked

    forked.begin()
