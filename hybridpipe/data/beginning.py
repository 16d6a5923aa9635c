"""Beginning: a data set that is iterated is begun at an epoch and a state, whatever was read of it before.

Not known here: what is read. Invariant: an epoch without a state begins as if nothing had ever been read, so
looking at the first samples changes no training.
"""

import copy
import weakref
from collections.abc import Iterator
from typing import Any

_unread: dict[int, Any] = {}  # the states of data sets before anything was read of them, by id


def begun(dataset: Any, epoch: int, state: Any = None) -> Iterator[Any]:
    """Begin to iterate a data set.

    Args:
        epoch: it is passed on, if it has a method `set_epoch`.
        state: of its `state_dict()`, where to go on; None: at the epoch's beginning.
    """
    unread = _unread_state(dataset)
    set_epoch(dataset, epoch)
    if has_state(dataset):
        dataset.load_state_dict(copy.deepcopy(unread if state is None else state))
    return iter(dataset)


def has_state(dataset: Any) -> bool:
    """Return True if the data set knows its position."""
    return hasattr(dataset, "state_dict")


def set_epoch(thing: Any, epoch: int) -> None:
    """Tell a sampler or data set which epoch begins, if it has a method `set_epoch` for that."""
    if hasattr(thing, "set_epoch"):
        thing.set_epoch(epoch)


def _unread_state(dataset: Any) -> Any:
    """Return the state that the data set had when this was first called for it; None if it has none."""
    if has_state(dataset) and id(dataset) not in _unread:
        _unread[id(dataset)] = copy.deepcopy(dataset.state_dict())
        weakref.finalize(dataset, _unread.pop, id(dataset), None)  # a later object may have the same id
    return _unread.get(id(dataset))
