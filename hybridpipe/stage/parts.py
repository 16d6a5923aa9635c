"""Parts: an optimizer's state of some elements of a parameter, cut from the whole and joined again.

Knows one parameter's state, no files and no ranks. A part is a `range` of its elements in C order.
Invariant: only tensors with a number for each element are cut; all parts have the rest alike, such as `step`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """State of the elements in `part` of a parameter; their tensors have one dimension.

    Args:
        part: None for all elements, whose tensors have the parameter's shape.
    """

    state: Any
    part: range | None = None


def join(
    pieces: Sequence[Piece], shape: torch.Size, wanted: range | None = None, copies: bool = False
) -> Any:
    """Return the state of the wanted elements; by default of all, in the parameter's shape.

    Args:
        copies: the result shall keep no memory but its own; else it may be the first piece's.

    Raises:
        LookupError: the pieces lack an element.
    """
    whole = range(shape.numel())
    spans = [whole if piece.part is None else piece.part for piece in pieces]
    target = whole if wanted is None else wanted
    if sum(len(common(span, target)) for span in spans) < len(target):
        raise LookupError(f"elements {target.start} to {target.stop} are not complete")
    shapes = [shape if piece.part is None else torch.Size([len(piece.part)]) for piece in pieces]
    of_result = shape if wanted is None else torch.Size([len(wanted)])

    def joined(values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, dict):
            return {name: joined([value[name] for value in values]) for name in first}
        if type(first) in (list, tuple):
            return type(first)(joined(each) for each in zip(*values, strict=True))
        each = zip(values, shapes, strict=True)
        if not all(isinstance(value, Tensor) and value.shape == own for value, own in each):
            return first
        if spans[0] == target and not copies:
            return first.view(of_result)
        return _elements([value.reshape(-1) for value in values], spans, target).view(of_result)

    return joined([piece.state for piece in pieces])


def _elements(values: Sequence[Tensor], spans: Sequence[range], wanted: range) -> Tensor:
    found = torch.empty(len(wanted), dtype=values[0].dtype, device=values[0].device)
    for value, span in zip(values, spans, strict=True):
        both = common(span, wanted)
        found[both.start - wanted.start : both.stop - wanted.start] = value[
            both.start - span.start : both.stop - span.start
        ]
    return found


def common(one: range, other: range) -> range:
    """Return the elements that two parts have in common, perhaps none."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))
