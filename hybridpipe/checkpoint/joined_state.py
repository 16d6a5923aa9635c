"""JoinedState: an optimizer's state that a rank updates, joined from the files of a checkpoint.

Knows keys and elements; no plan and no worker. Invariant: of a file no more is kept than the rank updates
a part of, and a parameter's state comes back whole, or is refused.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import torch

from hybridpipe.errors import UserError
from hybridpipe.stage.parts import Piece, common, join
from hybridpipe.stage.state import OfParameter


class JoinedState:
    """The state of the parameters that a rank updates, from any number of replicas that wrote it.

    Args:
        shapes: of these parameters, by key.
        ranges: the elements that the rank updates, where these are not all.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], ranges: Mapping[str, range]) -> None:
        self._shapes, self._ranges = shapes, ranges
        self._found = defaultdict[str, list[OfParameter]](list)

    def add(self, found: Mapping[str, OfParameter]) -> bool:
        """Note what is wanted of a file's state; return False if it has none of these parameters."""
        for key in found.keys() & self._shapes.keys():
            if common(self._of(found[key], key), self._wanted(key)) or found[key].part is None:
                self._found[key].append(found[key])
        return not found.keys().isdisjoint(self._shapes)

    @property
    def is_complete(self) -> bool:
        """True if the files so far have all that is wanted."""
        return all(self._lacks(key) == 0 for key in self._shapes)

    def joined(self, where: str) -> dict[str, OfParameter]:
        """Return the state of each parameter that the files have.

        Args:
            where: the checkpoint's name, for error messages.

        Raises:
            UserError: they have a part of it only, or parts that do not belong together.
        """
        result = {}
        for key, found in self._found.items():
            if self._lacks(key):
                raise UserError(f"{where}: lacks optimizer state of {self._lacks(key)} elements of {key}")
            pieces = [Piece(each.state, each.part) for each in found]
            try:
                state = join(pieces, self._shapes[key], self._ranges.get(key))
            except (LookupError, RuntimeError, TypeError, ValueError) as error:
                raise UserError(f"{where}: optimizer state of {key} cannot be joined: {error!r}") from None
            result[key] = replace(found[0], state=state, part=self._ranges.get(key))
        return result

    def _wanted(self, key: str) -> range:
        return self._ranges.get(key, range(self._shapes[key].numel()))

    def _of(self, found: OfParameter, key: str) -> range:
        return range(self._shapes[key].numel()) if found.part is None else found.part

    def _lacks(self, key: str) -> int:
        """Return the number of wanted elements that no file has had, perhaps -1 for a key in none."""
        found = self._found.get(key)
        if found is None:
            return -1
        wanted = self._wanted(key)
        return len(wanted) - sum(len(common(self._of(each, key), wanted)) for each in found)
