"""JoinedState: an optimizer's state that a rank updates, joined from the files of a checkpoint.

Knows keys and elements; no plan and no worker. Invariant: of a file no more is kept than the rank updates
a part of, and a parameter's state comes back whole, or is refused.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from hybridpipe.errors import UserError
from hybridpipe.model.held_part import HeldPart
from hybridpipe.stage.parts import is_part_of, join, lacking
from hybridpipe.stage.state import OfParameter


class Wanted(NamedTuple):
    """The elements of a parameter that a rank updates.

    Args:
        shape: of the whole parameter.
        held: what the rank holds of it; None: all.
        part: the elements of these that it updates, where it does not update all.
    """

    shape: torch.Size
    held: HeldPart | None = None
    part: range | None = None


class JoinedState:
    """The state of the parameters that a rank updates, from any number of ranks that wrote it.

    Args:
        wanted: of these parameters, by key.
    """

    def __init__(self, wanted: Mapping[str, Wanted]) -> None:
        self._wanted = wanted
        self._found = defaultdict[str, list[OfParameter]](list)

    def add(self, found: Mapping[str, OfParameter]) -> bool:
        """Note what is wanted of a file's state; return False if it has none of these parameters."""
        for key in found.keys() & self._wanted.keys():
            wanted = self._wanted[key]
            if is_part_of(found[key].piece, wanted.shape, wanted.part, wanted.held):
                self._found[key].append(found[key])
        return not found.keys().isdisjoint(self._wanted)

    @property
    def is_complete(self) -> bool:
        """True if the files so far have all that is wanted."""
        return all(key in self._found and not self._lacks(key) for key in self._wanted)

    def joined(self, where: str) -> dict[str, OfParameter]:
        """Return the state of each parameter that the files have.

        Args:
            where: the checkpoint's name, for error messages.

        Raises:
            UserError: they have a part of it only, or parts that do not belong together.
        """
        result = {}
        for key, found in self._found.items():
            if count := self._lacks(key):
                raise UserError(f"{where}: lacks optimizer state of {count} elements of {key}")
            shape, held, part = self._wanted[key]
            try:
                state = join([each.piece for each in found], shape, part, held)
            except (LookupError, RuntimeError, TypeError, ValueError) as error:
                raise UserError(f"{where}: optimizer state of {key} cannot be joined: {error!r}") from None
            result[key] = replace(found[0], state=state, part=part, held=held)
        return result

    def _lacks(self, key: str) -> int:
        shape, held, part = self._wanted[key]
        return lacking([each.piece for each in self._found[key]], shape, part, held)
