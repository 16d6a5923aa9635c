"""Births: which event has made a tensor, and which others were called with it.

Knows events and tensors, no model.
Invariant: it keeps no tensor alive, and the first event that shows a tensor counts as its maker.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hybridpipe.model.recording.events import Event


class Birth(NamedTuple):
    """The event that made a tensor, and the names of those that made it or were called with it."""

    event: Event
    holders: set[str]


class Births:
    """Births of tensors."""

    def __init__(self) -> None:
        self._births: Any = WeakTensorKeyDictionary()

    def of(self, tensor: Tensor) -> Birth | None:
        """Return a tensor's birth; None: it was there before."""
        found: Birth | None = self._births.get(tensor)
        return found

    def add(self, tensor: Tensor, event: Event) -> None:
        """Note a tensor's birth, unless it has one."""
        if tensor not in self._births:
            self._births[tensor] = Birth(event, {event.name})

    def is_of(self, tensor: Tensor, event: Event) -> bool:
        """Return True if this event, not only one of its name, has made the tensor."""
        birth = self.of(tensor)
        return birth is not None and birth.event is event

    def pass_to(self, tensors: Iterable[Tensor], event: Event) -> None:
        """Note that an event is called with tensors."""
        for birth in filter(None, map(self.of, tensors)):
            birth.holders.add(event.name)

    def include(self, others: "Births") -> None:
        """Take over other births."""
        self._births.update(others._births)
