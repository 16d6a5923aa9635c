"""What counts as a change of a module's attributes."""

import array
import ctypes
import datetime
import enum
import functools
import logging
import multiprocessing
import pathlib
import random
import re
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from hybridpipe.model.attributes import MOST, attributes, unwatched

TABLE = {"rate": 1.0}


class Schedule:
    """A callable object with a number that changes."""

    def __init__(self):
        self.t = 0

    def __call__(self):
        return self.t


class Slotted:
    __slots__ = ("rate",)

    def __init__(self):
        self.rate = 0.1


def module() -> nn.Module:
    made = nn.Linear(2, 2)
    made.schedule, made.slotted = Schedule(), Slotted()
    made.own, made.numpys = random.Random(0), np.random.default_rng(0)
    made.older, made.torchs = np.random.RandomState(0), torch.Generator()
    made.scale, made.sizes, made.names = 1.0, [1, (2, 3)], {"b", "a"}
    made.config = SimpleNamespace(rate=0.1, inner=SimpleNamespace(depth=2))
    made.table, made.function = torch.zeros(2), torch.relu
    made.config.itself = made.config
    return made


CHANGES = {
    "a number": lambda made: setattr(made, "scale", 2.0),
    "an entry of a tuple in a list": lambda made: made.sizes.__setitem__(1, (2, 4)),
    "an element of a set": lambda made: made.names.add("c"),
    "an attribute of an object": lambda made: setattr(made.config, "rate", 0.2),
    "an attribute of an object in it": lambda made: setattr(made.config.inner, "depth", 3),
    "a tensor written to": lambda made: made.table.add_(1),
    "another tensor": lambda made: setattr(made, "table", torch.zeros(2)),
    "an attribute of a callable object": lambda made: setattr(made.schedule, "t", 1),
    "a slot": lambda made: setattr(made.slotted, "rate", 0.2),
    "Python's generator": lambda made: made.own.random(),
    "NumPy's generator": lambda made: made.numpys.random(),
    "NumPy's older generator": lambda made: made.older.rand(),
    "torch's generator": lambda made: torch.rand(1, generator=made.torchs),
    "a new attribute": lambda made: setattr(made, "added", None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(change):
    made = module()
    before = attributes([made])
    assert attributes([made]) == before
    change(made)
    assert attributes([made]) != before


@dataclass(slots=True)
class Rates:
    rate: float = 0.1


class Private:
    __slots__ = ("__rate",)

    def __init__(self, rate):
        self.__rate = rate


class Configured(dict):
    """A dict with attributes of its own."""


class Steady:
    def __init__(self):
        self.rate = 0.1

    def at(self, x):
        return x * self.rate


class Cosine(Steady):
    """The same attributes in another class."""


class Kind(enum.Enum):
    ONE, TWO = 1, 2


Pair = namedtuple("Pair", "a b")


def scaled(scale, x):
    return scale * x


def first(x):
    return x


def second(x):
    return x


def closing_over(scale):
    def apply(x):
        return x * scale["rate"]

    return apply


def raising(x, power=2):
    return x**power


def named(x):
    return x * TABLE["rate"]


def hidden() -> nn.Module:
    made = nn.Module()
    made.scale = 1.0
    return made


def set_bytes(value):
    ctypes.memset(ctypes.addressof(value), 1, ctypes.sizeof(value))


# Each attribute, and how a user changes it: in place, or by the return of another value.
SETTINGS = {
    "a function": (lambda: first, lambda old: second),
    "a function of torch": (lambda: torch.relu, lambda old: torch.tanh),
    "a function of torch in Python": (lambda: nn.functional.relu, lambda old: nn.functional.gelu),
    "a lambda": (lambda: lambda x: x * 2, lambda old: lambda x: x * 3),
    "a function in a dict": (lambda: {"act": first}, lambda old: old.update(act=second)),
    "a function's default": (
        lambda: types.FunctionType(raising.__code__, {}, None, (2,)),
        lambda old: setattr(old, "__defaults__", (3,)),
    ),
    "a function's code": (
        lambda: types.FunctionType(first.__code__, {}),
        lambda old: setattr(old, "__code__", raising.__code__),
    ),
    "a function's attribute": (
        lambda: types.FunctionType(first.__code__, {}),
        lambda old: setattr(old, "rate", 2.0),
    ),
    "what a function closes over": (
        lambda: closing_over({"rate": 1.0}),
        lambda old: old.__closure__[0].cell_contents.update(rate=2.0),
    ),
    "a global that a function names": (
        lambda: types.FunctionType(named.__code__, {"TABLE": {"rate": 1.0}}),
        lambda old: old.__globals__["TABLE"].update(rate=2.0),
    ),
    "a partial": (lambda: functools.partial(scaled, 1.0), lambda old: functools.partial(scaled, 2.0)),
    "a partial's list": (lambda: functools.partial(scaled, [1.0]), lambda old: old.args[0].append(2.0)),
    "a partial's keyword": (
        lambda: functools.partial(scaled, scale=1.0),
        lambda old: old.keywords.update(scale=2.0),
    ),
    "a method's owner": (lambda: Steady().at, lambda old: setattr(old.__self__, "rate", 0.2)),
    "a number of NumPy's": (lambda: np.float32(1), lambda old: np.float32(2)),
    "a number of NumPy's type": (lambda: np.float32(1), lambda old: np.float64(1)),
    "an array": (lambda: np.ones(3), lambda old: old.__imul__(2)),
    "an array's shape": (lambda: np.ones(4), lambda old: old.reshape(2, 2)),
    "an array of objects": (lambda: np.array([{}, None]), lambda old: old[0].update(rate=1.0)),
    "an array of dates": (
        lambda: np.array(["2026-01-01"], "M8[D]"),
        lambda old: old.__setitem__(0, "2026-01-02"),
    ),
    "a deque": (lambda: deque([1.0]), lambda old: old.append(2.0)),
    "a deque's limit": (lambda: deque([1.0]), lambda old: deque([1.0], maxlen=1)),
    "a shared number": (lambda: multiprocessing.Value("d", 1.0), lambda old: setattr(old, "value", 2.0)),
    "a shared array": (lambda: multiprocessing.Array("d", [1.0]), lambda old: old.__setitem__(0, 2.0)),
    "a raw shared number": (
        lambda: multiprocessing.RawValue("d", 1.0),
        lambda old: setattr(old, "value", 2.0),
    ),
    "a number of C's": (lambda: ctypes.c_double(1.0), lambda old: setattr(old, "value", 2.0)),
    "an array of Python's": (lambda: array.array("d", [1.0]), lambda old: old.__setitem__(0, 2.0)),
    "bytes": (lambda: bytearray(b"a"), lambda old: old.extend(b"b")),
    "a named tuple": (lambda: Pair(1, 2), lambda old: old._replace(b=3)),
    "a list for a tuple": (lambda: (1, 2), lambda old: [1, 2]),
    "a default": (lambda: defaultdict(int), lambda old: setattr(old, "default_factory", list)),
    "an order": (lambda: OrderedDict(a=1, b=2), lambda old: old.move_to_end("a")),
    "an attribute of a dict": (Configured, lambda old: setattr(old, "rate", 2.0)),
    "a dataclass with slots": (Rates, lambda old: setattr(old, "rate", 0.2)),
    "a private slot": (lambda: Private(0.1), lambda old: old.__init__(0.2)),
    "an object of another class": (Steady, lambda old: Cosine()),
    "an object deep inside": (
        lambda: [{"a": [SimpleNamespace(b=[1])]}],
        lambda old: old[0]["a"][0].b.append(2),
    ),
    "a class as a table": (lambda: type("Table", (), {"rate": 1.0}), lambda old: setattr(old, "rate", 2.0)),
    "an entry of an enumeration": (lambda: Kind.ONE, lambda old: Kind.TWO),
    "a whole number for a fraction": (lambda: 1, lambda old: 1.0),
    "True for 1": (lambda: 1, lambda old: True),
    "-0.0 for 0.0": (lambda: 0.0, lambda old: -0.0),
    "a decimal": (lambda: Decimal(1), lambda old: Decimal(2)),
    "a fraction": (lambda: Fraction(1, 2), lambda old: Fraction(1, 3)),
    "a path": (lambda: pathlib.Path("a"), lambda old: pathlib.Path("b")),
    "a date": (lambda: datetime.date(2026, 1, 1), lambda old: datetime.date(2026, 1, 2)),
    "a pattern": (lambda: re.compile("a"), lambda old: re.compile("b")),
    "a slice": (lambda: slice(0, 1), lambda old: slice(0, 2)),
    "a range": (lambda: range(2), lambda old: range(3)),
    "a device": (lambda: torch.device("cpu"), lambda old: torch.device("meta")),
    "a dtype": (lambda: torch.float32, lambda old: torch.float64),
    "a size": (lambda: torch.Size([1]), lambda old: torch.Size([2])),
    "a dtype of NumPy's": (lambda: np.dtype("f4"), lambda old: np.dtype("f8")),
    "NumPy's source of random numbers": (lambda: np.random.PCG64(0), lambda old: old.advance(1) and None),
    "what a weak reference names": (
        lambda: weakref.ref(Kept.config),
        lambda old: setattr(Kept.config, "rate", 2.0),
    ),
    "a module of no place": (lambda: [hidden()], lambda old: setattr(old[0], "scale", 2.0)),
    "such a module's mode": (lambda: [hidden()], lambda old: old[0].train(False) and None),
    "an object that cannot be read": (lambda: iter([1]), lambda old: iter([1])),
    "a tensor of inference": (lambda: made_in_inference(), lambda old: made_in_inference()),
}


class Kept:
    config = Steady()


def made_in_inference():
    with torch.inference_mode():
        return torch.ones(1)


@pytest.mark.parametrize("make, change", SETTINGS.values(), ids=SETTINGS)
def test_any_setting_is_watched(make, change):
    """Functions and whatever has no `__dict__` were compared by their types."""
    made = nn.Module()
    made.setting = make()
    before = attributes([made])
    assert attributes([made]) == before
    new = change(made.setting)
    made.setting = made.setting if new is None else new
    assert attributes([made]) != before


def test_a_forward_that_is_patched_a_second_time_counts():
    made = module()
    made.forward = types.MethodType(lambda self, x: x * 2, made)
    before = attributes([made])
    made.forward = types.MethodType(lambda self, x: x * 3, made)
    assert attributes([made]) != before


def test_what_is_made_anew_in_the_same_place_with_the_same_contents_is_no_change():
    def settings(scale):
        return [lambda x: x * scale, functools.partial(scaled, scale), np.ones(3), SimpleNamespace(a=[1])]

    made = nn.Module()
    made.settings = settings(2.0)
    before = attributes([made])
    made.settings = settings(2.0)
    assert attributes([made]) == before
    made.settings = settings(3.0)
    assert attributes([made]) != before


def test_another_object_in_the_memory_of_one_that_died_counts():
    """An identity was a number alone, which the next object gets."""
    made = nn.Module()
    for kind in (lambda: torch.ones(1), lambda: iter(())):
        made.setting = kind()
        for _ in range(20):
            before = attributes([made])
            del made.setting
            made.setting = kind()
            assert attributes([made]) != before


def test_a_tensor_is_not_kept_alive():
    made = nn.Module()
    made.table = torch.ones(1)
    alive, kept = weakref.ref(made.table), attributes([made])
    del made.table
    assert alive() is None and kept


def test_what_cannot_be_watched_is_named():
    made = nn.Sequential(module(), nn.Module())
    assert unwatched(dict(made.named_modules())) == []
    made[1].position, made[1].large = iter([1]), np.zeros(10**6)
    made[1].words, made.count = {str(i): i for i in range(MOST + 1)}, 1
    made[1].lock, made[1].logger, made[1].shared = threading.Lock(), logging.getLogger("x"), made[1].words
    told = ["1.position (list_iterator)", "1.large (ndarray)", "1.words (dict)", "1.shared (dict)"]
    assert unwatched(dict(made.named_modules())) == told
    before = attributes(made.modules())
    made[1].large = np.zeros(10**6)
    assert attributes(made.modules()) != before


def test_a_generator_without_a_state_is_left_alone():
    made = module()
    made.own = random.SystemRandom()
    assert attributes([made]) == attributes([made])


def test_what_tables_and_modes_hold_does_not_count():
    made = module()
    before = attributes([made])
    made.eval(), made.weight.data.zero_(), made.register_buffer("more", torch.ones(1))
    assert attributes([made]) == before


def test_copies_are_equal_without_their_tensors():
    assert attributes([module()]) != attributes([module()])
    assert attributes([module()], tensors=False) == attributes([module()], tensors=False)
