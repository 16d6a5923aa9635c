"""Surroundings: what forwards can reach is brought back, and nothing else is touched."""

import functools
from collections import Counter, OrderedDict, deque
from functools import partial

import torch
from torch import nn

from hybridpipe.model.recording.surroundings import Surroundings

counted = Counter(calls=2)
TENSOR = torch.ones(1)
named = "before"


class Slotted:
    __slots__ = ("__dict__", "__private", "value")

    def __init__(self) -> None:
        self.value, self.more = [1], {"a": deque([1])}
        self.__private = 1

    def hide(self, tensor):
        self.__private = tensor

    def hidden(self):
        return self.__private


class Namespace:
    made = None


@functools.lru_cache
def table(n):
    return torch.ones(n)


def made_closure():
    hidden = 1

    def read():
        return hidden

    def write():
        nonlocal hidden
        hidden = TENSOR

    return read, write


class Reaches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.held = nn.Linear(2, 2), Slotted()
        self.hooks_of, self.order = {1, 2}, OrderedDict(b=1, a=2)
        self.read, self.write = made_closure()
        self.partial = partial(list.append, [3])

    @property
    def deeper(self):
        global named
        named = TENSOR
        counted["tensor"] = TENSOR
        Namespace.made, Namespace.new = table(3), 1

    def forward(self):
        self.deeper  # noqa: B018
        self.held.value.append(TENSOR)
        self.held.more["a"].append(TENSOR)
        self.held.more["b"] = TENSOR
        self.held.value = [TENSOR]
        self.held.hide(TENSOR)
        self.hooks_of.clear()
        self.order.popitem()
        self.write()
        self.partial(TENSOR)
        self.linear.register_forward_hook(print)
        del self.linear.bias
        self.fresh = 1


def test_everything_that_a_forward_reaches_is_brought_back():
    model = Reaches()
    bias, value = model.linear.bias, model.held.value
    before = Surroundings([model])
    model()
    assert table.cache_info().currsize == 1
    before.restore()
    assert (
        named == "before" and counted == {"calls": 2} and vars(Namespace).get("new", Namespace.made) is None
    )
    assert table.cache_info().currsize == 0 and model.read() == 1 and model.held.hidden() == 1
    assert model.held.value is value and value == [1] and model.held.more == {"a": deque([1])}
    assert model.hooks_of == {1, 2} and [*model.order] == ["b", "a"] and model.partial.args == ([3],)
    assert model.linear.bias is bias and not model.linear._forward_hooks and not hasattr(model, "fresh")


def test_numbers_are_left_in_what_modules_share():
    """Another module may read one in every run."""
    model = nn.Linear(2, 2)
    model.shared = Slotted()
    before = Surroundings([model])
    model.shared.width, model.shared.value = 3, 4
    before.restore()
    assert model.shared.width == 3 and model.shared.value == 4
    model.shared.value = (TENSOR,)
    before.restore()
    assert model.shared.value == [1]


def test_what_has_not_changed_is_not_touched():
    class Watched(dict):
        def clear(self):
            raise AssertionError

    model = nn.Linear(2, 2)
    model.kept = Watched(a=1)
    Surroundings([model]).restore()


def test_a_cache_that_has_not_grown_keeps_its_results():
    """Sizes were compared by identity, which Python keeps for small numbers only."""
    model = nn.Linear(2, 2)
    model.squared = functools.lru_cache(maxsize=None)(lambda n: n * n)
    for n in range(1000):
        model.squared(n)
    Surroundings([model]).restore()
    assert model.squared.cache_info().currsize == 1000


def test_objects_of_python_and_of_packages_are_not_looked_through():
    """A lock cannot be copied, and a data set may be large."""
    import logging
    import threading

    model = nn.Linear(2, 2)
    model.lock, model.logger, model.package = threading.Lock(), logging.getLogger("any"), torch
    before = Surroundings([model])
    held = [each for each, _ in before._kept]
    assert model.lock not in held and model.logger.__dict__ not in held


def makes_a_global():
    global made_late
    made_late = torch.ones(2)


def test_a_global_that_a_forward_makes_is_gone_afterwards():
    """Its name was not there before, and a KeyError left it and the rest as they were."""
    found = Surroundings([makes_a_global])
    makes_a_global()
    found.restore()
    assert "made_late" not in globals()
