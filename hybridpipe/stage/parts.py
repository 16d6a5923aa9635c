"""Parts: an optimizer's state of some elements of a parameter, cut from the whole and joined again.

Knows one parameter's state, no files and no ranks. Ranks hold parts of parameters (`HeldPart`), and under
ZeRO a rank updates a `range` of what it holds, of its elements in C order.
Invariant: only tensors with a number for each element are cut; all parts have the rest alike, such as `step`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridpipe.model.held_part import HeldPart, common_elements


class Piece(NamedTuple):
    """State of some elements of a parameter.

    Args:
        part: of the elements that are held; their tensors have one dimension. None: all of them, in tensors
            of the held part's shape.
        held: what is held; None: the whole parameter.
    """

    state: Any
    part: range | None = None
    held: HeldPart | None = None


def lacking(
    pieces: Sequence[Piece], shape: torch.Size, wanted: range | None = None, held: HeldPart | None = None
) -> int:
    """Return the number of wanted elements that no piece has.

    Args:
        shape: of the whole parameter.
        wanted, held: as in a `Piece`.
    """
    pieces = _distinct(pieces)
    target = _elements_of(wanted, held, shape)
    there = (_elements_of(each.part, held, shape) for each in pieces if each.held == held)
    missing = len(target) - sum(len(common(each, target)) for each in there)
    if not missing:
        return 0
    if any(each.part is not None for each in pieces):  # joined by way of the whole
        return shape.numel() - sum(len(_elements_of(each.part, each.held, shape)) for each in pieces)
    return _held_shape(held, shape).numel() - sum(common_elements(each.held, held, shape) for each in pieces)


def join(
    pieces: Sequence[Piece],
    shape: torch.Size,
    wanted: range | None = None,
    held: HeldPart | None = None,
    copies: bool = False,
) -> Any:
    """Return the state of the wanted elements; by default of all, in the parameter's shape.

    Args:
        shape: of the whole parameter.
        wanted, held: as in a `Piece`.
        copies: the result shall keep no memory but its own; else it may be the first piece's.

    Raises:
        LookupError: the pieces lack an element.
    """
    if count := lacking(pieces, shape, wanted, held):
        raise LookupError(f"{count} elements are missing")
    pieces = _distinct(pieces)
    mine = [each for each in pieces if each.held == held]
    if not lacking(mine, shape, wanted, held):
        return _within(mine, _held_shape(held, shape), wanted, copies)
    held_parts = dict.fromkeys(each.held for each in pieces)
    states = [
        _within([each for each in pieces if each.held == one], _held_shape(one, shape)) for one in held_parts
    ]

    def cut(values: Sequence[Tensor]) -> Tensor:
        whole = torch.empty(shape, dtype=values[0].dtype, device=values[0].device)
        for one, value in zip(held_parts, values, strict=True):
            whole.copy_(value) if one is None else one.put(whole, value)
        return whole if held is None else held.of(whole)

    one = Piece(_changed(states, [_held_shape(each, shape) for each in held_parts], cut))
    return _within([one], _held_shape(held, shape), wanted, copies)


def _distinct(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the first of the pieces with the same elements; several stages write what they share."""
    return list({(each.part, each.held): each for each in reversed(pieces)}.values())[::-1]


def _within(
    pieces: Sequence[Piece], shape: torch.Size, wanted: range | None = None, copies: bool = False
) -> Any:
    """Return the state of the wanted elements of what is held, of that shape."""
    whole = range(shape.numel())
    spans = [whole if piece.part is None else piece.part for piece in pieces]
    target = whole if wanted is None else wanted
    shapes = [shape if piece.part is None else torch.Size([len(piece.part)]) for piece in pieces]
    of_result = shape if wanted is None else torch.Size([len(wanted)])

    def joined(values: Sequence[Tensor]) -> Tensor:
        if spans[0] == target and not copies:
            return values[0].view(of_result)
        return _elements([value.reshape(-1) for value in values], spans, target).view(of_result)

    return _changed([piece.state for piece in pieces], shapes, joined)


def _changed(states: Sequence[Any], shapes: Sequence[torch.Size], join: Callable[..., Tensor]) -> Any:
    """Return the states as one, in which tensors with a number for each element are joined."""
    first = states[0]
    if isinstance(first, dict):
        return {name: _changed([state[name] for state in states], shapes, join) for name in first}
    if type(first) in (list, tuple):
        return type(first)(_changed(each, shapes, join) for each in zip(*states, strict=True))
    each = zip(states, shapes, strict=True)
    if not all(isinstance(value, Tensor) and value.shape == own for value, own in each):
        return first
    return join(states)


def _elements(values: Sequence[Tensor], spans: Sequence[range], wanted: range) -> Tensor:
    found = torch.empty(len(wanted), dtype=values[0].dtype, device=values[0].device)
    for value, span in zip(values, spans, strict=True):
        both = common(span, wanted)
        found[both.start - wanted.start : both.stop - wanted.start] = value[
            both.start - span.start : both.stop - span.start
        ]
    return found


def _held_shape(held: HeldPart | None, shape: torch.Size) -> torch.Size:
    return shape if held is None else held.shape


def _elements_of(part: range | None, held: HeldPart | None, shape: torch.Size) -> range:
    return range(_held_shape(held, shape).numel()) if part is None else part


def is_part_of(
    piece: Piece, shape: torch.Size, wanted: range | None = None, held: HeldPart | None = None
) -> bool:
    """Return True if a piece has some of the wanted elements, or all there are of none.

    Args:
        shape: of the whole parameter.
        wanted, held: as in a `Piece`.
    """
    if piece.held != held:
        return common_elements(piece.held, held, shape) > 0
    both = common(_elements_of(piece.part, held, shape), _elements_of(wanted, held, shape))
    return piece.part is None or len(both) > 0


def common(one: range, other: range) -> range:
    """Return the elements that two parts have in common, perhaps none."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))
