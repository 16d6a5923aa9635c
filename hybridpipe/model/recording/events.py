"""Events: the data of a record, which is a straight list of calls between which numbered tensors flow.

Knows torch, and no model: modules, parameters and buffers are named, never held.
Invariant: an event says everything that is needed to make its call again.
"""

import hashlib
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpipe.errors import UserError
from hybridpipe.model.attributes import PLAIN
from hybridpipe.model.tensors import raw_bytes
from hybridpipe.torch_private import pytree

AUTOCAST_DEVICES = ("cpu", "cuda")
PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_PACKAGES = (os.path.dirname(__file__), os.path.dirname(torch.__file__))
_NOT_THE_USERS = (*(package + os.sep for package in _PACKAGES), "/contextlib.py", "/functools.py")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Unsplittable(UserError):
    """A forward cannot be run in slices; one line with the line of the user's code and a hint."""


class LossReadsForward(Unsplittable):
    """A loss reads what the forward leaves in the model, which no copy of the model has."""


class SetsWeights(Unsplittable):
    """A forward gives a parameter or buffer other memory."""


class CallsBackward(Unsplittable):
    """A forward adds to gradients by itself."""


class Diverged(Exception):
    """A guard does not hold: the inputs take another path than the record's."""


class Value(int):
    """The number of a tensor that flows between events."""


class Weight(str):
    """A parameter or buffer, by its first name in the model."""


class Submodule(str):
    """A module as an argument of a call, by its path in the model."""


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that the forward finds ready: the same object in every call."""

    tensor: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and other.tensor is self.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


class Ambient(NamedTuple):
    """The contexts of the user's around a call.

    Attributes:
        grad: False under `no_grad`.
        autocast: of each device type: the type, whether autocast is enabled, its dtype.
        cached: autocast keeps converted weights.
        checkpointed: number of the non-reentrant checkpoint region, from 1; 0 outside.
    """

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cached: bool
    checkpointed: int = 0

    @classmethod
    def now(cls, checkpointed: int = 0) -> "Ambient":
        """Return the contexts around the caller."""
        casts = tuple(
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in AUTOCAST_DEVICES
        )
        return cls(torch.is_grad_enabled(), casts, torch.is_autocast_cache_enabled(), checkpointed)

    @contextmanager
    def entered(self, base: "Ambient") -> Iterator[None]:
        """Run the body in these contexts as far as they differ from those around the whole forward."""
        with ExitStack() as stack:
            if self.grad != base.grad:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            for (device, enabled, dtype), outside in zip(self.autocast, base.autocast, strict=True):
                if (device, enabled, dtype) != outside:
                    cast = torch.autocast(device, dtype, enabled=enabled, cache_enabled=self.cached)
                    stack.enter_context(cast)
            yield


@dataclass
class ValueInfo:
    """Facts about a value.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor.
        storage: number that values have in common which share memory.
        maker: index of the event that makes it; -1: an input of the model.
        gradient_from: first event behind which it requires a gradient; None: never.
    """

    shape: torch.Size
    dtype: torch.dtype
    storage: int
    maker: int
    gradient_from: int | None = None

    @property
    def requires_grad(self) -> bool:
        """True if it gets a gradient in training."""
        return self.gradient_from is not None

    @property
    def bytes(self) -> int:
        """Size in bytes, sent as contiguous numbers."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass
class Event:
    """A call of a leaf module, or of a torch function between leaf modules (glue).

    Attributes:
        name: the leaf module's path, or the function's name.
        function: the torch function; None: a leaf module.
        spec: tree of `(args, kwargs)`, whose leaves are `arguments`.
        ambient: contexts around the call.
        where: line of the user's forward, such as "model.py:123".
        call: number of this call among those of the name, from 0.
        arguments: each a Value, Weight, Submodule, Constant or plain Python.
        results: for each leaf of the result its new Value; None: an old tensor, or no tensor.
        facts: of each leaf of the result, what Python may learn from it: a shape or a number.
        draws: draws random numbers from torch's generators.
        draws_python: draws from Python's `random` or NumPy's legacy generator.
        checked: its facts follow from data; a guard if it is free.
        free: glue that follows from the inputs alone, so that every stage may compute it.
        changes: values and weights that it writes to.
        weights: parameters and buffers that it uses.
        view: its results are views of this value.
    """

    name: str
    function: Callable[..., Any] | None
    spec: pytree.TreeSpec
    ambient: Ambient
    where: str
    call: int
    arguments: list[Any] = field(default_factory=list)
    results: list[Value | None] = field(default_factory=list)
    facts: list[Any] = field(default_factory=list)
    draws: bool = False
    draws_python: bool = False
    checked: bool = False
    free: bool = False
    changes: set[Value | Weight] = field(default_factory=set)
    weights: set[Weight] = field(default_factory=set)
    view: Value | None = None

    @property
    def is_module(self) -> bool:
        """True for the call of a leaf module."""
        return self.function is None

    @cached_property
    def key(self) -> int:
        """Key of its random numbers, 32 bits: of the n-th call of its name."""
        return zlib.crc32(f"{self.name} {self.call}".encode())

    @property
    def label(self) -> str:
        """Name with the number of the call: "block", "block#2"."""
        return self.name if self.call == 0 else f"{self.name}#{self.call + 1}"

    @property
    def uses(self) -> list[Value]:
        """Values among the arguments."""
        return [argument for argument in self.arguments if argument.__class__ is Value]

    def made(self) -> list[Value]:
        """Return the new values."""
        return [value for value in self.results if value is not None]

    def signature(self, describe: Callable[[Any], Any]) -> tuple[Any, ...]:
        """Return everything that must be equal in two records, with `describe` applied to each argument."""
        return (
            self.label,
            [describe(argument) for argument in self.arguments],
            str(self.spec),
            self.ambient,
            self.results,
            [] if self.is_module else self.facts,
            sorted(map(str, self.changes)),
        )


def identity(leaf: Any) -> Any:
    """Describe an argument for a comparison in one process: constants are equal if they are one object."""
    return leaf if isinstance(leaf, Constant) else content(leaf)


def content(leaf: Any) -> Any:
    """Describe an argument for a comparison of processes: constants are equal if their numbers are."""
    if isinstance(leaf, Constant):
        return tuple(leaf.tensor.shape), str(leaf.tensor.dtype), zlib.crc32(raw_bytes(leaf.tensor))
    if isinstance(leaf, (*PLAIN, *PLAIN_OF_TORCH)):
        return leaf.__class__.__name__, repr(leaf)
    if hasattr(leaf, "tobytes"):
        return fact(leaf)
    return getattr(leaf, "__qualname__", None) or type(leaf).__qualname__


def fact(leaf: Any) -> Any:
    """Return what Python may learn from a result: a tensor's shape, an array's numbers, the rest."""
    return (*leaf.shape, leaf.tobytes()) if hasattr(leaf, "tobytes") else getattr(leaf, "shape", leaf)


def digest(parts: Sequence[Any]) -> int:
    """Return a hash of 63 bits that is the same in every process, without memory addresses."""
    text = _ADDRESS.sub("", repr(parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def line_of_forward() -> str:
    """Return the innermost line outside torch and this package: "model.py:123"."""
    return _innermost(walk_stack(sys._getframe(1)))


def line_of(error: Exception) -> str:
    """Return the innermost line outside torch and this package at which an exception was raised."""
    return _innermost(reversed([*walk_tb(error.__traceback__)]))


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> str:
    for frame, line in frames:
        path = frame.f_code.co_filename
        if not any(part in path for part in _NOT_THE_USERS):
            return f"{os.path.basename(path)}:{line}"
    return "?"


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return `(args, kwargs)` of a call: a dict by keyword, a tuple or list by position, the rest alone."""
    if isinstance(inputs, dict):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}
